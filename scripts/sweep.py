"""Trains the runs of an experiment: python scripts/sweep.py experiment=quickstart

Each run is a torchrun child in runs/EXPERIMENT/RUN with a fixed folder. Finished runs are skipped and interrupted ones
go on from their last checkpoint, so the same command can be stopped and started at any time. A failed run is named at
the end with the last lines of its log, and does not stop the others.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

from omegaconf import OmegaConf

from configs.command import command, compose
from configs.schema import check
from eval.experiment import Experiment, Run, expand, read_experiment, refuse_changed, select
from eval.sweep import Failure, available_cores, launch, make_slots, status_table, torchrun, visible_gpus


@command("sweep")
def main(config: Any) -> None:
    _, runs = read_runs(config)
    chosen = select(runs, config.only)
    if config.status:
        print(status_table(chosen).to_string(index=False, na_rep="", float_format="{:.3f}".format))
    elif config.plan:
        for run in chosen:
            print(f"{run.id}: {run.status}, {run.tokens:,} tokens\n  {' '.join(run.overrides)}")
    elif report(train(chosen, config)):
        sys.exit(1)


def read_runs(config: Any) -> tuple[Experiment, list[Run]]:
    """The experiment that a sweep config asks for and all its runs, checked against what is on the disk."""

    def train_config(overrides: list[str]) -> Any:
        check(composed := compose("train", overrides))
        return OmegaConf.to_container(composed)

    experiment = read_experiment(config)
    runs = expand(experiment, train_config)
    refuse_changed(runs)
    return experiment, runs


def train(runs: Sequence[Run], config: Any, script: str = "train.py") -> list[Failure]:
    """Trains what is not finished; returns what failed."""
    unfinished = sum(run.status != "finished" for run in runs)
    if not unfinished:
        return []
    slots = make_slots(config.gpus_per_run, config.runs_at_once, visible_gpus(), available_cores(), unfinished)
    return launch(runs, torchrun(config.gpus_per_run, script), slots)


def report(failures: list[Failure]) -> bool:
    """Says on stderr which runs failed and why; true when any did."""
    for failure in failures:
        print(f"\n{failure}", file=sys.stderr)
    if failures:
        print(f"\n{len(failures)} failed: {', '.join(failure.run.id for failure in failures)}", file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    main()
