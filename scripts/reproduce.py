"""An experiment from data to figures: python scripts/reproduce.py experiment=quickstart

Prepares its data, trains its runs (scripts/sweep.py), and writes its tables and figures into results/EXPERIMENT. What
is done already is skipped, so the same command can be stopped and started at any time. A run that failed is marked as
missing in the tables, named at the end, and makes the exit code 1. An experiment that only calculates (fig2, fig6) has
no runs.
"""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

from configs.command import command
from eval.entropy_growth import entropy_growth, growth_figure, growth_fits, read_calculation, write_calculation
from eval.experiment import Experiment, Run, select
from eval.figures import loss_by_length, loss_curves, save_figure
from eval.sweep import in_order
from eval.tables import collect, history, to_markdown, write_table
from scripts.sweep import read_runs, report, train


@command("reproduce")
def main(config: Any) -> None:
    if "calculate" in config.experiment:
        calculate(config)
        return
    experiment, runs = read_runs(config)
    if experiment.measure not in MEASURES:
        raise ValueError(f"experiment.measure={experiment.measure} is not known; choose one of: {', '.join(MEASURES)}")
    chosen = in_order(select(runs, config.only), config.order)
    prepare(experiment)
    failures = train(chosen, config)
    print("Written:", *MEASURES[experiment.measure](experiment, runs), sep="\n  ")
    if report(failures):
        sys.exit(1)


def calculate(config: Any) -> None:
    """Writes the numbers, the fits and the figure of an experiment without runs."""
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
    if experiment.prepare:
        done = subprocess.run([sys.executable, "scripts/prepare_data.py", *experiment.prepare], check=False)
        if done.returncode:
            sys.exit(done.returncode)


def measure_loss(experiment: Experiment, runs: list[Run]) -> list[Path]:
    """Writes the tables and figures of the losses of what is finished; prints the table, returns the paths."""
    table = collect(experiment, runs, command_line(), commit())
    paths = write_table(table, experiment.results)
    paths += save_figure(loss_curves(history(runs), table), experiment.results / "loss_curves")
    paths += save_figure(loss_by_length(table), experiment.results / "loss_by_length")
    print(to_markdown(table))
    return paths


MEASURES = {"loss": measure_loss}  # what an experiment's key `measure` can be


def command_line() -> str:
    return shlex.join(["python", "scripts/reproduce.py", *sys.argv[1:]])


def commit() -> str | None:
    """The commit of the code, `-dirty` when a tracked file outside results/ differs from it; None outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    main()
