"""A prepared folder: shards and a `manifest.json` that says how they were made; it appears whole or not at all."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.shards import count_tokens

MANIFEST = "manifest.json"
REMEDY = "delete the folder and prepare the data again"
FILE_KEYS = {"name": str, "split": str, "bytes": int, "tokens": int}


def describe_shard(path: Path, split: str, documents: int) -> dict[str, Any]:
    """A manifest's entry for one shard; `documents` counts those that start in it."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "name": path.name,
        "split": split,
        "bytes": path.stat().st_size,
        "tokens": count_tokens(path),
        "documents": documents,
        "sha256": sha256,
    }


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes `manifest.json` into the folder, renamed into place when complete."""
    temporary = folder / f".{MANIFEST}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(manifest, indent=2) + "\n")
    os.replace(temporary, folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The folder's manifest, or None where there is none. Raises ValueError for one that is damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); {REMEDY}") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, list) or not all(_is_file_entry(entry) for entry in files):
        raise ValueError(f"{path}: no list `files` of {', '.join(FILE_KEYS)}; {REMEDY}")
    return manifest


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Compares presence, size and token count of every listed file, without reading the tokens.

    Raises FileNotFoundError or ValueError naming the file.
    """
    for entry in manifest["files"]:
        path = folder / entry["name"]
        if not path.is_file():
            raise FileNotFoundError(f"{path}: listed in {MANIFEST} but missing; {REMEDY}")
        if path.stat().st_size != entry["bytes"]:
            raise ValueError(
                f"{path}: ends at byte {path.stat().st_size}, but {MANIFEST} says {entry['bytes']} bytes; {REMEDY}"
            )
        if (n_tokens := count_tokens(path)) != entry["tokens"]:
            raise ValueError(f"{path}: byte 8: {n_tokens} tokens, but {MANIFEST} says {entry['tokens']}; {REMEDY}")


def find_finished(out_dir: Path, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a folder that was prepared with the same arguments and is intact; None if nothing is there.

    Raises ValueError for anything else, so that nobody's files are mixed or lost.
    """
    if not _is_occupied(out_dir):
        return None
    manifest = read_manifest(out_dir)
    if manifest is None:
        raise ValueError(f"out_dir={out_dir} holds files but no {MANIFEST}; choose another out_dir")
    for key, value in arguments.items():
        if (there := manifest.get(key)) != value:
            raise ValueError(
                f"out_dir={out_dir} was prepared with {key}={there}, now asked for {key}={value}; "
                "choose another out_dir, or add overwrite=true"
            )
    check_files(out_dir, manifest)
    return manifest


def check_replaceable(out_dir: Path) -> None:
    """Raises ValueError unless the folder is absent, empty, or nothing but prepared data."""
    if not _is_occupied(out_dir):
        return
    manifest = read_manifest(out_dir) or {"files": []}
    ours = {MANIFEST, *(entry["name"] for entry in manifest["files"])}
    others = sorted(path.name for path in out_dir.iterdir() if path.name not in ours)
    if others:
        raise ValueError(
            f"overwrite=true: out_dir={out_dir} also holds {others[0]}, which is not prepared data; "
            "choose another out_dir"
        )


@contextmanager
def new_folder(out_dir: Path, resumable: bool = False) -> Iterator[Path]:
    """A temporary folder beside `out_dir` that takes its place when the block ends without an exception.

    On an exception it is removed, or kept for the next start if `resumable`; what a killed process left is reused or
    removed likewise.
    """
    out_dir = out_dir.resolve()
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    if not resumable:
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=resumable)
    try:
        yield partial
        _replace_folder(partial, out_dir)
    finally:
        if not resumable:
            shutil.rmtree(partial, ignore_errors=True)


def _replace_folder(new: Path, out_dir: Path) -> None:
    """Renames `new` to `out_dir`; what was there steps aside and is removed last."""
    old = out_dir.with_name(f".{out_dir.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out_dir.exists():
        os.replace(out_dir, old)
    os.replace(new, out_dir)
    shutil.rmtree(old, ignore_errors=True)


def _is_occupied(out_dir: Path) -> bool:
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"out_dir={out_dir} is a file; choose a folder")
    return out_dir.is_dir() and any(out_dir.iterdir())


def _is_file_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in FILE_KEYS.items())
