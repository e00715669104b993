"""A prepared folder: shards, and a `manifest.json` that says how they were made."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.cores import available_cores
from data.shards import count_tokens

MANIFEST = "manifest.json"
REMEDY = "delete the folder and prepare the data again"
MEASURED = {"source_bytes": "bytes", "source_files": "files"}  # what nobody asks for, but finds in the texts
FILE_KEYS = {"name": str, "split": str, "bytes": int, "tokens": int}


def describe_shard(path: Path, split: str, documents: int) -> dict[str, Any]:
    """A manifest's entry for one shard; `documents` counts those that start in it."""
    return {
        "name": path.name,
        "split": split,
        "bytes": path.stat().st_size,
        "tokens": count_tokens(path),
        "documents": documents,
        "sha256": file_sha256(path),
    }


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, progress: bool = True) -> dict[str, str]:
    """Compares every file that the manifest lists with it, by size, token count and SHA-256, which reads all of them.

    Returns what is wrong, by the name of the file: nothing if the folder is intact. Raises FileNotFoundError without a
    manifest, ValueError for a damaged one. `progress` shows a bar, unless stderr is no terminal.
    """
    if (manifest := read_manifest(folder)) is None:
        raise FileNotFoundError(f"{folder / MANIFEST}: no such file, so there is nothing to verify the data with")
    files = manifest["files"]
    wrong = {}
    total = sum(entry["bytes"] for entry in files)
    with (
        ThreadPoolExecutor(available_cores()) as pool,
        tqdm(total=total, unit="B", unit_scale=True, desc="verifying", disable=None if progress else True) as bar,
    ):
        for entry, fault in zip(files, pool.map(partial(_find_fault, folder), files), strict=True):
            bar.update(entry["bytes"])
            if fault:
                wrong[entry["name"]] = fault
    return wrong


def _find_fault(folder: Path, entry: dict[str, Any]) -> str | None:
    """What is wrong with one listed file, as words that go behind its name."""
    path = folder / entry["name"]
    try:
        _check_file(path, entry)
    except (ValueError, OSError) as error:
        return str(error).removeprefix(f"{path}: ").removesuffix(f"; {REMEDY}")
    # A manifest from elsewhere may come without hashes.
    if (expected := entry.get("sha256")) and (found := file_sha256(path)) != expected:
        return f"its SHA-256 is {found}, but {MANIFEST} says {expected}"
    return None


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes `manifest.json` into the folder, renamed into place when complete."""
    write_json(folder / MANIFEST, manifest)


def write_json(path: Path, value: Any) -> None:
    """Writes a file under a temporary name that is renamed when it is complete."""
    temporary = path.with_name(f".{path.name}.tmp")  # always the same, so that a killed one is written over
    try:
        temporary.write_text(json.dumps(value, indent=2) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
        _check_file(folder / entry["name"], entry)


def _check_file(path: Path, entry: dict[str, Any]) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: listed in {MANIFEST} but missing; {REMEDY}")
    if path.stat().st_size != entry["bytes"]:
        raise ValueError(
            f"{path}: ends at byte {path.stat().st_size}, but {MANIFEST} says {entry['bytes']} bytes; {REMEDY}"
        )
    if (n_tokens := count_tokens(path)) != entry["tokens"]:
        raise ValueError(f"{path}: byte 8: {n_tokens} tokens, but {MANIFEST} says {entry['tokens']}; {REMEDY}")


def find_finished(out_dir: Path, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a folder that was prepared with the same arguments; None if nothing is there.

    Raises ValueError for anything else, so that nobody's files are mixed or lost.
    """
    if not _is_occupied(out_dir):
        return None
    manifest = read_manifest(out_dir)
    if manifest is None:
        raise ValueError(f"out_dir={out_dir} holds files but no {MANIFEST}; choose another out_dir")
    check_arguments(f"out_dir={out_dir} was prepared", manifest, arguments)
    return manifest


def check_arguments(what: str, there: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Raises ValueError naming the first argument whose value is another one."""
    for key, value in arguments.items():
        if there.get(key) != value and key in MEASURED:
            raise ValueError(
                f"{what} from other texts: {there.get(key)} {MEASURED[key]} then, {value} now; "
                "choose another out_dir, or add overwrite=true"
            )
        if there.get(key) != value:
            raise ValueError(
                f"{what} with {key}={there.get(key)}, now asked for {key}={value}; "
                "choose another out_dir, or add overwrite=true"
            )


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


def _is_occupied(out_dir: Path) -> bool:
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"out_dir={out_dir} is a file; choose a folder")
    return out_dir.is_dir() and any(out_dir.iterdir())


def _is_file_entry(entry: Any) -> bool:
    typed = isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in FILE_KEYS.items())
    return typed and Path(entry["name"]).name == entry["name"]  # a manifest from a stranger stays in its folder
