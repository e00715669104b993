"""The whole task in small: a tiny run is fine-tuned for a few steps, and tested."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from eval.runs import load_config, load_run, read_metrics
from scripts import needle
from tests.tiny_run import ROOT, listing, refusal, run, tiny_words, write_tiny_data

TASK = ("needle.needles=2", "needle.digits=3", "train.length=160", "lengths=[160,224]", "samples=3")
SMALL = ("train.rows=4", "train.steps=4", "train.checkpoint_every=2", "train.validate_every=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, and its fine-tuned and tested child; tests leave them as they are."""
    folder = tmp_path_factory.mktemp("needle")
    write_tiny_data(folder / "data")
    assert run(train.main, tiny_words(folder, "attention=blockwise")) == 0
    assert run(needle.main, words(folder)) == 0
    return folder


def words(folder: Path, *more: str) -> list[str]:
    run_words = (f"run_dir={folder / 'run'}", "tokenizer=bytes", "device=cpu", "precision=fp32")
    return [*run_words, *TASK, *SMALL, "train.validation_samples=3", *more]


def child(folder: Path) -> Path:
    return folder / "run-needle-seed0"


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "needle.json").read_text())


def test_the_child_s_config_names_its_parent_and_keeps_its_model(folder: Path):
    parent, config = load_config(folder / "run"), load_config(child(folder))
    assert config.needle.parent == {"run_dir": str(folder / "run"), "step": 12}
    for key in ("model", "position", "optimizer"):
        assert config[key] == parent[key]
    assert config.train.length == parent.train.length  # the position scheme's constants belong to it
    assert config.attention == "auto"  # the parent may be of another machine
    assert config.schedule.kind == "constant_then_linear"
    assert config.schedule.warmup_fraction == config.schedule.cooldown_fraction == pytest.approx(1 / 3)


def test_fine_tuning_starts_from_the_parent_s_weights_and_moves_them(folder: Path):
    metrics = read_metrics(child(folder))
    assert metrics["step"].tolist() == [0, 1, 2, 3, 4]
    assert metrics["val/loss_160"].notna().tolist() == [True, False, True, False, True]
    assert metrics["tokens"].tolist() == [640 * step for step in range(5)]
    before, _ = load_run(folder / "run")
    after, _ = load_run(child(folder))
    changed = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(changed)


def test_needle_json_has_the_documented_keys(folder: Path):
    found = result(child(folder))
    assert found == result(folder / "run")
    assert found["accuracy"].keys() == {"160", "224"}
    for entry in found["accuracy"].values():
        assert 0 <= entry["mean"] <= 1
        assert entry["needles"] == 6
        assert entry["samples"] == 3
        assert len(entry["by_depth"]) == 10
        assert entry["teacher_forced"]["needles"] == 6
    assert found["run_dir"] == str(child(folder))
    assert found["finetuned_from"] == str(folder / "run")
    assert found["step"] == 4
    assert found["finetuned_from_step"] == 12
    assert found["task"]["digits"] == 3
    assert (found["train"]["rows"], found["train"]["length"]) == (4, 160)


def test_every_sample_has_a_line(folder: Path):
    lines = [json.loads(line) for line in (child(folder) / "needle.jsonl").read_text().splitlines()]
    assert [(line["length"], line["index"]) for line in lines] == [(n, i) for n in (160, 224) for i in range(3)]
    assert (child(folder) / "needle.png").stat().st_size > 10_000


def test_run_again_it_tests_without_training(folder: Path, capsys: pytest.CaptureFixture):
    before = listing(folder)
    capsys.readouterr()
    assert run(needle.main, words(folder)) == 0
    text = capsys.readouterr().out
    assert "already trained to step 4" in text
    assert "160 tokens" in text
    assert "teacher-forced" in text
    after = listing(folder)
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == []


