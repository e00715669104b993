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
    assert said.endswith("1 failed: alibi-seed0\n")


def test_runs_left_out_by_only_are_missing_and_not_trained(pretend, tmp_path):
    pretend("only=[rope,nope]")
    rows = json.loads((tmp_path / "results" / "quickstart" / "table.json").read_text())["rows"]
    assert {row for row, cells in rows.items() if cells["mean"][0] is not None} == {"rope", "nope"}
    assert len(rows) == 6


def test_the_commit_is_none_outside_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert reproduce.commit() is None
