"""Needle-in-a-haystack: what share of the needles a model names, by length and by depth, in its own greedy answer."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data.needle import IGNORED, NeedleSamples, Sample, training_rows
from data.tokenizer import Tokenizer
from eval.generate import StopAt, generate
from model.gpt import GPT
from training.distributed import Process

DEPTHS = 10  # equal parts of the haystack in the results by depth
MARGIN = 8  # new tokens beyond the longest answer, so that an answer that does not end is seen not to
PAIR = re.compile(r"\s*([^=;]*[^=;\s])\s*=\s*([0-9]+)\s*")


def parse_answer(text: str) -> dict[str, str]:
    """The number of each city that an answer `city=number;city=number;...` names, in any order.

    Strict: a part between semicolons that is anything else names nothing (so "Rome=12345678" does not name 1234567, nor
    does "Rome=1234567 or so"), and of a city named twice the first counts.
    """
    named: dict[str, str] = {}
    for part in text.split(";"):
        if pair := PAIR.fullmatch(part):
            named.setdefault(pair.group(1), pair.group(2))
    return named


@dataclass(frozen=True)
class Outcome:
    """What a model made of one sample.

    Attributes:
        answer: its own greedy answer.
        found: for each needle, whether city and number are right in it.
        forced: the same under teacher forcing, where the model reads the true answer and is asked for each next token.
    """

    sample: Sample
    index: int
    answer: str
    found: tuple[bool, ...]
    forced: tuple[bool, ...]

    def record(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """One line of the per-sample results."""
        needles = [
            {
                "city": needle.city,
                "number": needle.number,
                "start": needle.start,
                "depth": round(needle.depth, 6),
                "found": found,
                "teacher_forced": forced,
            }
            for needle, found, forced in zip(self.sample.needles, self.found, self.forced, strict=True)
        ]
        tail = tokenizer.decode(self.sample.tokens[: self.sample.prompt_length][-80:])
        return {
            "length": len(self.sample.tokens),
            "index": self.index,
            "expected": self.sample.answer,
            "answer": self.answer,
            "needles": needles,
            "end_of_prompt": tail,
        }


@torch.no_grad()
def find_needles(
    model: GPT,
    samples: NeedleSamples,
    length: int,
    count: int,
    process: Process,
    tokens_at_once: int = 65536,
    progress: bool = False,
) -> list[Outcome]:
    """The outcomes of the samples 0 .. count - 1 of a length, which the processes share out; all get all of them.

    `tokens_at_once` are in memory at a time, at least one sample; the prompts are fed in pieces of as many.
    """
    limit = samples.answer_limit + MARGIN
    rows = max(1, tokens_at_once // length)
    mine = range(process.rank, count, process.world_size)
    written = torch.zeros(count, limit, dtype=torch.int64)  # ids + 1, so that a sum over processes joins them
    forced = torch.zeros(count, samples.task.needles, dtype=torch.int64)
    stop = StopAt(samples.tokenizer)
    vocab_size = min(samples.tokenizer.vocab_size, model.config.vocab_size)
    with tqdm(total=len(mine), desc=f"needles at {length}", leave=False, disable=None if progress else True) as bar:
        for first in range(0, len(mine), rows):
            indices = list(mine[first : first + rows])
            batch = [samples.sample(index, length) for index in indices]
            answers = generate(
                model,
                [sample.prompt for sample in batch],
                limit,
                done=stop,
                vocab_size=vocab_size,
                prefill_tokens=tokens_at_once,
                autocast=process.autocast,
            )
            right = teacher_forced(model, batch, vocab_size, process.autocast)
            for index, sample, answer, tokens_right in zip(indices, batch, answers, right, strict=True):
                written[index, : len(answer)] = torch.tensor(answer) + 1
                forced[index] = torch.tensor([bool(tokens_right[needle.answer].all()) for needle in sample.needles])
            bar.update(len(batch))
    written, forced = (process.sum(x.to(process.device)).cpu() for x in (written, forced))
    return [_outcome(samples, index, length, written[index], forced[index]) for index in range(count)]


def _outcome(samples: NeedleSamples, index: int, length: int, written: Tensor, forced: Tensor) -> Outcome:
    sample = samples.sample(index, length)
    answer = StopAt(samples.tokenizer).text((written[written > 0] - 1).tolist())
    named = parse_answer(answer)
    found = tuple(named.get(needle.city) == needle.number for needle in sample.needles)
    return Outcome(sample, index, answer, found, tuple(bool(right) for right in forced))


def teacher_forced(
    model: GPT, batch: Sequence[Sample], vocab_size: int, autocast: Callable[[], AbstractContextManager]
) -> np.ndarray:
    """For each token of the answers, whether it is the most probable one behind the true ones; (rows, length)."""
    tokens, targets = (x.to(model.output.weight.device) for x in training_rows(batch))
    answers = targets != IGNORED
    with autocast():
        logits = model.output(model.hidden(tokens)[answers])  # of the answers only: memory
    best = logits[:, :vocab_size].argmax(-1)
    right = torch.zeros_like(answers)
    right[answers] = best == targets[answers]
    return right.roll(1, dims=1).cpu().numpy()  # at the place of the token itself, not of the one before it


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Accuracy in the model's own answer (`mean`) and under teacher forcing, over all needles and by depth.

    The standard error is that of the mean over samples, because the needles of a sample are not independent.
    """
    found, forced = (np.array([getattr(o, key) for o in outcomes], dtype=float) for key in ("found", "forced"))
    depths = np.array([[needle.depth for needle in outcome.sample.needles] for outcome in outcomes])
    part = np.minimum((depths * DEPTHS).astype(int), DEPTHS - 1)
    by_depth = [
        {
            "from": index / DEPTHS,
            "to": (index + 1) / DEPTHS,
            "mean": float(found[part == index].mean()) if (part == index).any() else None,
            "needles": int((part == index).sum()),
        }
        for index in range(DEPTHS)
    ]
    return {**_statistics(found), "by_depth": by_depth, "teacher_forced": _statistics(forced)}


def _statistics(right: np.ndarray) -> dict[str, Any]:
    samples = right.mean(axis=1)
    stderr = float(samples.std(ddof=1) / len(samples) ** 0.5) if len(samples) > 1 else None
    return {"mean": float(right.mean()), "stderr": stderr, "needles": right.size, "samples": len(samples)}


@torch.no_grad()
def answer_loss(
    model: GPT,
    samples: NeedleSamples,
    length: int,
    count: int,
    process: Process,
    tokens_at_once: int,
    between: Callable[[], None] = lambda: None,
) -> float:
    """Mean cross-entropy in nats per token of the answers of samples 0 .. count - 1, shared out over the processes.

    `between` is called before each batch, equally often on every process; what it raises ends the evaluation.
    """
    total = torch.zeros(2, dtype=torch.float64, device=process.device)
    mine = range(process.rank, count, process.world_size)
    rows = max(1, tokens_at_once // length)
    for first in range(0, math.ceil(count / process.world_size), rows):
        between()
        if not (batch := [samples.sample(index, length) for index in mine[first : first + rows]]):
            continue  # the last round may have fewer samples than processes
        tokens, targets = (x.to(process.device) for x in training_rows(batch))
        with process.autocast():
            total[0] += model(tokens, targets, reduction="sum").double()
        total[1] += (targets != IGNORED).sum()
    loss, tokens = process.sum(total).tolist()
    return loss / tokens
