"""Needle-in-a-haystack samples (arXiv:2505.17083): sentences hidden in real text, and a question for what they say.

A sample is a pure function of (seed, split, index, length), and has exactly `length` tokens:

    haystack with needles, cue, city1=number1;city2=number2;city3=number3, end of text

The answer names the needles in the order of their appearance. Needles lie between tokens of the haystack, each
tokenised by itself, so that what the model reads decodes to exactly the sentence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int64

from data.cities import CITIES
from data.loader import Rows, TokenStream
from data.tokenizer import Tokenizer

SPLITS = ("train", "val", "test")  # train hides needles in the training split of the shards, the others in validation
IGNORED = -100  # a target that does not count in the loss


@dataclass(frozen=True)
class NeedleTask:
    """What a needle says and how it is asked for.

    Args:
        template: the sentence, with {city} and {number}.
        needles: in a sample, each with a city of its own.
        digits: of a number, which never starts with 0.
        cue: the text between haystack and answer.

    Raises ValueError for a template without its two places, or a number out of range.
    """

    template: str = "The special magic {city} number is {number}."
    needles: int = 3
    digits: int = 7
    cue: str = "\nAnswer: "

    def __post_init__(self) -> None:
        if not 1 <= self.needles <= len(CITIES):
            raise ValueError(f"needles={self.needles} must lie in 1..{len(CITIES)}, the number of known cities")
        if not 1 <= self.digits <= 18:
            raise ValueError(f"digits={self.digits} must lie in 1..18")
        if any(self.template.count(place) != 1 for place in ("{city}", "{number}")):
            raise ValueError(f"template={self.template} must hold {{city}} and {{number}}, each once")

    def sentence(self, city: str, number: str) -> str:
        return self.template.replace("{number}", number).replace("{city}", city)


@dataclass(frozen=True)
class Needle:
    """One needle of a sample.

    Attributes:
        start, stop: its tokens in the sample, [start, stop).
        depth: the share of the haystack's tokens in front of it, 0 to 1.
        answer: the tokens in the sample of its `city=number`, and of the ";" or end of text behind it.
    """

    city: str
    number: str
    start: int
    stop: int
    depth: float
    answer: slice


@dataclass(frozen=True)
class Sample:
    """A haystack with needles, in order of appearance; the answer are the tokens from prompt_length on."""

    tokens: Int64[np.ndarray, " length"]
    prompt_length: int
    needles: tuple[Needle, ...]

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.prompt_length].tolist()

    @property
    def answer(self) -> str:
        return ";".join(f"{needle.city}={needle.number}" for needle in self.needles)


class NeedleSamples:
    """The samples of one seed and split, over the haystack of a stream of tokens.

    A sample's haystack is a stretch of the stream at a random place. Training samples and the others never share one:
    they read different splits of the shards.

    Raises ValueError for an unknown split or a seed below 0.
    """

    def __init__(self, stream: TokenStream, tokenizer: Tokenizer, task: NeedleTask, seed: int, split: str):
        if split not in SPLITS:
            raise ValueError(f"split={split} is unknown; choose one of: {', '.join(SPLITS)}")
        if seed < 0:
            raise ValueError(f"seed={seed} must be at least 0")
        self.stream, self.tokenizer, self.task = stream, tokenizer, task
        self.seed, self.split = seed, split

    @property
    def answer_limit(self) -> int:
        """The most tokens that an answer can take, its end included."""
        pairs = self._longest([f"{city}={'0' * self.task.digits}" for city in CITIES])
        return pairs + self.task.needles  # a ";" behind each but the last, and the end of text

    def check(self, length: int) -> None:
        """Raises ValueError if a sample of this length could have no haystack, or the stream is too short for one."""
        sentences = self._longest([self.task.sentence(city, "0" * self.task.digits) for city in CITIES])
        taken = sentences + self.answer_limit + len(self._encode(self.task.cue))
        if length <= taken:
            raise ValueError(
                f"length={length} is too short: {self.task.needles} needles and their answer take up to {taken} "
                f"tokens; use at least {taken + 1}, or fewer needle.needles or needle.digits"
            )
        if len(self.stream) < length:
            raise ValueError(
                f"{self.stream.paths[0].parent} has {len(self.stream)} tokens for the haystacks of split={self.split}, "
                f"fewer than length={length}; prepare more text, or use shorter lengths"
            )

    def sample(self, index: int, length: int) -> Sample:
        """Sample number `index` of exactly `length` tokens. Raises ValueError where needles and answer do not fit."""
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index, length])
        task = self.task
        cities = [CITIES[choice] for choice in rng.choice(len(CITIES), task.needles, replace=False)]
        numbers = [str(number) for number in rng.integers(10 ** (task.digits - 1), 10**task.digits, task.needles)]
        pairs = [f"{city}={number}" for city, number in zip(cities, numbers, strict=True)]
        sentences = list(map(task.sentence, cities, numbers))
        cue, separator, *encoded = map(self._encode, [task.cue, ";", *sentences, *pairs])
        sentences, pairs = encoded[: task.needles], encoded[task.needles :]
        ends = [separator] * (task.needles - 1) + [np.array([self.tokenizer.end_of_text])]
        answers = [np.concatenate(parts) for parts in zip(pairs, ends, strict=True)]

        size = length - len(cue) - sum(map(len, [*sentences, *answers]))
        if size < task.needles:
            raise ValueError(f"length={length} is too short for {task.needles} needles and their answer")
        offset = int(rng.integers(len(self.stream) - size + 1))
        haystack = self.stream.read(offset, size)
        gaps = np.sort(rng.choice(size + 1, task.needles, replace=False))  # 0 is in front of the first token
        pieces = np.split(haystack, gaps)
        parts = [piece for pair in zip(pieces, [*sentences, cue], strict=True) for piece in pair]
        tokens = np.concatenate([*parts, *answers]).astype(np.int64)
        starts = gaps + np.cumsum([0, *map(len, sentences)])[:-1]
        answer_starts = length - np.cumsum([0, *map(len, answers[::-1])])[::-1]
        needles = tuple(
            Needle(
                city, number, int(start), int(start) + len(sentence), float(gap / size), slice(int(first), int(last))
            )
            for city, number, start, sentence, gap, (first, last) in zip(
                cities, numbers, starts, sentences, gaps, pairwise(answer_starts), strict=True
            )
        )
        assert len(tokens) == length
        return Sample(tokens, int(answer_starts[0]), needles)

    def _encode(self, text: str) -> np.ndarray:
        return self.tokenizer.encode(text).astype(np.int64)

    def _longest(self, texts: Sequence[str]) -> int:
        """The most tokens that `needles` of the texts can take, whatever digits stand for the zeros in them."""
        zeros = "0" * self.task.digits
        without = [len(self._encode(text.replace(zeros, ""))) for text in texts]
        longest = sorted(without)[-self.task.needles :]
        return sum(longest) + self.task.needles * self.task.digits  # at most one token a digit


class NeedleBatches:
    """The samples of a fine-tuning run that one process of `world_size` computes; only the answer counts in the loss.

    The first `first_steps` steps take shorter samples of `first_length`, as many more as there are tokens in a step:
    what a small model has to learn first, to copy, shows in them in more answers a second and with less in between.

    Row r of a step of n rows is sample n * step + r of the training split, so it depends neither on the number of
    processes nor on where a run was interrupted. Raises ValueError for rows that do not divide and lengths that do not
    fit.
    """

    def __init__(
        self,
        samples: NeedleSamples,
        length: int,
        rows_per_step: int,
        rank: int = 0,
        world_size: int = 1,
        first_length: int | None = None,
        first_steps: int = 0,
    ):
        first_length = first_length or length
        if length % first_length:
            raise ValueError(
                f"train.first_length={first_length} must divide train.length={length}, so that every step has as many "
                "tokens"
            )
        for size in (first_length, length):
            samples.check(size)
        if rows_per_step < 1 or rows_per_step % world_size:
            raise ValueError(
                f"{world_size} processes cannot share the train.rows={rows_per_step} of a step; start a number that "
                "divides them"
            )
        self.samples, self.length = samples, length
        self.rows_per_step, self.rows_per_rank = rows_per_step, rows_per_step // world_size
        self.rank, self.world_size = rank, world_size
        self.first_length, self.first_steps = first_length, first_steps

    def batch(self, step: int) -> Rows:
        """This process's tokens and targets of a step, each (rows, length), `rows_per_rank` times `length` tokens."""
        length = self.first_length if step < self.first_steps else self.length
        rows = self.rows_per_rank * (self.length // length)
        first = (step * self.world_size + self.rank) * rows
        return training_rows([self.samples.sample(first + row, length) for row in range(rows)])


def training_rows(samples: Sequence[Sample]) -> Rows:
    """Tokens and targets (the next token, where it belongs to the answer) of samples of equal length."""
    tokens = np.stack([sample.tokens for sample in samples])
    targets = np.full_like(tokens, IGNORED)
    for row, sample in enumerate(samples):
        targets[row, sample.prompt_length - 1 : -1] = sample.tokens[sample.prompt_length :]
    return torch.from_numpy(tokens), torch.from_numpy(targets)
