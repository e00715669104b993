"""What must hold while a run goes on; where it does not, the main process says so and all of them end."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.checkpoint_folder import latest_checkpoint
from training.distributed import Process
from training.log import RunLog
from training.state import TrainState
from training.step import StepResult


def check_same_step(state: TrainState, run_dir: Path, process: Process) -> None:
    """Raises ValueError when the processes have not restored the same checkpoint."""
    steps = [int(step) for step in process.gather(state.step)]
    different = [rank for rank, step in enumerate(steps) if step != steps[0]]
    if different:
        _refuse(
            process,
            f"run_dir={run_dir}: process {different[0]} goes on from step {steps[different[0]]}, but the main process "
            f"from step {steps[0]}; put it on a file system that all nodes share",
        )


def check_finite(losses: Mapping[str, float], step: int, run_dir: Path, process: Process) -> None:
    """Raises ValueError, before anything is written, when a validation loss is infinite or not a number."""
    if bad := [key for key, loss in losses.items() if not math.isfinite(loss)]:
        _refuse(
            process,
            f"{bad[0]}={losses[bad[0]]} at step {step}; the last good checkpoint is {latest_checkpoint(run_dir)}; try "
            "lower rates in optimizer, in another run_dir",
        )


def check_step(config: Any, state: TrainState, result: StepResult, process: Process, log: RunLog) -> None:
    """Names a step whose loss or gradient is not finite; raises ValueError unless such steps are skipped."""
    if not (bad := result.nonfinite):
        return
    stop, per_step = state.step, config.train.tokens_per_step
    what = (
        f"the {' and the '.join(bad)} of step {stop} {'is' if len(bad) == 1 else 'are'} not finite (tokens "
        f"{(stop - 1) * per_step:,} to {stop * per_step:,} of the training data)"
    )
    if config.train.nonfinite == "skip":
        log.info(f"{what}; skipped the update")
        return
    _refuse(
        process,
        f"{what}; the last good checkpoint is {latest_checkpoint(Path(config.run_dir))}; go on without such steps by "
        "train.nonfinite=skip, or try lower rates in optimizer, in another run_dir",
    )


def _refuse(process: Process, text: str) -> None:
    def refuse() -> None:
        raise ValueError(text)

    process.on_main(refuse)
