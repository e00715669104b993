"""The documents of prepared data: how many, how long, and what they say; read once from end to end, a chunk at a time.

A document is its end-of-text token and what follows, up to the next one; its length counts both. Memory grows neither
with the tokens nor with the documents: n tokens hold documents of at most sqrt(2 n) different lengths.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.loader import TokenStream
from data.tokenizer import Tokenizer


@dataclass
class Documents:
    """The documents of one split.

    lengths: how many documents there are of each length, in tokens; the last one ends where the split does.
    headless_tokens: what precedes the first end-of-text token, the rest of a document that starts elsewhere.
    by_file: how many start in each file.
    """

    tokens: int = 0
    largest_id: int = 0
    headless_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    by_file: dict[str, int] = field(default_factory=dict)


class Bin(NamedTuple):
    """Documents of `low` to 2 `low` - 1 tokens: how many, and how many tokens they hold together."""

    low: int
    documents: int
    tokens: int


class Sample(NamedTuple):
    """A document's first tokens as text, and where its end-of-text token stands in the split."""

    position: int
    text: str


def count_documents(stream: TokenStream, end_of_text: int, bar: tqdm) -> Documents:
    """Reads the whole stream once; `bar` advances by tokens. Raises as `TokenStream.parts` does."""
    found = Documents(tokens=len(stream), headless_tokens=len(stream))
    position, last = 0, np.empty(0, np.int64)  # where the latest document starts, once there is one
    for path in stream.paths:
        found.by_file[path.name] = 0
        for ids in TokenStream([path], stream.vocab_size).chunks():
            starts = position + np.flatnonzero(ids == end_of_text)
            if starts.size and not last.size:
                found.headless_tokens = int(starts[0])
            edges = np.concatenate([last, starts])
            _count(found.lengths, np.diff(edges))
            last = edges[-1:]
            found.by_file[path.name] += starts.size
            found.largest_id = max(found.largest_id, int(ids.max()))
            position += ids.size
            bar.update(ids.size)
    _count(found.lengths, len(stream) - last)
    return found


def histogram(lengths: Counter[int]) -> list[Bin]:
    """The documents by powers of two, from the shortest's bin to the longest's, empty ones between included."""
    documents: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for length, count in lengths.items():
        documents[length.bit_length() - 1] += count
        tokens[length.bit_length() - 1] += count * length
    if not documents:
        return []
    return [Bin(2**k, documents[k], tokens[k]) for k in range(min(documents), max(documents) + 1)]


def median(lengths: Counter[int]) -> int:
    """The length that half of the documents do not exceed."""
    values, counts = np.array(sorted(lengths.items())).T
    return int(values[np.searchsorted(counts.cumsum(), counts.sum() / 2)])


def draw_samples(
    stream: TokenStream, documents: Documents, tokenizer: Tokenizer, n_samples: int, n_tokens: int, seed: int
) -> list[Sample]:
    """The first `n_tokens` tokens of `n_samples` different documents (or of all), each as likely as any other.

    `documents` is what `count_documents` found in the stream. What a terminal would not print as it stands (other than
    line breaks and tabs) is shown as U+FFFD.
    """
    n_documents = documents.lengths.total()
    chosen = np.random.default_rng(seed).choice(n_documents, min(n_samples, n_documents), replace=False)
    samples = []
    for number in chosen.tolist():
        start = _find_start(stream, documents, number, tokenizer.end_of_text)
        ids = stream.read(start + 1, min(n_tokens, len(stream) - start - 1))
        ends = np.flatnonzero(ids == tokenizer.end_of_text)
        text = tokenizer.decode(ids[: ends[0]] if ends.size else ids)
        samples.append(Sample(start, "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)))
    return samples


def _find_start(stream: TokenStream, documents: Documents, number: int, end_of_text: int) -> int:
    """Where the number-th document starts; of all files, only the one that it starts in is read."""
    position = 0
    for path in stream.paths:
        file = TokenStream([path])
        if number >= documents.by_file[path.name]:
            number -= documents.by_file[path.name]
            position += len(file)
            continue
        for ids in file.chunks():
            starts = np.flatnonzero(ids == end_of_text)
            if number < starts.size:
                return position + int(starts[number])
            number -= starts.size
            position += ids.size
    raise AssertionError(f"document {number} is not among those that were counted")


def _count(lengths: Counter[int], found: np.ndarray) -> None:
    values, counts = np.unique(found, return_counts=True)
    lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
