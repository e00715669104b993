"""Text out of a model: greedy and sampled decoding, one token a step from a cache, for prompts of any lengths together.

Prompts of equal length share a cache. So every row has its own exact positions and distances under every position
scheme, without padding, and a batch gives what each of its prompts gives alone.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from data.manifest import read_manifest
from data.tokenizer import Tokenizer, load_tokenizer
from model.cache import Cache
from model.gpt import GPT


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits.

    Temperature 0 takes the most probable token (the lowest id of several). Above, it is drawn from softmax(logits /
    temperature), of which `top_k` keeps the k most probable tokens, and then `top_p` the fewest most probable ones that
    together have at least that probability. Row r of a batch has random numbers of its own, those of `seed` + r.

    Raises ValueError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be a finite number, at least 0 (0: greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or null for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, or null for all tokens")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be at least 0")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError(
                f"top_k={self.top_k}, top_p={self.top_p} choose among tokens, but temperature={self.temperature} takes "
                "the most probable one; set temperature=1"
            )

    def generators(self, rows: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(self.seed + row) for row in range(rows)]

    def probabilities(self, logits: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
        """What the next token is drawn from, for a temperature above 0."""
        scaled = logits.double() / self.temperature
        if self.top_k is not None and self.top_k < scaled.numel():
            kept = scaled.topk(self.top_k).indices
            scaled = torch.full_like(scaled, -math.inf).index_copy(0, kept, scaled[kept])
        probability = scaled.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, ids = probability.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            probability[ids[before >= self.top_p]] = 0
        return probability

    def choose(self, logits: Float[Tensor, "V"], generator: torch.Generator) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), 1, generator=generator))


GREEDY = Sampling()


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    done: Callable[[int, list[int]], bool] = lambda row, tokens: False,
    inference_length: int | None = None,
    vocab_size: int | None = None,
    prefill_tokens: int = 65536,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> list[list[int]]:
    """The tokens that follow each prompt, at most `max_new_tokens` of them.

    Args:
        prompts: token ids, at least one each.
        sampling: how a token is chosen; by default greedily.
        done: called with a prompt's number and its new tokens whenever it gets one; true ends it, that token included.
        inference_length: what NTK, YaRN and LogN's count="length" go by, from the first token on; by default each
            prompt's length plus max_new_tokens, which is also its least value.
        vocab_size: ids from here on, which only fill up the output layer, are never chosen.
        prefill_tokens: so many tokens of the prompts are fed at a time, at least one position.
        autocast: the context of every forward pass, such as `Process.autocast`.

    Raises ValueError, before any work, for a prompt without tokens, an id outside the vocabulary, or a number that is
    too small.
    """
    _check(prompts, max_new_tokens, inference_length, model.config.vocab_size, prefill_tokens)
    groups = [
        (rows, model.new_cache(len(rows), inference_length or length + max_new_tokens))
        for length, rows in _by_length(prompts).items()
    ]
    device = model.output.weight.device
    with autocast():
        scores = []
        for rows, cache in groups:
            inputs = torch.tensor([list(prompts[row]) for row in rows], device=device)
            scores.append(_prefill(model, inputs, cache, prefill_tokens))
        scores = torch.cat(scores)
        generators = sampling.generators(len(prompts))
        new: list[list[int]] = [[] for _ in prompts]
        running = set(range(len(prompts)))
        while True:
            order = [row for rows, _ in groups for row in rows]
            for row, row_scores in zip(order, scores[:, :vocab_size].float().cpu(), strict=True):
                if row not in running:  # it waits for the others of its group
                    continue
                new[row].append(sampling.choose(row_scores, generators[row]))
                if done(row, new[row]) or len(new[row]) == max_new_tokens:
                    running.remove(row)
            groups = [(rows, cache) for rows, cache in groups if running.intersection(rows)]
            if not groups:
                return new
            last = torch.tensor([[new[row][-1]] for rows, _ in groups for row in rows], device=device)
            scores = model.extend(last, [cache for _, cache in groups])


def _by_length(prompts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """The numbers of the prompts of each length."""
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(row)
    return groups


def _prefill(model: GPT, prompts: Int[Tensor, "B T"], cache: Cache, tokens_at_once: int) -> Float[Tensor, "B V"]:
    """Fills an empty cache in pieces; the logits behind the last token."""
    scores = torch.empty(0)
    for piece in prompts.split(max(1, tokens_at_once // len(prompts)), dim=1):
        scores = model.extend(piece, [cache])
    return scores


def _check(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    inference_length: int | None,
    vocab_size: int,
    prefill_tokens: int,
) -> None:
    if max_new_tokens < 1 or prefill_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} and prefill_tokens={prefill_tokens} must be at least 1")
    if not prompts:
        raise ValueError("there is no prompt; give at least one")
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {row} holds no token; start it with the end-of-text token or some text")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise ValueError(f"prompt {row} has ids {min(prompt)} to {max(prompt)}, outside 0 to {vocab_size - 1}")
    needed = max(map(len, prompts)) + max_new_tokens
    if inference_length is not None and inference_length < needed:
        raise ValueError(
            f"inference_length={inference_length} is under the longest prompt and max_new_tokens={max_new_tokens} "
            f"together; raise it to {needed} or more"
        )


class StopAt:
    """Ends a text at its end-of-text token or behind the first of some strings; for `generate(done=...)`."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        if "" in stop:
            raise ValueError(f"stop={list(stop)} holds an empty string, which every text contains; leave it out")
        self.tokenizer, self.stop = tokenizer, list(stop)
        # A token is at least one byte, so a string that ends in the last token starts at most so many before it.
        self._reach = max((len(text.encode()) for text in stop), default=0)

    def __call__(self, row: int, tokens: list[int]) -> bool:
        if tokens[-1] == self.tokenizer.end_of_text:
            return True
        tail = self.tokenizer.decode(tokens[-self._reach :]) if self.stop else ""
        return any(text in tail for text in self.stop)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, without the end-of-text token or the first stop string and what follows."""
        kept = tokens[:-1] if len(tokens) and tokens[-1] == self.tokenizer.end_of_text else tokens
        text = self.tokenizer.decode(kept)
        ends = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        return text[: min(ends)] if ends else text


def run_tokenizer(trained: Any, name: str | None) -> Tokenizer:
    """The tokenizer that a run's data was prepared with, or the named one. Raises ValueError where nothing tells."""
    if name is None:
        name = (read_manifest(Path(trained.data.dir)) or {}).get("tokenizer")
    if name is None:
        raise ValueError(
            f"tokenizer=null, and no manifest in data.dir={trained.data.dir} names the one of this run; set "
            "tokenizer=gpt2 or tokenizer=bytes"
        )
    tokenizer = load_tokenizer(name)
    if tokenizer.vocab_size > trained.model.vocab_size:
        raise ValueError(
            f"tokenizer={name} has {tokenizer.vocab_size} ids, but the run's model.vocab_size="
            f"{trained.model.vocab_size}; choose the tokenizer of its data"
        )
    return tokenizer
