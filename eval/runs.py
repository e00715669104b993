"""Reading run directories: what state a run is in, what it measured, and its model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from model.gpt import GPT


def run_status(run_dir: str | Path, steps: int) -> str:
    """ "missing" (never started), "interrupted" (can be resumed) or "finished" (its last checkpoint is there)."""
    run_dir = Path(run_dir)
    if (run_dir / "checkpoints" / f"step_{steps:06d}").is_dir():
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


def load_config(run_dir: str | Path) -> Any:
    """The config that a run was started with. Raises FileNotFoundError when the folder is not a run directory."""
    from training.run_config import read_config

    return read_config(Path(run_dir))


def find_checkpoint(run_dir: str | Path, step: int | None = None) -> Path:
    """The folder of a run's newest checkpoint, or of the one of a step. Raises FileNotFoundError when there is none."""
    from training.checkpoint import checkpoint_path, latest_checkpoint

    folder = latest_checkpoint(Path(run_dir)) if step is None else checkpoint_path(Path(run_dir), step)
    if folder is None or not folder.is_dir():
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(
            f"run_dir={run_dir} has {wanted} yet; train it first: python train.py run_dir={run_dir} ..."
        )
    return folder


def load_run(run_dir: str | Path, device: "torch.device | str" = "cpu", step: int | None = None) -> "tuple[GPT, Any]":
    """The trained model of a run, ready to evaluate, and its config.

    Args:
        step: of the checkpoint to load; None takes the newest.

    Raises FileNotFoundError when there is no such run or checkpoint, ValueError when the checkpoint is damaged.
    """
    from omegaconf.errors import OmegaConfBaseException

    from training.checkpoint import load_weights
    from training.state import build_model

    config = load_config(run_dir)
    weights = load_weights(find_checkpoint(run_dir, step))
    try:
        model = build_model(config)
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, KeyError, AttributeError, OmegaConfBaseException) as error:
        raise ValueError(f"{run_dir}/config.yaml does not fit the run's checkpoint ({type(error).__name__})") from error
    return model.to(device).eval(), config
