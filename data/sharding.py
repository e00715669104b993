"""Batches of text to shards of tokens: on all cores, in order, and resumable after a kill at any moment.

Threads encode (tiktoken releases the interpreter's lock) and the calling thread reads and writes, so the output doesn't
depend on their number. A shard appears when it is complete, and after each one `progress.json` says from which batch on
the source must be read again, and what had been counted before it. A later start reads from there and drops as many
tokens as the shards already hold, so that none is lost or doubled, wherever the process was killed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data.manifest import describe_shard
from data.shards import write_shard
from data.sources import BATCH_CHARACTERS, Batch, Piece, Position, Source
from data.tokenizer import ENDOFTEXT, Tokenizer

BATCHES_AHEAD = 32  # per thread: what the threads encode while the calling one writes a shard


class Encoded(NamedTuple):
    """The tokens of a batch, each document led by end-of-text, and where documents start among them."""

    ids: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Plan:
    """What the shards look like, given the tokens.

    The first `val_tokens` tokens are validation, at no document's border; or every `val_every`-th document is, whole.
    With `shards`, the work ends when so many training shards are full.
    """

    name: str
    shard_tokens: int
    val_tokens: int | None
    val_every: int | None
    shards: int | None


@dataclass
class Counts:
    """What lies before a position of the source."""

    documents: int = 0
    empty: int = 0
    repaired: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"val": 0, "train": 0})
    last_is_repaired: bool = False

    def add(self, pieces: Sequence[Piece]) -> None:
        """Counts empty and repaired documents, each once."""
        for piece in pieces:
            if piece.starts_document:
                self.last_is_repaired = False
                self.empty += not piece.text
            if piece.repaired and not self.last_is_repaired:
                self.repaired += 1
                self.last_is_repaired = True


@dataclass
class Checkpoint:
    """A position to read from, and the counts before it; `number` orders checkpoints."""

    number: int
    position: Position | None
    counts: dict[str, Any]


def tokenize(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    plan: Plan,
    workers: int,
    progress: dict[str, Any] | None,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Fills `folder` with shards, and returns what the manifest says of them.

    `progress` is what `save` was last given by an interrupted call with the same arguments, else None. Raises
    ValueError where the documents don't fill both splits.
    """
    sharder = _Sharder(folder, plan, tokenizer, progress, save)
    batches = source.batches(sharder.checkpoint.position)
    with _progress_bar(source, plan) as bar:
        for batch, encoded in encode_in_order(batches, tokenizer, workers):
            sharder.add(batch, encoded)
            _advance(bar, batch, source, plan, sharder.counts)
            if sharder.is_full:
                break
    return sharder.finish()


def encode_in_order(batches: Iterator[Batch], tokenizer: Tokenizer, workers: int) -> Iterator[tuple[Batch, Encoded]]:
    """Each batch with its tokens, in order; a bounded amount of text is in memory.

    Where reading fails, what was read before it still comes, so that as little as possible need be read again.
    """
    pending: deque[tuple[Batch, Future[Encoded], int]] = deque()
    allowed = BATCHES_AHEAD * BATCH_CHARACTERS * workers
    ahead = 0
    failure: Exception | None = None
    with ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool:
        try:
            while True:
                try:
                    batch = next(batches, None)
                except Exception as error:
                    batch, failure = None, error
                if batch is not None:
                    size = sum(len(piece.text) + 1 for piece in batch.pieces)
                    pending.append((batch, pool.submit(encode, batch.pieces, tokenizer), size))
                    ahead += size
                while pending and (batch is None or ahead > allowed):
                    first, future, size = pending.popleft()
                    ahead -= size
                    yield first, future.result()
                if batch is None:
                    break
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if failure is not None:
        raise failure


