"""Trains the runs of an experiment: python scripts/sweep.py experiment=quickstart

Each run is a torchrun of its own in runs/EXPERIMENT/RUN, a fixed folder: on this machine, or as a Slurm job with
launcher=slurm. Finished runs are skipped and interrupted ones go on from their last checkpoint, so the same command can
be stopped and started at any time. A failed run is named at the end with the last lines of its log, does not stop the
others, and stays failed until retry_failed=1. plan=true and status=true only look.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

from omegaconf import OmegaConf

from configs.command import command, compose
from configs.schema import check
from data.cores import available_cores
from eval.child import Failure, remembered_failure
from eval.experiment import Experiment, Run, expand, read_experiment, refuse_changed, select
from eval.slurm import HERE, SLURM, jobs_of, submit, wait_for
from eval.sweep import in_order, launch, make_slots, status_table, to_start, torchrun, visible_gpus

LAUNCHERS = ("local", SLURM, HERE)


@command("sweep")
def main(config: Any) -> None:
    _, runs = read_runs(config)
    chosen = in_order(select(runs, config.only), config.order)
    if config.status:
        show_status(chosen)
    elif config.plan:
        show_plan(chosen, runs, config)
    elif report(train(chosen, config, wait=config.wait)):
        sys.exit(1)


def read_runs(config: Any) -> tuple[Experiment, list[Run]]:
    """The experiment that a sweep config asks for and all its runs, checked against what is on the disk."""

    def train_config(overrides: list[str]) -> Any:
        check(composed := compose("train", overrides))
        return OmegaConf.to_container(composed)

    if config.launcher.kind not in LAUNCHERS:
        raise ValueError(f"launcher.kind={config.launcher.kind} is unknown; choose one of: {', '.join(LAUNCHERS)}")
    experiment = read_experiment(config)
    runs = expand(experiment, train_config)
    refuse_changed(runs)
    return experiment, runs


def show_status(runs: list[Run]) -> None:
    """Prints the table of the runs, then the last words of those that failed."""
    jobs = jobs_of(runs)
    print(status_table(runs, jobs).to_string(index=False, na_rep="", float_format="{:.3f}".format))
    for run in runs:
        if run not in jobs and (failure := remembered_failure(run)):
            print(f"\n{failure}")


def show_plan(chosen: list[Run], runs: list[Run], config: Any) -> None:
    """Prints the command line of every chosen run, in the order in which they start, and what is left to do."""
    from eval.sweep_plan import check_buildable, describe_plan, expected_speed, plan_table

    check_buildable(chosen)
    gpus, places = visible_gpus(), {run.config["device"] for run in chosen}
    on_gpus = "cpu" not in places and bool("cuda" in places or gpus or config.launcher.kind == SLURM)
    devices = config.gpus_per_run * config.launcher.nodes
    at_once = None
    if config.launcher.kind == "local" and (gpus or not on_gpus):
        at_once = len(slots_for(chosen, config))
    speed = expected_speed(runs, devices, on_gpus)
    for run in chosen:
        print(f"{run.id}:\n  {' '.join(run.overrides)}")
    print()
    print(describe_plan(plan_table(chosen, speed, jobs_of(chosen)), speed, devices, at_once))


def train(runs: Sequence[Run], config: Any, wait: bool = True) -> list[Failure]:
    """Trains what is not finished; returns what failed. Jobs are only submitted unless the command is to wait."""
    if all(run.status == "finished" for run in runs):
        return []
    jobs = jobs_of(runs)
    for run, job in jobs.items():
        if job.state == "unknown":
            raise ValueError(
                f"{run.run_dir}/job.json names Slurm job {job.id}, and there is no squeue here to ask about it; use a "
                "machine that has it, or delete that file if the job is gone"
            )
        print(f"{run.id}: {job} already", file=sys.stderr)
    idle = [run for run in runs if run not in jobs]
    unfinished = [run for run in idle if run.status != "finished"]
    refuse_untrainable(unfinished, config.gpus_per_run * config.launcher.nodes)
    if config.launcher.kind == "local":
        refuse_untrainable_here(unfinished)
        return launch(idle, torchrun(config.gpus_per_run), slots_for(idle, config), config.retry_failed)
    tries, failures = to_start(idle, config.retry_failed)
    folder = Path(config.launcher.job_dir or runs[0].run_dir.parent / "jobs")
    for run, job in submit(tries, config.launcher, config.gpus_per_run, folder).items():
        print(f"{run.id}: job {job.id}")
        jobs[run] = job
    return failures + (wait_for(runs, jobs) if wait else [])


def slots_for(runs: Sequence[Run], config: Any) -> list[dict[str, str]]:
    unfinished = sum(run.status != "finished" for run in runs)
    return make_slots(config.gpus_per_run, config.runs_at_once, visible_gpus(), available_cores(), unfinished)


def refuse_untrainable(runs: list[Run], processes: int) -> None:
    """Raises ValueError for what train.py would refuse in every run: a model, or data that are missing or don't fit."""
    import torch

    from eval.sweep_plan import check_buildable
    from train import open_data
    from training.distributed import Process

    runs = [run for run in runs if run.script == Run.script]
    check_buildable(runs)
    seen = set()
    for run in runs:
        config = OmegaConf.create(dict(run.config))
        key = json.dumps([run.config[name] for name in ("data", "train", "validation")] + [config.model.vocab_size])
        if key not in seen:
            seen.add(key)
            open_data(config, Process(0, processes, torch.device("cpu"), "fp32"))


def refuse_untrainable_here(runs: list[Run]) -> None:
    """Raises ValueError for a device that this machine lacks, and for a kind of attention that can't train on it."""
    from model.attend import check_trainable
    from training.distributed import choose_device

    configs = [run.config for run in runs if run.script == Run.script]
    for device, attention in {(config["device"], config["attention"]) for config in configs}:
        check_trainable(attention, choose_device(device))


def report(failures: list[Failure]) -> bool:
    """Says on stderr which runs failed and why; true when any did."""
    for failure in failures:
        print(f"\n{failure}", file=sys.stderr)
    if failures:
        names = ", ".join(failure.run.id for failure in failures)
        print(f"\n{len(failures)} failed: {names}; retry_failed=1 starts them again", file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    main()
