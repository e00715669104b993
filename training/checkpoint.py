"""Checkpoints: `checkpoints/step_000125/`, complete or not there at all, and what was measured at them.

A checkpoint holds model.safetensors, training.pt (optimizers, step, random number generators, config), checksums.json
of those two, and where a validation was due validation.json. It is written to a temporary name, flushed to the disk,
and renamed. Reading one runs no code: safetensors holds only tensors, and training.pt is loaded with
`weights_only=True`.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.checkpoint_folder import (
    PARTIAL,
    VALIDATION,
    best_checkpoint,
    checkpoint_path,
    checkpoint_step,
    damaged,
    flush,
    latest_checkpoint,
    list_checkpoints,
    read_json,
    validation_of,
    write_json,
)
from training.distributed import ALONE, Process, first_line
from training.state import TrainState

WEIGHTS, REST, CHECKSUMS = "model.safetensors", "training.pt", "checksums.json"


def save_checkpoint(
    run_dir: Path,
    state: TrainState,
    keep: int = 2,
    losses: Mapping[int, float] | None = None,
    validation_due: bool = False,
    process: Process = ALONE,
) -> Path:
    """Writes checkpoints/step_<step>, then removes all but the newest `keep` and the best. All processes call it.

    Args:
        losses: the validation losses of this step by length, where it was validated.
        validation_due: says that it was to be validated and is not yet.

    Raises ValueError, and writes nothing, when a weight is infinite or not a number, and OSError, leaving the older
    checkpoints as they were, when the disk is full.
    """
    rest = state.state_dict()
    process.on_main(lambda: _save(run_dir, state, rest, keep, losses, validation_due))
    return checkpoint_path(run_dir, state.step)


def _save(
    run_dir: Path,
    state: TrainState,
    rest: dict[str, Any],
    keep: int,
    losses: Mapping[int, float] | None,
    validation_due: bool,
) -> None:
    if not all(parameter.isfinite().all() for parameter in state.model.parameters()):
        raise ValueError(
            f"the weights after step {state.step} are not finite; the last good checkpoint is "
            f"{latest_checkpoint(run_dir)}; try lower rates in optimizer, in another run_dir"
        )
    folder = checkpoint_path(run_dir, state.step)
    partial = folder.with_name(folder.name + PARTIAL)
    for leftover in folder.parent.glob("*" + PARTIAL):
        shutil.rmtree(leftover)
    try:
        partial.mkdir(parents=True)
        tensors = {name: tensor.contiguous() for name, tensor in state.model.state_dict().items()}
        save_file(tensors, partial / WEIGHTS)
        torch.save(rest, partial / REST)
        (partial / WEIGHTS).chmod((partial / REST).stat().st_mode)  # safetensors leaves it readable by its owner alone
        write_json(partial / CHECKSUMS, {name: _sha256(partial / name) for name in (WEIGHTS, REST)})
        if losses is not None or validation_due:
            write_json(partial / VALIDATION, validation_of(state.model.config.train_length, losses))
        for path in (*partial.iterdir(), partial):
            flush(path)
        _remove(folder)
        os.replace(partial, folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # each of the writers has its own for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"can't write {folder} ({first_line(error)})") from error
    flush(folder.parent)
    kept = {*list_checkpoints(run_dir)[-keep:], best_checkpoint(run_dir)}
    for old in list_checkpoints(run_dir):
        if old not in kept:
            _remove(old)


def restore_checkpoint(folder: Path, state: TrainState) -> None:
    """Loads a checkpoint into a freshly built state.

    Raises ValueError naming the file when it is missing, damaged, or of another architecture.
    """
    weights = load_weights(folder)
    _check_sum(folder, REST)
    try:
        rest = torch.load(folder / REST, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file, with advice that is wrong here
        raise damaged(folder, REST, type(error).__name__) from error
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
    _check_sum(folder, WEIGHTS)
    try:
        return load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise damaged(folder, WEIGHTS, first_line(error)) from error


def _remove(folder: Path) -> None:
    """Takes a checkpoint away at once, by its name, and then its files."""
    if folder.exists():
        doomed = folder.with_name(folder.name + ".old" + PARTIAL)
        os.replace(folder, doomed)
        shutil.rmtree(doomed)


def _check_sum(folder: Path, name: str) -> None:
    """Raises ValueError when a file's bytes are not those that were written; a folder without checksums passes."""
    try:
        sums = read_json(folder / CHECKSUMS, (name,))
        if sums is not None and sums[name] != _sha256(folder / name):
            raise damaged(folder, name, "its checksum differs")
    except OSError as error:
        raise damaged(folder, name, str(error.strerror)) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
