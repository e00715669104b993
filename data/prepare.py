"""Documents to shards: a prepared folder out of presidential addresses, a user's own text, FineWeb, or public shards.

Every document starts with the tokenizer's end-of-text id; documents follow each other without padding, across the
borders of shards. A folder grows beside its place, and takes it when it is whole; what an interruption leaves there,
the same command goes on from.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data import fineweb
from data.cores import available_cores
from data.manifest import MANIFEST, check_files, check_replaceable, find_finished, verify
from data.sharding import Plan, tokenize
from data.shards import MAX_TOKENS
from data.sources import Files, Source, sotu_files, text_files
from data.stream import STREAMED, Stream
from data.tokenizer import load_tokenizer
from data.unfinished import (
    LOCK,
    PROGRESS,
    finish_merge,
    full_disk_told,
    grow,
    locked,
    merge,
    partial_folder,
    remove_all_but,
    remove_if_bare,
    remove_replaced,
    write_progress,
)

SOURCES = ("sotu", "text", *STREAMED, *fineweb.DATASETS)
SHARD_TOKENS = 100_000_000
SOTU_VAL_EVERY = 10


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


def default_out_dir(source: str, tokenizer: str) -> Path:
    """data/shards/SOURCE_TOKENIZER, or data/shards/SOURCE for shards that are published in one tokenization."""
    return Path("data/shards") / (source if source in fineweb.DATASETS else f"{source}_{tokenizer}")


def prepare(
    source: str,
    out_dir: str | Path | None = None,
    tokenizer: str = "gpt2",
    path: str | Path | None = None,
    subset: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    val_tokens: int | None = None,
    val_every: int | None = None,
    shards: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> Prepared:
    """Makes `out_dir` with `NAME_val_000000.bin ...`, `NAME_train_000001.bin ...` and `manifest.json`.

    `source` is `sotu`, `text` (files under `path`), `fineweb` or `c4` (the texts of a `subset`, streamed), or
    `fineweb10b`, `fineweb100b` (public shards). Validation is the first `val_tokens` tokens (by default the first
    shard), at no document's border; or, with `val_every`, every so many-th document, whole (by default for `sotu`:
    every tenth). With `shards`, the work ends after so many training shards. `workers` threads encode, by default one
    per core; the output is the same for any number.

    A folder finished with the same arguments is verified and left as it is; damaged public shards are fetched again.
    An interrupted preparation goes on where it was; with `overwrite` it starts over where it can't. Raises ValueError
    or FileNotFoundError for arguments that don't fit, other data in `out_dir`, or unreadable text; ConnectionError
    where the hub fails, and OSError on a full disk.
    """
    _check(source, path, subset, shards, workers, overwrite)
    folder = Path(str(out_dir)) if out_dir is not None else default_out_dir(source, tokenizer)
    if source in fineweb.DATASETS:
        _check_unset(source, shard_tokens, val_tokens=val_tokens, val_every=val_every, workers=workers)
        return _prepare_public_shards(source, folder, tokenizer, shards, overwrite)
    plan = _plan(source, shard_tokens, val_tokens, val_every, shards)
    return _prepare_text(source, folder, tokenizer, path, subset, plan, workers, overwrite)


def _prepare_text(
    source: str,
    folder: Path,
    tokenizer: str,
    path: str | Path | None,
    subset: str | None,
    plan: Plan,
    workers: int | None,
    overwrite: bool,
) -> Prepared:
    reader, described = _open_source(source, path, subset)
    coder = load_tokenizer(tokenizer)
    arguments = {
        "source": source,
        **described,
        "tokenizer": tokenizer,
        "shard_tokens": plan.shard_tokens,
        "val_every": plan.val_every,
        "val_tokens": plan.val_tokens,
        "shards": plan.shards,
    }
    if manifest := _finished(folder, arguments, overwrite):
        if wrong := verify(folder):
            name, fault = next(iter(wrong.items()))
            raise ValueError(f"{folder / name}: {fault}; add overwrite=true to prepare the data again")
        return Prepared(folder, manifest, fresh=False)

    def check(grown: Path, progress: Any) -> None:
        _check_resumable(source, grown, progress, reader)

    def build(grown: Path, progress: Any) -> dict[str, Any]:
        def save(progress: dict[str, Any]) -> None:
            write_progress(grown, arguments, {**progress, "identity": reader.identity})

        made = tokenize(reader, coder, grown, plan, workers or available_cores(), progress, save)
        return {**arguments, "vocab_size": coder.vocab_size, "end_of_text": coder.end_of_text, **made}

    return Prepared(folder, grow(folder, arguments, check, build, overwrite), fresh=True)


def _check_resumable(source: str, grown: Path, progress: Any, reader: Source) -> None:
    """Raises ValueError, and leaves everything as it is, where going on would give other bytes."""
    if progress["identity"] != reader.identity:
        raise ValueError(
            f"source={source}: the files have changed since the interrupted start that left {grown}; "
            "add overwrite=true to start over"
        )
    check_files(grown, progress)
    remove_all_but(grown, {LOCK, PROGRESS, *(entry["name"] for entry in progress["files"])})
    _say(f"going on after {len(progress['files'])} shards that an interrupted start has written")


def _prepare_public_shards(source: str, folder: Path, tokenizer: str, shards: int | None, overwrite: bool) -> Prepared:
    if tokenizer != "gpt2":
        raise ValueError(f"tokenizer={tokenizer}: source={source} is published in tokens of gpt2; set tokenizer=gpt2")
    names = fineweb.shard_names(fineweb.check_shards(source, shards))
    arguments = {"source": source, "tokenizer": tokenizer}

    def manifest_of(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
        files = sorted(entries.values(), key=lambda entry: (entry["split"] != "val", entry["name"]))
        vocabulary = {"vocab_size": fineweb.VOCAB_SIZE, "end_of_text": fineweb.END_OF_TEXT}
        return {**arguments, "shards": len(files) - 1, **vocabulary, "files": files}

    def fetch(grown: Path, names: list[str]) -> dict[str, dict[str, Any]]:
        write_progress(grown, arguments, {"source": source})
        return fineweb.download(source, names, grown)

    finish_merge(folder)
    if manifest := _finished(folder, arguments, overwrite):
        return _add_public_shards(folder, manifest, names, fetch, manifest_of)
    # each file is checked by itself
    manifest = grow(
        folder, arguments, lambda grown, progress: None, lambda grown, _: manifest_of(fetch(grown, names)), overwrite
    )
    return Prepared(folder, manifest, fresh=True)


def _add_public_shards(
    folder: Path,
    manifest: dict[str, Any],
    names: list[str],
    fetch: Callable[[Path, list[str]], dict[str, dict[str, Any]]],
    manifest_of: Callable[[dict[str, dict[str, Any]]], dict[str, Any]],
) -> Prepared:
    """Brings a finished folder to at least the named shards, all of them intact."""
    wrong = verify(folder)
    for name, fault in wrong.items():
        _say(f"{folder / name}: {fault}; fetching it again")
    listed = {entry["name"]: entry for entry in manifest["files"]}
    missing = sorted({*names, *wrong} - (listed.keys() - wrong.keys()))
    for name in missing:
        if name not in listed and (folder / name).exists():
            raise ValueError(f"{folder / name}: {MANIFEST} doesn't list it, so it is nobody's to replace; move it away")
    grown = partial_folder(folder)
    if missing:
        with full_disk_told(grown), locked(grown):
            manifest = manifest_of(listed | fetch(grown, missing))
            merge(grown, folder, manifest)
    remove_if_bare(grown)
    return Prepared(folder, manifest, fresh=bool(missing))


def _finished(folder: Path, arguments: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The manifest of a folder finished with these arguments; with `overwrite` none."""
    if overwrite:
        check_replaceable(folder)
        return None
    if manifest := find_finished(folder, arguments):
        remove_replaced(folder)
    return manifest


