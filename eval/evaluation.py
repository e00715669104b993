"""The evaluations of an experiment's runs: which of them are lacking, the children that make them, what they say.

scripts/evaluate.py measures a run's last checkpoint on its validation tokens again, this time by position too.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from eval.experiment import Run

EVALUATION = "eval.json"


@dataclass(frozen=True, eq=False)
class Evaluation(Run):
    """The evaluation of a trained run as a job for `eval.sweep.launch`: `run_dir` only takes its log."""

    script: ClassVar[str] = "scripts/evaluate.py"

    @property
    def trained(self) -> Path:
        return self.run_dir.parent

    @property
    def id(self) -> str:
        return f"{self.trained.name} (evaluation)"

    @property
    def tokens(self) -> int:
        """Tokens that are evaluated, over all lengths."""
        return len(self.lengths) * self.config["validation"]["tokens"]

    @property
    def status(self) -> str:
        """`finished` once the trained run has an up-to-date evaluation, else `missing`: there is nothing to resume."""
        return "missing" if _read(self.trained, self) is None else "finished"


def lacking(runs: Iterable[Run]) -> list[Evaluation]:
    """The evaluations to be made: of the finished runs with a checkpoint and without an up-to-date eval.json."""
    return [
        Evaluation(run.row, run.seed, run.axes, _words(run), run.run_dir / "evaluation", run.config)
        for run in runs
        if run.status == "finished" and run.record == run.run_dir and by_position(run) is None
    ]


def evaluate_command(job: Run) -> list[str]:
    """The command of an `Evaluation`, one process."""
    return [sys.executable, job.script, *job.overrides]


def by_position(run: Run) -> Mapping[str, Any] | None:
    """What the run's eval.json says by position, {"4096": {"edges": ..., "mean": ..., "tokens": ...}, ...}.

    None where there is none, or it is not of the run's last step, its data, and its validation lengths and tokens.
    Raises ValueError naming a damaged file.
    """
    return _read(run.record, run)


def why_missing(run: Run) -> str | None:
    """Why a finished run is missing in the figure of losses by position; None where it is not."""
    if run.status != "finished" or by_position(run) is not None:
        return None
    if run.record == run.run_dir:
        return f"{run.id} has no loss by position: it was not evaluated"
    return f"{run.id} has no loss by position: {run.record} was kept without it, and {run.run_dir} has no checkpoint"


def losses_by_position(runs: Iterable[Run]) -> pd.DataFrame:
    """Columns row, seed, length, start, end, loss: nats per token over the positions [start, end) of each length."""
    records = []
    for run in runs:
        if run.status == "finished" and (measured := by_position(run)):
            for length in run.lengths:
                of_length = measured[str(length)]
                for (start, end), loss in zip(pairwise(of_length["edges"]), of_length["mean"], strict=True):
                    records.append((run.row, run.seed, length, start, end, loss))
    return pd.DataFrame(records, columns=["row", "seed", "length", "start", "end", "loss"])


def _words(run: Run) -> tuple[str, ...]:
    """As the run itself was validated, so that its losses come out the same."""
    same = {"device": run.config["device"], "precision": run.config["precision"]}
    same |= {"micro_batch_tokens": run.config["train"]["micro_batch_tokens"]}
    return (f"run_dir={run.run_dir}", *(f"{key}={value}" for key, value in same.items()))


def _read(folder: Path, run: Run) -> Mapping[str, Any] | None:
    path = folder / EVALUATION
    try:
        evaluation = json.loads(path.read_text())
        measured, step, data = (evaluation.get(key) for key in ("by_position", "step", "data"))
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}); delete it, and the run is evaluated again"
        ) from error
    same_data = data is not None and Path(data).name == Path(run.config["data"]["dir"]).name
    if measured is None or step != run.steps or not same_data:
        return None
    tokens = [sum(measured.get(str(length), {"tokens": []})["tokens"]) for length in run.lengths]
    return measured if set(tokens) == {run.config["validation"]["tokens"]} else None