def encode(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Encoded:
    """The tokens of consecutive pieces."""
    pieces = [piece for piece in pieces if piece.text]
    text = "".join((ENDOFTEXT if piece.starts_document else "") + piece.text for piece in pieces)
    if text.count(ENDOFTEXT) > sum(piece.starts_document for piece in pieces):  # some document holds these words
        return _encode_one_by_one(pieces, tokenizer)
    ids = tokenizer.encode_documents(text)
    return Encoded(ids, np.flatnonzero(ids == tokenizer.end_of_text))


def _encode_one_by_one(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Encoded:
    end_of_text = np.array([tokenizer.end_of_text], token_dtype(tokenizer))
    parts = [end_of_text[:0]]
    starts: list[int] = []
    n_tokens = 0
    for piece in pieces:
        if piece.starts_document:
            starts.append(n_tokens)
            parts.append(end_of_text)
            n_tokens += 1
        parts.append(tokenizer.encode(piece.text))
        n_tokens += parts[-1].size
    return Encoded(np.concatenate(parts), np.array(starts, np.int64))


def token_dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    """uint16 where every id fits, else uint32."""
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32


class _Sharder:
    """Distributes tokens over the splits' writers, and saves where to go on whenever one of them wrote a shard."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        tokenizer: Tokenizer,
        progress: dict[str, Any] | None,
        save: Callable[[dict[str, Any]], None],
    ) -> None:
        progress = progress or {"checkpoint": asdict(Checkpoint(0, None, asdict(Counts()))), "files": []}
        self.checkpoint = Checkpoint(**progress["checkpoint"])
        self.counts = Counts(**deepcopy(self.checkpoint.counts))
        self._plan = plan
        self._save = save
        self._writers = {
            split: _ShardWriter(folder, plan, split, token_dtype(tokenizer), progress["files"], self.counts)
            for split in ("val", "train")
        }

    @property
    def is_full(self) -> bool:
        return self._writers["train"].is_full

    def add(self, batch: Batch, encoded: Encoded) -> None:
        if batch.start is not None:
            counts = asdict(self.counts)
            self.checkpoint = Checkpoint(self.checkpoint.number + 1, batch.start, counts)
        self.counts.add(batch.pieces)
        for split, ids, starts in self._split(encoded):
            self.counts.tokens[split] += ids.size
            for _ in self._writers[split].add(ids, starts, self.checkpoint):
                self._write_progress()
        if self.counts.tokens["val"] == self._plan.val_tokens:
            self._write_rest("val")  # complete: nothing before this batch need be read again

    def finish(self) -> dict[str, Any]:
        """Writes what is left; returns the manifest's part. Raises ValueError where a split is empty."""
        self._check_splits()
        for split in self._writers:
            self._write_rest(split)
        return {
            "empty_documents": self.counts.empty,
            "invalid_utf8_documents": self.counts.repaired,
            "files": self._files(),
        }

    def _split(self, encoded: Encoded) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        ids, starts = encoded
        if self._plan.val_every is None:
            self.counts.documents += starts.size
            room = (self._plan.val_tokens or 0) - self.counts.tokens["val"]
            cut = min(max(room, 0), ids.size)
            inside = int(np.searchsorted(starts, cut))
            yield "val", ids[:cut], starts[:inside]
            yield "train", ids[cut:], starts[inside:] - cut
            return
        before, bounds = self.counts.documents, [*starts.tolist(), ids.size]
        self.counts.documents += starts.size
        if bounds[0] > 0:  # the rest of the document before
            yield self._split_of_document(before), ids[: bounds[0]], starts[:0]
        # Neighbours of one split go together, as a call for each document takes time from the threads that encode.
        for split, run in groupby(range(starts.size), lambda index: self._split_of_document(before + index + 1)):
            documents = list(run)
            first, end = documents[0], documents[-1] + 1
            yield split, ids[bounds[first] : bounds[end]], starts[first:end] - bounds[first]

    def _split_of_document(self, number: int) -> str:
        """`number` counts documents from 1."""
        assert self._plan.val_every is not None
        return "val" if number % self._plan.val_every == 0 else "train"

    def _check_splits(self) -> None:
        plan, documents, tokens = self._plan, self.counts.documents, self.counts.tokens
        if not documents:
            raise ValueError("the source has no document with text in it; choose another source or path")
        if not tokens["val"]:
            raise ValueError(
                f"val_every={plan.val_every} puts none of the {documents} documents into validation; "
                + (f"set val_every to 2 ... {documents}, or " if documents > 1 else "set ")
                + "val_tokens=N for the first N tokens"
            )
        if not tokens["train"]:
            raise ValueError(
                f"all {tokens['val']} tokens of the source fit into the validation split, which takes the first "
                f"{plan.val_tokens} (val_tokens, else shard_tokens), so that none is left for training; "
                f"set val_tokens={max(1, tokens['val'] // 10)}, or val_every=10 for every tenth document"
            )

    def _files(self) -> list[dict[str, Any]]:
        return [entry for writer in self._writers.values() for entry in writer.entries]

    def _write_rest(self, split: str) -> None:
        if self._writers[split].has_rest:
            self._writers[split].write()
            self._write_progress()

    def _write_progress(self) -> None:
        # Read again from where the oldest token came that no shard holds yet.
        waiting = [writer.since for writer in self._writers.values() if writer.since is not None]
        oldest = min(waiting, key=lambda checkpoint: checkpoint.number, default=self.checkpoint)
        self._save({"checkpoint": asdict(oldest), "files": self._files()})


class _ShardWriter:
    """Collects one split's tokens, and writes a shard whenever `shard_tokens` of them are there."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        split: str,
        dtype: type[np.unsignedinteger],
        files: list[dict[str, Any]],
        counts: Counts,
    ) -> None:
        self.entries = [entry for entry in files if entry["split"] == split]
        self.since: Checkpoint | None = None  # where the oldest token of the buffer came from
        self._folder, self._name, self._split = folder, plan.name, split
        self._first, self._limit = (0, None) if split == "val" else (1, plan.shards)
        self._buffer = np.empty(plan.shard_tokens, dtype)  # the system gives memory only to the part that is used
        self._filled = 0
        self._documents = 0
        self._skip = sum(entry["tokens"] for entry in self.entries) - counts.tokens[split]

    @property
    def is_full(self) -> bool:
        return self._limit is not None and len(self.entries) >= self._limit

    @property
    def has_rest(self) -> bool:
        return self._filled > 0

    def add(self, ids: np.ndarray, starts: np.ndarray, checkpoint: Checkpoint) -> Iterator[None]:
        """Takes the tokens, but those that an earlier start has written; yields after each shard."""
        ids, starts = self._skip_written(ids, starts)
        while ids.size and not self.is_full:
            self.since = self.since or checkpoint
            part = ids[: self._buffer.size - self._filled]
            self._buffer[self._filled : self._filled + part.size] = part
            self._filled += part.size
            inside = int(np.searchsorted(starts, part.size))
            self._documents += inside
            ids, starts = ids[part.size :], starts[inside:] - part.size
            if self._filled == self._buffer.size:
                self.write()
                self.since = checkpoint if ids.size else None
                yield

    def write(self) -> None:
        path = self._folder / f"{self._name}_{self._split}_{self._first + len(self.entries):06d}.bin"
        write_shard(path, self._buffer[: self._filled])
        self.entries.append(describe_shard(path, self._split, self._documents))
        self._filled = self._documents = 0
        self.since = None

    def _skip_written(self, ids: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cut = min(self._skip, ids.size)
        self._skip -= cut
        return ids[cut:], starts[np.searchsorted(starts, cut) :] - cut


def _progress_bar(source: Source, plan: Plan) -> tqdm:
    """In bytes of the source; the rate is in MB/s, and what remains is shown where the end is known."""
    total = source.total_bytes if plan.shards is None else None
    return tqdm(total=total, unit="B", unit_scale=True, desc=plan.name, disable=None, smoothing=0.05)


def _expected_tokens(source: Source, plan: Plan) -> float | None:
    """Where the end is known in tokens rather than in bytes of the source."""
    if plan.shards is None:
        return source.about_tokens
    wanted = plan.shards * plan.shard_tokens
    return wanted * plan.val_every / (plan.val_every - 1) if plan.val_every else wanted + (plan.val_tokens or 0)


def _advance(bar: tqdm, batch: Batch, source: Source, plan: Plan, counts: Counts) -> None:
    tokens = sum(counts.tokens.values())
    if tokens and (wanted := _expected_tokens(source, plan)):
        bar.total = max(batch.bytes_read, round(batch.bytes_read * wanted / tokens))
    if bar.n == 0:  # where an earlier start had come counts for nothing in the rate
        bar.initial = bar.n = batch.bytes_read
    bar.set_postfix_str(f"{tokens:,} tokens, {counts.documents:,} documents", refresh=False)
    bar.update(batch.bytes_read - bar.n)
