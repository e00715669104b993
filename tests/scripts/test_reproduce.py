"""scripts/reproduce.py with trained-looking folders in the place of training."""

import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from omegaconf import OmegaConf

from eval.evaluation import lacking
from eval.sweep import Failure
from scripts import reproduce
from tests.evaluations import write_evaluation
from training.run_config import write_config

FILES = {f"table.{kind}" for kind in ("md", "csv", "tex", "json")}
FILES |= {"paired.csv"}
FILES |= {f"loss_{name}.{kind}" for name in ("curves", "by_length", "by_position") for kind in ("png", "pdf")}


ROPE, TWO = "experiment.axes.position=[rope]", "experiment.axes.position=[rope,alibi]"  # few rows take less time


class Done(NamedTuple):
    """What a call of reproduce.py prepared, and the ids of what it trained and evaluated."""

    prepared: list[tuple[str, ...]]
    trained: list[str]
    evaluated: list[str]


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Runs the quickstart in an empty folder where training and evaluating take no time; the given rows fail.

    Figures are drawn only where asked for: they take a second.
    """
    monkeypatch.chdir(tmp_path)

    save_figure = reproduce.save_figure

    def run(*arguments: str, failing: tuple = (), unevaluated: tuple = (), figures: bool = False) -> Done:
        prepared, trained, evaluated = [], [], []
        monkeypatch.setattr(reproduce, "prepare", lambda experiment: prepared.append(experiment.prepare))

        def train(runs, _config):
            waiting = [run for run in runs if run.status != "finished"]
            for run in waiting:
                run.run_dir.mkdir(parents=True)
                losses = {f"val/loss_{length}": 1 + length / 4096 for length in run.lengths}
                lines = [{"step": 0, "tokens": 0} | losses, {"step": run.steps, "tokens": run.tokens} | losses]
                (run.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
                write_config(run.run_dir, OmegaConf.create(run.config))
                if run.row not in failing:
                    (run.run_dir / "checkpoints" / f"step_{run.steps:06d}").mkdir(parents=True)
            trained.extend(run.id for run in waiting)
            return [Failure(run, 1, "the reason") for run in waiting if run.row in failing]

        def evaluate(runs, _config):
            jobs = [job for job in lacking(runs) if job.row not in unevaluated]
            for job in jobs:
                write_evaluation(job.trained, job)
            evaluated.extend(job.id for job in jobs)
            return [Failure(job, 1, "no room") for job in lacking(runs)]

        monkeypatch.setattr(reproduce, "train", train)
        monkeypatch.setattr(reproduce, "evaluate", evaluate)
        monkeypatch.setattr(reproduce, "save_figure", save_figure if figures else lambda *_: [])
        monkeypatch.setattr(sys, "argv", ["reproduce.py", "experiment=quickstart", *arguments])
        reproduce.main()
        return Done(prepared, trained, evaluated)

    return run


def test_it_prepares_trains_and_writes_tables_and_figures_and_says_where(pretend, tmp_path, capsys):
    done = pretend("fast=true", figures=True)
    folder = tmp_path / "results" / "quickstart-fast"
    assert done.prepared == [("source=sotu", "tokenizer=bytes", "out_dir=data/shards/sotu_bytes")]
    assert {path.name for path in folder.iterdir()} == FILES
    table = json.loads((folder / "table.json").read_text())
    assert table["columns"] == ["val@256", "val@1024", "val@4096"]
    assert table["command"] == "python scripts/reproduce.py experiment=quickstart fast=true"
    assert table["rows"]["scale_invariant_p_rope"]["mean"] == [1.0625, 1.25, 2.0]
    said = capsys.readouterr().out
    assert "| Scale-invariant p-RoPE |" in said
    assert all(f"results/quickstart-fast/{name}" in said for name in FILES)


def test_a_failed_run_is_missing_in_the_tables_and_named_and_makes_the_exit_code_1(pretend, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        pretend("name=trial", failing=("alibi",))
    assert exit.value.code == 1
    rows = json.loads((tmp_path / "results" / "trial" / "table.json").read_text())["rows"]
    assert rows["alibi"]["mean"] == [None, None, None]
    assert rows["rope"]["mean"] == [1.0625, 1.25, 2.0]
    said = capsys.readouterr().err
    assert "alibi-seed0 failed with exit code 1; the end of runs/trial/alibi-seed0/child.log:\nthe reason" in said
    assert said.endswith("1 failed: alibi-seed0; retry_failed=1 starts them again\n")


def test_runs_left_out_by_only_are_missing_and_not_trained(pretend, tmp_path):
    pretend("only=[rope,nope]")
    rows = json.loads((tmp_path / "results" / "quickstart" / "table.json").read_text())["rows"]
    assert {row for row, cells in rows.items() if cells["mean"][0] is not None} == {"rope", "nope"}
    assert len(rows) == 6


def test_every_finished_run_is_evaluated_once_and_a_failure_is_named(pretend, tmp_path, capsys):
    with pytest.raises(SystemExit):
        pretend(TWO, unevaluated=("alibi",))
    said = capsys.readouterr().err
    assert (
        "alibi-seed0 (evaluation) failed with exit code 1; the end of runs/quickstart/alibi-seed0/evaluation/" in said
    )
    assert "alibi-seed0 has no loss by position: it was not evaluated, so the figure shows it as missing" in said
    assert pretend(TWO)[1:] == ([], ["alibi-seed0 (evaluation)"])
    assert pretend(TWO) == ([], [], [])  # without the data, too: nothing needs them any more


def test_what_is_kept_of_the_runs_gives_the_same_tables_without_runs(pretend, tmp_path, capsys):
    pretend(TWO)
    folder = tmp_path / "results" / "quickstart"
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {path.name for path in (tmp_path / "results" / "runs" / "quickstart" / "rope-seed0").iterdir()} == {
        "config.yaml", "metrics.jsonl", "eval.json"
    }  # fmt: skip
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(folder)
    assert pretend(TWO) == ([], [], [])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert not (tmp_path / "runs").exists()
    capsys.readouterr()


def test_only_a_run_that_is_not_kept_is_trained(pretend, tmp_path):
    pretend(TWO)
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(tmp_path / "results" / "runs" / "quickstart" / "alibi-seed0")
    assert pretend(TWO)[1:] == (["alibi-seed0"], ["alibi-seed0 (evaluation)"])


def test_a_kept_run_without_loss_by_position_is_named_and_still_in_the_table(pretend, tmp_path, capsys):
    pretend(ROPE)
    kept = Path("results", "runs", "quickstart", "rope-seed0")
    (kept / "eval.json").unlink()
    shutil.rmtree(tmp_path / "runs")
    capsys.readouterr()
    assert pretend(ROPE).evaluated == []
    said = capsys.readouterr().err
    assert f"{kept} was kept without it, and runs/quickstart/rope-seed0 has no checkpoint" in said
    rows = json.loads((tmp_path / "results" / "quickstart" / "table.json").read_text())["rows"]
    assert rows["rope"]["mean"] == [1.0625, 1.25, 2.0]


def test_a_kept_run_of_another_configuration_is_refused(pretend, tmp_path, capsys):
    pretend(ROPE)
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(SystemExit):
        pretend(ROPE, 'overrides=["train.steps=7"]')
    assert (
        "results/runs/quickstart/rope-seed0 was made with train.steps=400, but would now be run with train.steps=7"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("trial", ["fast=true", "name=trial"])
def test_trials_are_not_kept_and_take_nothing_that_is(pretend, tmp_path, trial):
    pretend(ROPE)
    assert pretend(trial, ROPE).trained == ["rope-seed0"]
    assert [path.name for path in (tmp_path / "results" / "runs").rglob("*-seed0")] == ["rope-seed0"]


def test_an_experiment_without_runs_writes_its_numbers_fits_and_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["experiment.t={first: 10, last: 100, points: 3}", "experiment.samples={fewest: 3, most: 30}"]
    monkeypatch.setattr(
        sys, "argv", ["reproduce.py", "experiment=fig2", *small, "experiment.logits=1000", "experiment.fit_from=10"]
    )
    reproduce.main()
    folder = tmp_path / "results" / "fig2"
    assert {path.name for path in folder.iterdir()} == {"data.csv", "summary.json", "fig2.png", "fig2.pdf"}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["experiment"] == "fig2"
    assert "experiment=fig2" in summary["command"]
    assert summary["fits"]["none"]["log t"]["slope"] == pytest.approx(1, abs=0.1)
    assert len((folder / "data.csv").read_text().splitlines()) == 1 + 3 * 3
    assert "scale-invariant (tau = 10)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment.calculate=magic"], "calculate=magic is unknown; it must be entropy_growth"),
        (["name=../x"], "name=../x must be the name of one folder"),
        (["experiment.name=../x"], "experiment.name=../x must be the name of one folder"),
        (["experiment.ratio=1"], "experiment.ratio=1 must be above 1"),
        (["experiment.t={first: 1, last: 100, points: 3}"], "must have 2 <= first < last"),
        (['overrides=["seed=1"]'], "overrides=['seed=1'] means nothing to experiment=fig2, which has no runs"),
    ],
    ids=str,
)
def test_a_mistake_in_an_experiment_without_runs_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "experiment=fig2", *words])
    with pytest.raises(SystemExit):
        reproduce.main()
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
