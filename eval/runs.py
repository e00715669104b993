"""Reading run directories: what state a run is in, what it measured, and its model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from model.gpt import GPT


def run_status(run_dir: str | Path, steps: int) -> str:
    """ "missing" (never started), "interrupted" (can be resumed) or "finished" (trained and validated to the end)."""
    from training.checkpoint_folder import awaits_validation, checkpoint_path

    run_dir = Path(run_dir)
    last = checkpoint_path(run_dir, steps)
    if last.is_dir() and not awaits_validation(last):
        return "finished"
    return "interrupted" if (run_dir / "config.yaml").exists() else "missing"


def read_metrics(run_dir: str | Path) -> "pd.DataFrame":
    """metrics.jsonl as a table with one row a step, empty cells where a step did not measure something."""
    import pandas as pd

    from training.log import METRICS, read_metrics_lines

    lines = read_metrics_lines(Path(run_dir) / METRICS)
    if not lines:
        return pd.DataFrame({"step": []})
    return pd.DataFrame(lines).groupby("step", as_index=False).last()


def trained_at(run_dir: str | Path) -> set[str]:
    """The commits that a run was started and resumed at; {"unknown"} where it did not record them."""
    path = Path(run_dir) / "environments.json"
    starts = json.loads(path.read_text()) if path.exists() else []
    return {start["commit"] or "unknown" for start in starts} or {"unknown"}


def load_config(run_dir: str | Path) -> Any:
    """The config that a run was started with. Raises FileNotFoundError when the folder is not a run directory."""
    from training.run_config import read_config

    return read_config(Path(run_dir))


def find_checkpoint(run_dir: str | Path, step: int | str | None = None) -> Path:
    """The folder of a run's newest checkpoint (None), of the one of a step, or of the one with the lowest validation
    loss at the training length ("best").

    Raises FileNotFoundError when there is none, ValueError for another word.
    """
    from training.checkpoint_folder import (
        best_checkpoint,
        checkpoint_path,
        checkpoint_step,
        latest_checkpoint,
        list_checkpoints,
    )

    run_dir = Path(run_dir)
    if step is None:
        folder, wanted = latest_checkpoint(run_dir), "no checkpoint"
    elif step == "best":
        folder, wanted = best_checkpoint(run_dir), "no validated checkpoint"
    elif isinstance(step, int) or step.isdecimal():
        folder, wanted = checkpoint_path(run_dir, int(step)), f"no checkpoint of step {step}"
    else:
        raise ValueError(f"step={step} must be a number, best, or null for the newest checkpoint")
    if folder is not None and folder.is_dir():
        return folder
    if kept := [checkpoint_step(other) for other in list_checkpoints(run_dir)]:
        raise FileNotFoundError(f"run_dir={run_dir} has {wanted}; it has those of the steps {kept}")
    raise FileNotFoundError(
        f"run_dir={run_dir} has {wanted} yet; train it first: python train.py run_dir={run_dir} ..."
    )


def load_run(
    run_dir: str | Path, device: "torch.device | str" = "cpu", step: int | str | None = None
) -> "tuple[GPT, Any]":
    """The trained model of a run, ready to evaluate, and its config, both with attention=auto: the backend that a run
    was trained with changes no results, and may not work on this machine.

    Args:
        step: of the checkpoint to load; None takes the newest, "best" the one with the lowest validation loss.

    Raises FileNotFoundError when there is no such run or checkpoint, ValueError when the checkpoint is damaged.
    """
    from omegaconf.errors import OmegaConfBaseException

    from training.checkpoint import load_weights
    from training.state import build_model

    config = load_config(run_dir)
    config.attention = "auto"
    weights = load_weights(find_checkpoint(run_dir, step))
    try:
        model = build_model(config)
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, KeyError, AttributeError, OmegaConfBaseException) as error:
        raise ValueError(f"{run_dir}/config.yaml does not fit the run's checkpoint ({type(error).__name__})") from error
    return model.to(device).eval(), config
