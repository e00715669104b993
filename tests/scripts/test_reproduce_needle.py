"""scripts/reproduce.py experiment=table2 with trained-looking folders in the place of training and fine-tuning."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from eval.sweep import Failure
from scripts import reproduce
from training.run_config import write_config

FILES = {f"table.{kind}" for kind in ("md", "csv", "tex", "json")}
FILES |= {"paired.csv"}
FILES |= {f"{name}.{kind}" for name in ("accuracy_by_length", "accuracy_by_depth") for kind in ("png", "pdf")}
SMALL = ("experiment=table2", "experiment.axes.position=[rope,alibi]", "experiment.seeds=[0]")


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs reproduce.py in an empty folder; gives what was started. The named rows fail in one script or the other."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, untrained: tuple[str, ...] = (), failing: tuple[str, ...] = ()) -> list[str]:
        started = []

        def train(runs: list, _config: Any) -> list[Failure]:
            fine_tunes = runs[0].script == "scripts/needle.py"
            lost = failing if fine_tunes else untrained
            waiting = [run for run in runs if run.status != "finished"]
            for run in waiting:
                started.append(f"{run.script} {run.id}")
                if run.row in lost:
                    continue
                (run.run_dir / "checkpoints" / f"step_{run.steps:06d}").mkdir(parents=True)
                if fine_tunes:
                    (run.parent.run_dir / "needle.json").write_text(json.dumps(everything_found(run)))
                else:
                    write_config(run.run_dir, OmegaConf.create(run.config))
            return [Failure(run, 1, "the reason") for run in waiting if run.row in lost]

        def prepare(arguments: list[str], check: bool) -> Any:
            started.append(" ".join(arguments[1:3]))
            return type("Done", (), {"returncode": 0})

        monkeypatch.setattr(reproduce, "train", train)
        monkeypatch.setattr(reproduce.subprocess, "run", prepare)
        monkeypatch.setattr(reproduce, "commit", lambda: "abc")
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *SMALL, *words])
        reproduce.main()
        return started

    return run


def everything_found(run: Any) -> dict[str, Any]:
    depths = [{"from": 0.0, "to": 1.0, "mean": 1.0, "needles": 2}]
    entry = {"mean": 1.0, "samples": run.config["samples"], "by_depth": depths}
    accuracy = {str(length): entry for length in run.lengths}
    return {
        "accuracy": accuracy,
        "run_dir": str(run.run_dir),
        "step": run.steps,
        "finetuned_from": str(run.parent.run_dir),
        "task": run.config["needle"],
        "seed": run.seed,
        "data": run.config["data_dir"] or run.parent.config["data"]["dir"],
    }


def test_it_prepares_trains_fine_tunes_and_writes_tables_and_figures(pretend, tmp_path, capsys):
    started = pretend()
    prepared = [f"scripts/prepare_data.py source={source}" for source in ("fineweb10b", "c4")]
    copies = [f"scripts/needle.py {row}-seed0-needle-seed0" for row in ("rope", "alibi")]
    assert started == [*prepared, "train.py rope-seed0", "train.py alibi-seed0", *copies]
    folder = tmp_path / "results" / "table2"
    assert {path.name for path in folder.iterdir()} == FILES
    table = json.loads((folder / "table.json").read_text())
    assert table["columns"] == ["acc@4096", "acc@16384", "acc@65536"]
    assert table["rows"]["rope"]["mean"] == [1.0, 1.0, 1.0]
    assert table["rows"]["rope"]["published"]["mean"] == [0.962, 0.0, 0.0]
    assert "| RoPE | **1.000** |" in capsys.readouterr().out


def test_at_laptop_size_it_has_folders_of_its_own(pretend, tmp_path):
    pretend("scale=proxy")
    assert (tmp_path / "runs" / "proxy" / "4k" / "rope-seed0-needle-seed0").is_dir()
    kept = json.loads((tmp_path / "results" / "proxy" / "runs" / "4k" / "rope-seed0" / "needle.json").read_text())
    assert kept["accuracy"]["4096"]["mean"] == 1.0
    table = json.loads((tmp_path / "results" / "proxy" / "table2" / "table.json").read_text())
    assert table["columns"] == ["acc@256", "acc@1024", "acc@4096"]
    assert table["rows"]["rope"]["published"] is None


def test_what_is_fine_tuned_and_tested_is_not_started_again_even_where_only_its_record_is_left(pretend, tmp_path):
    pretend("scale=proxy")
    assert pretend("scale=proxy") == []
    shutil.rmtree(tmp_path / "runs")
    assert pretend("scale=proxy") == []
    table = json.loads((tmp_path / "results" / "proxy" / "table2" / "table.json").read_text())
    assert table["rows"]["rope"]["mean"] == [1.0, 1.0, 1.0]


def test_a_run_that_was_kept_without_its_needles_is_trained_again_for_its_weights(pretend, tmp_path):
    pretend("scale=proxy")
    shutil.rmtree(tmp_path / "runs")
    kept = tmp_path / "results" / "proxy" / "runs" / "4k" / "rope-seed0"
    (kept / "needle.json").unlink()
    (kept / "eval.json").write_text("{}")
    assert pretend("scale=proxy")[1:] == ["train.py rope-seed0", "scripts/needle.py rope-seed0-needle-seed0"]
    assert json.loads((kept / "needle.json").read_text())["accuracy"]["4096"]["mean"] == 1.0
    assert (kept / "eval.json").exists()


def test_a_failed_fine_tuning_is_named_and_missing_and_the_others_go_on(pretend, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        pretend(failing=("rope",))
    assert exit.value.code == 1
    rows = json.loads((tmp_path / "results" / "table2" / "table.json").read_text())["rows"]
    assert rows["rope"]["mean"] == [None, None, None]
    assert rows["alibi"]["mean"] == [1.0, 1.0, 1.0]
    assert "rope-seed0-needle-seed0 failed with exit code 1" in capsys.readouterr().err


def test_a_run_that_did_not_finish_is_not_fine_tuned(pretend, capsys):
    with pytest.raises(SystemExit):
        pretend(untrained=("rope",))
    said = capsys.readouterr()
    assert "1 failed: rope-seed0;" in said.err
    assert "| RoPE | missing | missing | missing |" in said.out


def test_only_chooses_what_is_fine_tuned(pretend):
    assert pretend("only=[alibi]")[2:] == ["train.py alibi-seed0", "scripts/needle.py alibi-seed0-needle-seed0"]


def test_fast_means_few_steps_of_fine_tuning_too(pretend, tmp_path):
    pretend("scale=proxy", "fast=true")
    copy = tmp_path / "runs" / "proxy" / "4k-fast" / "rope-seed0-needle-seed0"
    assert (copy / "checkpoints" / "step_000004").is_dir()
