"""Checkpoints: `checkpoints/step_000125/` with model.safetensors and training.pt, complete or not there at all.

A checkpoint is written to a temporary name, flushed to the disk, and renamed. Reading one runs no code: safetensors
holds only tensors, and training.pt is loaded with `weights_only=True`.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.state import TrainState

WEIGHTS, REST = "model.safetensors", "training.pt"


def save_checkpoint(run_dir: Path, state: TrainState, keep: int = 2, rest: dict[str, Any] | None = None) -> Path:
    """Writes checkpoints/step_<step>, then removes all but the newest `keep`.

    `rest` is `state.state_dict()` where several processes had to make it together.

    Raises ValueError, and writes nothing, when a weight is infinite or not a number.
    """
    if not all(parameter.isfinite().all() for parameter in state.model.parameters()):
        raise ValueError(
            f"the weights after step {state.step} are not finite; the last good checkpoint is "
            f"{latest_checkpoint(run_dir)}; try lower rates in optimizer, in another run_dir"
        )
    folder = checkpoint_path(run_dir, state.step)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {name: tensor.contiguous() for name, tensor in state.model.state_dict().items()}
    save_file(tensors, partial / WEIGHTS)
    torch.save(rest or state.state_dict(), partial / REST)
    (partial / WEIGHTS).chmod((partial / REST).stat().st_mode)  # safetensors leaves it readable by its owner alone
    for file in partial.iterdir():
        _flush(file)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    _flush(folder.parent)
    for old in list_checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old)
    return folder


def restore_checkpoint(folder: Path, state: TrainState) -> None:
    """Loads a checkpoint into a freshly built state.

    Raises ValueError naming the file when it is missing, damaged, or of another architecture.
    """
    weights = load_weights(folder)
    try:
        rest = torch.load(folder / REST, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file, with advice that is wrong here
        raise ValueError(
            f"{folder / REST} is damaged or missing ({type(error).__name__}); remove {folder} to go on from the one "
            "before it"
        ) from error
    try:
        state.load_state_dict(weights, rest)
        if state.step != checkpoint_step(folder):
            raise ValueError(f"it holds step {state.step}")
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder} is not a checkpoint of this model and optimizer ({' '.join(str(error).split())[:200]}); start "
            "in another run_dir"
        ) from error


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The model's tensors of a checkpoint, on the CPU. Raises ValueError naming the file when it is damaged."""
    try:
        return load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{folder / WEIGHTS} is damaged or missing ({error}); remove {folder} to go on from the one before it"
        ) from error


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


def _flush(path: Path) -> None:
    """Waits until the file or folder is on the disk, not only in the system's memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
