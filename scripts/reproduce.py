"""An experiment from data to figures: python scripts/reproduce.py experiment=quickstart

Prepares its data, trains its runs (scripts/sweep.py), evaluates them (scripts/evaluate.py), and writes its tables and
figures into results/EXPERIMENT and what was measured of each run into results/runs/. What is done already is skipped,
so the same command can be stopped and started at any time; a run that is kept in results/runs/ with what is asked for
needs no training. A run that failed is marked as missing in the tables, named at the end, and makes the exit code 1. An
experiment that only calculates (fig2, fig6) has no runs.
"""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

from omegaconf import OmegaConf

from configs.command import command, compose
from data.cores import available_cores
from eval.attention_experiment import is_kept_without, measure_attention, read_settings
from eval.child import Failure
from eval.entropy_growth import entropy_growth, growth_figure, growth_fits, read_calculation, write_calculation
from eval.evaluation import evaluate_command, lacking, losses_by_position, why_missing
from eval.experiment import Experiment, Run, check_name, select
from eval.figures import loss_by_length, loss_by_position, loss_curves, save_figure
from eval.kept import keep
from eval.needle_experiment import NeedleRun, by_scheme, collect_needles, needle_runs
from eval.needle_figure import accuracy_by_length, heat_maps
from eval.sweep import in_order, launch, make_slots, visible_gpus
from eval.tables import collect, history, to_markdown, write_table
from scripts.sweep import read_runs, report, train
from training.environment import commit


@command("reproduce")
def main(config: Any) -> None:
    if "calculate" in config.experiment:
        calculate(config)
        return
    experiment, runs = read_runs(config)
    if experiment.measure not in MEASURES:
        raise ValueError(f"experiment.measure={experiment.measure} is not known; choose one of: {', '.join(MEASURES)}")
    if experiment.measure == "attention":
        read_settings(experiment)  # a mistake there is told before the training
    chosen = in_order(select(runs, config.only), config.order)
    by_position = experiment.measure == "loss"
    fine_tuned = needle_runs(experiment, chosen, needle_config) if experiment.measure == "needle" else []
    again = set(without_weights(experiment, chosen, fine_tuned))
    to_train = [replace(run, kept_dir=None) if run in again else run for run in chosen]
    unfinished = any(run.status != "finished" for run in [*to_train, *fine_tuned])
    if unfinished or (lacking(chosen) if by_position else not fine_tuned):
        prepare(experiment)
    failures = train(to_train, config)
    if by_position:
        failures += evaluate(chosen, config)
    if ready := [run for run in fine_tuned if run.can_start]:
        failures += train(ready, config)
    paths = MEASURES[experiment.measure](experiment, runs)
    paths += filter(None, map(keep, runs))
    print("Written:", *paths, sep="\n  ")
    if report(failures):
        sys.exit(1)


def without_weights(experiment: Experiment, runs: list[Run], fine_tuned: list[NeedleRun]) -> list[Run]:
    """The runs that are kept without what the experiment measures, which takes their weights: to be trained again."""
    lack = {copy.parent for copy in fine_tuned if copy.status != "finished"}
    if experiment.measure == "attention":
        lack = {run for run in runs if is_kept_without(run, read_settings(experiment))}
    return [run for run in runs if run in lack and run.record != run.run_dir]


def calculate(config: Any) -> None:
    """Writes the numbers, the fits and the figure of an experiment without runs."""
    check_name(config.name)
    check_name(config.experiment.name, "experiment.name")
    keys = read_calculation(config)
    data = entropy_growth(keys)
    fits = growth_fits(data, keys["fit_from"])
    folder = Path("results", config.name or keys["name"])
    made_by = {"experiment": keys["name"], "command": command_line(), "commit": commit()}
    paths = write_calculation(folder, data, {**made_by, "fits": fits})
    paths += save_figure(growth_figure(data, keys["ratio"], fits), folder / keys["name"])
    print(data.pivot(index="t", columns="scheme", values="entropy").round(3).to_string())
    print("Written:", *paths, sep="\n  ")


def prepare(experiment: Experiment) -> None:
    """Runs scripts/prepare_data.py as the experiment says; it has its own messages and skips what is there."""
    for arguments in filter(None, (experiment.prepare, experiment.prepare_needle)):
        done = subprocess.run([sys.executable, "scripts/prepare_data.py", *arguments], check=False)
        if done.returncode:
            sys.exit(done.returncode)


def evaluate(runs: list[Run], config: Any) -> list[Failure]:
    """Evaluates what is trained and lacks it, each in one process, where the runs were trained; returns what failed."""
    if not (jobs := lacking(runs)):
        return []
    if config.launcher.kind != "local":
        folder = config.launcher.job_dir or str(jobs[0].trained.parent / "jobs")
        return train(jobs, OmegaConf.merge(config, {"gpus_per_run": 1, "launcher": {"nodes": 1, "job_dir": folder}}))
    slots = make_slots(1, config.runs_at_once, visible_gpus(), available_cores(), len(jobs))
    return launch(jobs, evaluate_command, slots, config.retry_failed)


def measure_loss(experiment: Experiment, runs: list[Run]) -> list[Path]:
    """Writes the tables and figures of the losses of what is finished; prints the table, returns the paths."""
    table = collect(experiment, runs, command_line(), commit())
    paths = write_table(table, experiment.results)
    paths += save_figure(loss_curves(history(runs), table), experiment.results / "loss_curves")
    paths += save_figure(loss_by_length(table), experiment.results / "loss_by_length")
    paths += save_figure(loss_by_position(losses_by_position(runs), table), experiment.results / "loss_by_position")
    for reason in filter(None, map(why_missing, runs)):
        print(f"{reason}, so the figure shows it as missing", file=sys.stderr)
    print(to_markdown(table))
    return paths


def needle_config(words: list[str]) -> Any:
    return OmegaConf.to_container(compose("needle", words))


def measure_needles(experiment: Experiment, runs: list[Run]) -> list[Path]:
    """The same for the needles that fine-tuned runs found."""
    fine_tuned = needle_runs(experiment, runs, needle_config)
    table = collect_needles(experiment, fine_tuned, command_line(), commit())
    paths = write_table(table, experiment.results)
    paths += save_figure(accuracy_by_length(table), experiment.results / "accuracy_by_length")
    paths += save_figure(heat_maps(by_scheme(fine_tuned)), experiment.results / "accuracy_by_depth")
    print(to_markdown(table))
    return paths


def measure_figure_1(experiment: Experiment, runs: list[Run]) -> list[Path]:
    """Writes attention.json of every finished run, and figure 1 out of them."""
    return measure_attention(experiment, runs, {"command": command_line(), "commit": commit()})


# What an experiment's key `measure` can be.
MEASURES = {"loss": measure_loss, "needle": measure_needles, "attention": measure_figure_1}


def command_line() -> str:
    return shlex.join(["python", "scripts/reproduce.py", *sys.argv[1:]])


if __name__ == "__main__":
    main()
