"""scripts/reproduce.py with trained-looking folders in the place of training."""

import json
import sys

import pytest

from eval.sweep import Failure
from scripts import reproduce

FILES = {f"table.{kind}" for kind in ("md", "csv", "tex", "json")}
FILES |= {f"{name}.{kind}" for name in ("loss_curves", "loss_by_length") for kind in ("png", "pdf")}


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Runs reproduce.py in an empty folder where training takes no time; the given rows fail."""
    monkeypatch.chdir(tmp_path)
    prepared = []
    monkeypatch.setattr(reproduce, "prepare", lambda experiment: prepared.append(experiment.prepare))

    def run(*arguments: str, failing: tuple[str, ...] = ()) -> list:
        def train(runs, _config):
            for run in runs:
                run.run_dir.mkdir(parents=True)
                losses = {f"val/loss_{length}": 1 + length / 4096 for length in run.lengths}
                lines = [{"step": 0, "tokens": 0} | losses, {"step": run.steps, "tokens": run.tokens} | losses]
                (run.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
                if run.row not in failing:
                    (run.run_dir / "checkpoints" / f"step_{run.steps:06d}").mkdir(parents=True)
            return [Failure(run, 1, "the reason") for run in runs if run.row in failing]

        monkeypatch.setattr(reproduce, "train", train)
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *arguments])
        reproduce.main()
        return prepared

    return run


def test_it_prepares_trains_and_writes_tables_and_figures_and_says_where(pretend, tmp_path, capsys):
    prepared = pretend("experiment=quickstart", "fast=true")
    folder = tmp_path / "results" / "quickstart-fast"
    assert prepared == [("source=sotu", "tokenizer=bytes", "out_dir=data/shards/sotu_bytes")]
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


def test_the_commit_is_none_outside_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert reproduce.commit() is None


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
