"""A folder grows beside its place, and takes it when it is whole.

A kill at any moment loses no more than what was being written: the next start of the same command goes on, be it only
to put a whole folder into its place.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.manifest import MANIFEST, check_arguments, check_files, read_manifest, write_json, write_manifest

PROGRESS = "progress.json"
LOCK = "lock"
FULL = (errno.ENOSPC, errno.EDQUOT)


def grow(
    folder: Path,
    arguments: dict[str, Any],
    check: Callable[[Path, Any], None],
    build: Callable[[Path, Any], dict[str, Any]],
    overwrite: bool,
) -> dict[str, Any]:
    """Has `build(partial folder, progress)` make a folder and its manifest, puts it in place and returns the manifest.

    `check` sees what an earlier start left before it is gone on with, and raises ValueError where that makes no sense;
    with `overwrite` the work then starts over. What an interruption or a fault of the machine leaves stays for the next
    start; a user's mistake leaves nothing.
    """
    grown = partial_folder(folder)
    with full_disk_told(grown), locked(grown):
        try:
            manifest, progress = _left(grown, arguments, check)
        except (ValueError, FileNotFoundError):
            if not overwrite:
                raise
            manifest = progress = None
        if manifest is None and progress is None:
            remove_all_but(grown, {LOCK})
        try:
            manifest = manifest or build(grown, progress)
        except ValueError:
            shutil.rmtree(grown)
            raise
        finally:
            remove_if_bare(grown)
        publish(grown, folder, manifest)
    return manifest


def _left(
    grown: Path, arguments: dict[str, Any], check: Callable[[Path, Any], None]
) -> tuple[dict[str, Any] | None, Any]:
    """What an earlier start left: the manifest of a whole folder, or how far it came.

    Raises ValueError or FileNotFoundError where it is of other arguments, or damaged.
    """
    if manifest := read_manifest(grown):
        check_arguments(f"{grown} holds an unfinished preparation", manifest, arguments)
        check_files(grown, manifest)
        return manifest, None
    progress = read_progress(grown, arguments)
    if progress is not None:
        check(grown, progress)
    return None, progress


def partial_folder(out_dir: Path) -> Path:
    """The folder beside `out_dir` in which it grows."""
    out_dir = out_dir.resolve()
    return out_dir.with_name(f".{out_dir.name}.partial")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder, and holds it for this process, however it ends. Raises ValueError where another one has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise ValueError(
            f"out_dir: can't make the folder {folder} ({error.strerror}); choose another out_dir"
        ) from error
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{folder}: another process is preparing this data; wait for it, or stop it") from error
        yield


def read_progress(folder: Path, arguments: dict[str, Any]) -> Any:
    """What `write_progress` last wrote there; None at a first start.

    Raises ValueError where it was written for other arguments, and for a damaged file.
    """
    path = folder / PROGRESS
    if not path.is_file():
        return None
    try:
        there = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); add overwrite=true to start over") from error
    check_arguments(f"{folder} holds an unfinished preparation", there["arguments"], arguments)
    return there["progress"]


def write_progress(folder: Path, arguments: dict[str, Any], progress: Any) -> None:
    """Notes for the next start how far this one came."""
    write_json(folder / PROGRESS, {"arguments": arguments, "progress": progress})


@contextmanager
def full_disk_told(folder: Path) -> Iterator[None]:
    """Says of a full disk where it is and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(
            f"{folder}: the disk is full; free some space and run the command again: it goes on where it stopped"
        ) from error


def publish(partial_dir: Path, out_dir: Path, manifest: dict[str, Any]) -> None:
    """Makes the partial folder, with the files of the manifest and nothing else, into `out_dir`."""
    write_manifest(partial_dir, manifest)  # first: from now on a later start has nothing else to do
    remove_all_but(partial_dir, {MANIFEST, *(entry["name"] for entry in manifest["files"])})
    _replace_folder(partial_dir, out_dir.resolve())


def merge(partial_dir: Path, out_dir: Path, manifest: dict[str, Any]) -> None:
    """Moves the new ones of the manifest's files from the partial folder into `out_dir`, then the manifest."""
    write_manifest(partial_dir, manifest)  # first: it says what a kill leaves to be done
    _move(partial_dir, out_dir, manifest)


def finish_merge(out_dir: Path) -> None:
    """Goes on with a `merge` that a kill has ended; does nothing otherwise."""
    partial_dir = partial_folder(out_dir)
    if not (manifest := read_manifest(partial_dir)):
        return
    names = {entry["name"] for entry in manifest["files"]}
    to_move = {name for name in names if (partial_dir / name).exists()}
    # A folder that is to take the place of `out_dir` has all its files; a merge is of some that are there already.
    if to_move < names and all((out_dir / name).exists() for name in names - to_move):
        with full_disk_told(partial_dir), locked(partial_dir):
            _move(partial_dir, out_dir, manifest)


def _move(partial_dir: Path, out_dir: Path, manifest: dict[str, Any]) -> None:
    for name in [*(entry["name"] for entry in manifest["files"]), MANIFEST]:
        if (partial_dir / name).exists():
            os.replace(partial_dir / name, out_dir / name)
    shutil.rmtree(partial_dir)


def remove_all_but(folder: Path, names: set[str]) -> None:
    """Empties a folder, the named files excepted."""
    for path in folder.iterdir():
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_if_bare(folder: Path) -> None:
    """Removes a partial folder that holds nothing worth to go on from."""
    notes = {LOCK, PROGRESS, MANIFEST}
    if folder.exists() and all(path.name.strip(".").removesuffix(".tmp") in notes for path in folder.iterdir()):
        shutil.rmtree(folder)


def remove_replaced(out_dir: Path) -> None:
    """Removes what `out_dir` took the place of, where a kill has left it."""
    shutil.rmtree(_replaced(out_dir.resolve()), ignore_errors=True)


def _replace_folder(new: Path, out_dir: Path) -> None:
    """Renames `new` to `out_dir`; what was there steps aside and is removed last."""
    remove_replaced(out_dir)
    if out_dir.exists():
        os.replace(out_dir, _replaced(out_dir))
    os.replace(new, out_dir)
    remove_replaced(out_dir)


def _replaced(out_dir: Path) -> Path:
    return out_dir.with_name(f".{out_dir.name}.old")
