"""The folders of a run's checkpoints: their names, their order, and the losses that were measured at them.

Needs no torch, so that the state of many runs is shown at once.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

VALIDATION = "validation.json"
PARTIAL = ".partial"  # ends the name of what is being written or removed, and may be removed at any time


def record_validation(folder: Path, train_length: int, losses: Mapping[int, float]) -> None:
    """Adds to a checkpoint the losses of the validation that was due when it was saved."""
    partial = folder / (VALIDATION + PARTIAL)
    write_json(partial, validation_of(train_length, losses))
    flush(partial)
    os.replace(partial, folder / VALIDATION)


def awaits_validation(folder: Path) -> bool:
    """Whether a checkpoint was saved before the validation that was due at its step could be made."""
    validation = _read_validation(folder)
    return validation is not None and validation["loss"] is None


def best_checkpoint(run_dir: Path) -> Path | None:
    """The validated checkpoint with the lowest loss at the training length, if there is one; of equals the oldest.

    A run that isn't validated at its training length is judged at the length closest to it.
    """
    scores = {}
    for folder in list_checkpoints(run_dir):
        validation = _read_validation(folder)
        if validation is not None and validation["loss"] is not None:
            scores[folder] = min(
                (abs(int(length) - validation["train_length"]), loss) for length, loss in validation["loss"].items()
            )
    return min(scores, key=scores.__getitem__) if scores else None


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def checkpoint_step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = (run_dir / "checkpoints").glob("step_*")
    return sorted(
        (folder for folder in folders if re.fullmatch(r"step_\d+", folder.name)),
        key=checkpoint_step,
    )


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, if it has one."""
    return (list_checkpoints(run_dir) or [None])[-1]


def check_not_moved(run_dir: Path, folder: Path | None) -> None:
    """Raises ValueError when the newest checkpoint is no longer `folder`: another process has trained the run since."""
    if latest_checkpoint(run_dir) != folder:
        raise ValueError(f"another process trained run_dir={run_dir} while this one started; start this one again")


def validation_of(train_length: int, losses: Mapping[int, float] | None) -> dict[str, Any]:
    """What validation.json says; the loss is null while the validation is still to be made."""
    by_length = None if losses is None else {str(length): loss for length, loss in losses.items()}
    return {"train_length": train_length, "loss": by_length}


def _read_validation(folder: Path) -> dict[str, Any] | None:
    return read_json(folder / VALIDATION, ("train_length", "loss"))


def damaged(folder: Path, name: str, why: str) -> ValueError:
    """The error that names a damaged file of a checkpoint, and what to do to go on."""
    older = [
        other for other in list_checkpoints(folder.parent.parent) if checkpoint_step(other) < checkpoint_step(folder)
    ]
    rest = f"go on from {older[-1].name}, the one before it" if older else "start over, for there is none before it"
    return ValueError(f"{folder / name} is damaged or missing ({why}); remove {folder} to {rest}")


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def read_json(path: Path, keys: Iterable[str]) -> dict[str, Any] | None:
    """The object in a checkpoint's file, None without one. Raises ValueError naming a damaged file or a lacking key."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise damaged(path.parent, path.name, type(error).__name__) from error
    if not isinstance(value, dict) or not value.keys() >= set(keys):
        raise damaged(path.parent, path.name, "it lacks a key")
    return value


def flush(path: Path) -> None:
    """Waits until the file or folder is on the disk, not only in the system's memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