def test_interrupted_it_goes_on_to_the_same_weights(folder: Path, monkeypatch: pytest.MonkeyPatch):
    original = train.train_step

    def interrupted(state, *arguments):
        if state.step == 3:
            raise KeyboardInterrupt
        return original(state, *arguments)

    elsewhere = f"out_dir={folder / 'again'}"
    monkeypatch.setattr(train, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(needle.main, words(folder, elsewhere))
    monkeypatch.setattr(train, "train_step", original)
    assert run(needle.main, words(folder, elsewhere)) == 0
    one, other = load_run(child(folder))[0], load_run(folder / "again")[0]
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_first_steps_can_take_shorter_samples(folder: Path, monkeypatch: pytest.MonkeyPatch):
    shapes, original = [], train.train_step

    def recorded(state, forward, tokens, *rest):
        shapes.append(tuple(tokens.shape))
        return original(state, forward, tokens, *rest)

    monkeypatch.setattr(train, "train_step", recorded)
    shorter = ("needle.needles=1", "train.length=200", "train.first_length=100", "train.first_fraction=0.5")
    assert run(needle.main, words(folder, *shorter, f"out_dir={folder / 'shorter'}")) == 0
    assert shapes == [(8, 100), (8, 100), (4, 200), (4, 200)]
    assert load_config(folder / "shorter").needle.first_length == 100


def test_a_signal_ends_the_test_that_follows_the_training(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def in_place_of_the_test(*_arguments, **_keys):
        handlers.append(signal.getsignal(signal.SIGTERM))
        sys.exit()

    handlers: list[Any] = []
    monkeypatch.setattr(needle, "find_needles", in_place_of_the_test)
    assert run(needle.main, words(folder, "train.steps=1", f"out_dir={folder / 'signal'}")) == 0
    assert handlers == [signal.getsignal(signal.SIGTERM)]


def test_without_fine_tuning_the_run_itself_is_tested(folder: Path, tmp_path: Path):
    write_tiny_data(tmp_path / "data")
    assert run(train.main, tiny_words(tmp_path, "train.steps=4")) == 0
    assert run(needle.main, words(tmp_path, "finetune=false")) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "run"]
    found = result(tmp_path / "run")
    assert found["finetuned_from"] is None
    assert found["run_dir"] == str(tmp_path / "run")
    assert (tmp_path / "run" / "needle.jsonl").is_file()


def test_how_many_samples_are_tested_at_a_time_does_not_matter(folder: Path):
    expected = (child(folder) / "needle.jsonl").read_text()
    assert run(needle.main, words(folder, "micro_batch_tokens=100")) == 0
    assert (child(folder) / "needle.jsonl").read_text() == expected


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["lengths=[60]"], ["length=60 is too short", "2 needles", "use at least"]),
        (["train.length=60"], ["length=60 is too short"]),
        (["lengths=[1600]"], ["1500 tokens", "length=1600", "shorter lengths"]),
        (["lengths=[]"], ["lengths=[]"]),
        (["samples=0"], ["samples=0"]),
        (["train.rows=0"], ["train.rows=0"]),
        (["train.first_length=0"], ["train.first_length=0", "at least 1"]),
        (["train.first_length=100"], ["train.first_length=100", "train.length=160"]),
        (["train.first_fraction=2"], ["train.first_fraction=2", "[0, 1]"]),
        (["needle.needles=0"], ["needles=0"]),
        (["needle.template=hello"], ["template=hello", "{city}"]),
        (["scale=huge"], ["scale=huge", "full, proxy"]),
        (["run_dir={}/nowhere"], ["nowhere", "config.yaml"]),
        (["run_dir={}/untrained"], ["untrained", "no checkpoint", "train.py"]),
        (["step=5"], ["no checkpoint of step 5"]),
        (["data_dir={}/nowhere"], ["data_dir=", "nowhere", "no such folder"]),
        (["tokenizer=null"], ["tokenizer=null"]),
        (["seed=-1"], ["seed=-1"]),
        (["train.steps=5"], ["train.steps=5", "train.steps=4", "another"]),
        (["needle.cue=?"], ["needle.cue=?", "another"]),
        (["train.warmup_fraction=2"], ["warmup_fraction=2"]),
    ],
    ids=lambda value: value[0],
)
def test_needle_refuses(folder: Path, more: list[str], parts: list[str], capsys: pytest.CaptureFixture):
    (folder / "untrained").mkdir(exist_ok=True)
    (folder / "untrained" / "config.yaml").write_bytes((folder / "run" / "config.yaml").read_bytes())
    before = listing(folder)
    line = refusal(needle.main, words(folder, *(word.format(folder) for word in more)), capsys)
    for part in parts:
        assert part in line
    assert listing(folder) == before


def test_more_than_the_memory_holds_is_refused_before_anything_is_done(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("eval.memory.available_bytes", lambda device: 1 << 18)
    before = listing(folder)
    line = refusal(needle.main, words(folder, "micro_batch_tokens=1"), capsys)
    for part in ("1 x 168 tokens", "GiB", "keys and values", "drop length=160"):
        assert part in line
    assert listing(folder) == before


@pytest.mark.slow
def test_two_processes_give_the_losses_and_answers_of_one(folder: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    together = [*command, ROOT / "scripts" / "needle.py", *words(folder, f"out_dir={folder / 'two'}")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(together, check=True, cwd=folder, env=environment, capture_output=True)
    one, two = read_metrics(child(folder)), read_metrics(folder / "two")
    for key in ("train/loss", "val/loss_160"):
        assert two[key].tolist() == pytest.approx(one[key].tolist(), rel=1e-3, nan_ok=True)
    a, b = (json.loads((path / "needle.json").read_text())["accuracy"] for path in (child(folder), folder / "two"))
    assert a.keys() == b.keys()
    assert [entry["needles"] for entry in b.values()] == [6, 6]