def _open_source(source: str, path: str | Path | None, subset: str | None) -> tuple[Source, dict[str, Any]]:
    """What to read, and what the manifest says of it."""
    if source in STREAMED:
        dataset, default = STREAMED[source]
        subset = subset or default
        return Stream(source, subset), {"dataset": dataset, "subset": subset}
    if source == "text" and path is None:
        raise ValueError("path is not set; source=text needs path=FILE_OR_FOLDER")
    files = sotu_files() if path is None else text_files(str(path))
    reader = Files(files)
    described = {
        "path": None if path is None else str(path),
        "source_files": len(files),
        "source_bytes": reader.total_bytes,
    }
    return reader, described


def _plan(source: str, shard_tokens: int, val_tokens: int | None, val_every: int | None, shards: int | None) -> Plan:
    _check_count("shard_tokens", shard_tokens, 1, MAX_TOKENS)
    if val_tokens is not None and val_every is not None:
        raise ValueError(f"val_tokens={val_tokens} and val_every={val_every}: set one of them")
    if val_tokens is not None:
        _check_count("val_tokens", val_tokens, 1, None)
    elif val_every is not None or source == "sotu":
        val_every = SOTU_VAL_EVERY if val_every is None else val_every
        _check_count("val_every", val_every, 2, MAX_TOKENS)
    else:
        val_tokens = shard_tokens
    if shards is not None:
        _check_count("shards", shards, 1, None)
    return Plan(source, shard_tokens, val_tokens, val_every, shards)


def _check(source: str, path: object, subset: object, shards: object, workers: object, overwrite: object) -> None:
    if source not in SOURCES:
        raise ValueError(f"source={source} is unknown; choose one of: {', '.join(SOURCES)}")
    if path is not None and source != "text":
        raise ValueError(f"path={path} is only for source=text, not source={source}; leave it out")
    if subset is not None and source not in STREAMED:
        raise ValueError(f"subset={subset} is only for source=fineweb or c4, not source={source}; leave it out")
    if workers is not None:
        _check_count("workers", workers, 1, 1024)
    if not isinstance(overwrite, bool):
        raise ValueError(f"overwrite={overwrite}: must be true or false")


def _check_unset(source: str, shard_tokens: object, **others: object) -> None:
    """Public shards are as they are."""
    for key, value in {"shard_tokens": None if shard_tokens == SHARD_TOKENS else shard_tokens, **others}.items():
        if value is not None:
            raise ValueError(
                f"{key}={value}: source={source} is already in shards of {SHARD_TOKENS:,} tokens, the first of which "
                f"is validation; leave {key} out"
            )


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)


def _check_count(key: str, value: object, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high and value > high):
        allowed = f"{low} to {high}" if high else f"{low} or more"
        raise ValueError(f"{key}={value}: must be a whole number, {allowed}")
