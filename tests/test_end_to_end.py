"""A run from its first step to its evaluation: alone and under torchrun, stopped, killed and resumed."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import train
from tests.tiny_run import ROOT, listing, run, tiny_words, write_tiny_data
from training.checkpoint import list_checkpoints, load_weights

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with tiny data in data/."""
    write_tiny_data(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 12 steps that was never stopped; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    write_tiny_data(folder / "data")
    assert run(train.main, tiny_words(folder)) == 0
    return folder


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl, without the one number that depends on the clock."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "train/tokens_per_second"} for line in lines]


def last_checkpoint(run_dir: Path) -> dict[str, Any]:
    """Every value of the newest checkpoint, by name, tensors as the bytes that they consist of."""
    folder = list_checkpoints(run_dir)[-1]
    values: dict[str, Any] = {"folder": folder.name}

    def walk(node: Any, name: str) -> None:
        if isinstance(node, dict | list | tuple):
            for key, child in node.items() if isinstance(node, dict) else enumerate(node):
                walk(child, f"{name}.{key}")
        else:
            values[name] = node.numpy().tobytes() if isinstance(node, torch.Tensor) else node

    walk(load_weights(folder), "model")
    walk(torch.load(folder / "training.pt", weights_only=True), "training")
    return values


def act_at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Makes the run do something right after the update number `step`."""
    original = train.train_step

    def train_step(state, *arguments):
        loss = original(state, *arguments)
        if state.step == step:
            act()
        return loss

    monkeypatch.setattr(train, "train_step", train_step)


def assert_same_losses(a: list[dict[str, Any]], b: list[dict[str, Any]], tolerance: float) -> None:
    assert [line.keys() for line in a] == [line.keys() for line in b]
    for one, other in zip(a, b, strict=True):
        assert one == pytest.approx(other, abs=tolerance), one["step"]


def test_metrics_have_the_documented_keys_in_order(uninterrupted: Path):
    lines = metrics_of(uninterrupted)
    steps = [(line["step"], "val" if "val/loss_32" in line else "train") for line in lines]
    expected = [(0, "val")]
    for step in range(1, 13):
        expected += [(step, "train")] + ([(step, "val")] if step % 4 == 0 else [])
    assert steps == expected
    for line in lines:
        assert line["tokens"] == 256 * line["step"]
        kinds = ({"val/loss_32", "val/loss_64"}, {"train/loss", "train/lr_scale"})
        assert line.keys() - {"step", "tokens"} in kinds
    assert "train/tokens_per_second" in (uninterrupted / "run" / "metrics.jsonl").read_text()


def test_the_loss_starts_at_that_of_guessing_and_falls(uninterrupted: Path):
    lines = metrics_of(uninterrupted)
    assert lines[0]["val/loss_32"] == pytest.approx(math.log(264), abs=1e-5)
    assert lines[0]["val/loss_64"] == pytest.approx(math.log(264), abs=1e-5)
    assert lines[1]["train/loss"] == pytest.approx(math.log(264), abs=1e-5)  # measured before the first update
    assert lines[-1]["val/loss_32"] < math.log(264) - 0.1


def test_config_yaml_is_resolved_and_has_the_defaults_of_the_slots(uninterrupted: Path):
    text = (uninterrupted / "run" / "config.yaml").read_text()
    assert "tau: 10.0" in text
    assert "${" not in text
    assert "???" not in text
    config = OmegaConf.load(uninterrupted / "run" / "config.yaml")
    assert config.run_dir == str(uninterrupted / "run")
    assert (config.train.steps, config.model.width) == (12, 32)


def test_a_run_directory_holds_what_is_documented_and_nothing_else(uninterrupted: Path):
    run_dir = uninterrupted / "run"
    assert {path.name for path in run_dir.iterdir()} == {"config.yaml", "metrics.jsonl", "log.txt", "checkpoints"}
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"step_000008", "step_000012"}
    assert "step 12/12" in (run_dir / "log.txt").read_text()


def test_nothing_is_written_outside_the_run_directory(folder: Path):
    before = listing(folder)
    assert run(train.main, tiny_words(Path(), "run_dir=runs/mine")) == 0
    after = listing(folder)
    assert {name: after[name] for name in before} == before
    assert all(name.startswith("runs/mine/") for name in after.keys() - before.keys())
    assert {path.name for path in folder.iterdir()} == {"data", "runs"}


def test_two_processes_train_to_the_same_losses_as_one(folder: Path, uninterrupted: Path):
    before = listing(folder)
    subprocess.run([*TORCHRUN, ROOT / "train.py", *tiny_words(folder)], cwd=folder, env=ONE_THREAD, check=True)
    assert_same_losses(metrics_of(folder), metrics_of(uninterrupted), tolerance=2e-4)
    after = listing(folder)
    assert all(name.startswith("run/") for name in after.keys() - before.keys())
    assert last_checkpoint(folder / "run").keys() == last_checkpoint(uninterrupted / "run").keys()


@pytest.mark.parametrize("micro_batch_tokens", [1, 64])
def test_micro_batches_do_not_change_the_losses(folder: Path, uninterrupted: Path, micro_batch_tokens: int):
    assert run(train.main, tiny_words(folder, f"train.micro_batch_tokens={micro_batch_tokens}")) == 0
    assert_same_losses(metrics_of(folder), metrics_of(uninterrupted), tolerance=2e-4)


def test_the_same_command_gives_the_same_run_bit_for_bit(folder: Path, uninterrupted: Path):
    assert run(train.main, tiny_words(folder)) == 0
    assert metrics_of(folder) == metrics_of(uninterrupted)
    assert last_checkpoint(folder / "run") == last_checkpoint(uninterrupted / "run")


def test_another_seed_gives_another_run_on_the_same_data(folder: Path, uninterrupted: Path):
    assert run(train.main, tiny_words(folder, "seed=1")) == 0
    assert metrics_of(folder)[-1] != metrics_of(uninterrupted)[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_saves_itself_and_goes_on_as_if_never_stopped(
    folder: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    with monkeypatch.context() as patch:
        act_at_step(patch, 6, lambda: os.kill(os.getpid(), number))
        assert run(train.main, tiny_words(folder)) == 128 + number
    assert [path.name for path in list_checkpoints(folder / "run")] == ["step_000004", "step_000006"]
    assert metrics_of(folder)[-1]["step"] == 6
    assert "stopped by a signal after step 6" in (folder / "run" / "log.txt").read_text()
    assert run(train.main, tiny_words(folder)) == 0
    assert metrics_of(folder) == metrics_of(uninterrupted)
    assert last_checkpoint(folder / "run") == last_checkpoint(uninterrupted / "run")


def test_a_run_stopped_at_its_last_step_is_finished(folder: Path, monkeypatch: pytest.MonkeyPatch):
    act_at_step(monkeypatch, 12, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run(train.main, tiny_words(folder)) == 0
    assert list_checkpoints(folder / "run")[-1].name == "step_000012"


def test_a_killed_run_goes_on_from_its_checkpoint_without_double_or_torn_lines(folder: Path, uninterrupted: Path):
    """Killed after step 6, two steps beyond its checkpoint, while it writes a line."""
    killed = (
        "import os, signal, sys; sys.path.insert(0, sys.argv.pop(1)); import train; step = train.train_step\n"
        "def train_step(state, *rest):\n"
        "    if state.step == 6: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(state, *rest)\n"
        "train.train_step = train_step; train.main()"
    )
    done = subprocess.run([sys.executable, "-c", killed, ROOT, *tiny_words(folder)], cwd=folder, check=False)
    assert done.returncode == -signal.SIGKILL
    assert metrics_of(folder)[-1]["step"] == 6
    with (folder / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "tok')
    assert run(train.main, tiny_words(folder)) == 0
    assert_same_losses(metrics_of(folder), metrics_of(uninterrupted), tolerance=2e-4)


def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(
    folder: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        act_at_step(patch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        run(train.main, tiny_words(folder))
    checkpoints = folder / "run" / "checkpoints"
    (checkpoints / "step_000006").rename(checkpoints / "step_000006.partial")
    (checkpoints / "step_000006.partial" / "training.pt").unlink()
    assert run(train.main, tiny_words(folder)) == 0
    assert metrics_of(folder) == metrics_of(uninterrupted)
    assert last_checkpoint(folder / "run") == last_checkpoint(uninterrupted / "run")


def test_a_run_killed_before_its_first_checkpoint_starts_over(
    folder: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
):
    def crash() -> None:
        raise RuntimeError("the machine is gone")

    with monkeypatch.context() as patch:
        act_at_step(patch, 2, crash)
        with pytest.raises(RuntimeError, match="the machine is gone"):
            run(train.main, tiny_words(folder))
    assert run(train.main, tiny_words(folder)) == 0
    assert metrics_of(folder) == metrics_of(uninterrupted)


def test_a_finished_run_started_again_does_nothing(uninterrupted: Path, capsys: pytest.CaptureFixture):
    before = listing(uninterrupted)
    assert run(train.main, tiny_words(uninterrupted)) == 0
    assert listing(uninterrupted) == before
    assert "already trained to step 12; nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("position", ["rope", "nope", "alibi", "logn_p_rope", "yarn"])
def test_every_kind_of_scheme_trains_and_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch, position: str):
    words = tiny_words(folder, f"position={position}", "train.steps=4", "train.checkpoint_every=2")
    with monkeypatch.context() as patch:
        act_at_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run(train.main, words) == 128 + signal.SIGTERM
    assert run(train.main, words) == 0
    resumed = last_checkpoint(folder / "run")
    assert run(train.main, [*words, f"run_dir={folder / 'again'}"]) == 0
    assert resumed == last_checkpoint(folder / "again")


@pytest.mark.slow
def test_an_offline_wandb_run_is_inside_the_run_directory_and_needs_no_network(folder: Path):
    environment = {**ONE_THREAD, "HOME": str(folder / "home"), "https_proxy": "http://127.0.0.1:9"}
    before = listing(folder)
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *tiny_words(folder, "train.steps=4", "wandb.mode=offline")],
        cwd=folder,
        env=environment,
        check=False,
    )
    assert done.returncode == 0
    assert list((folder / "run" / "wandb").glob("offline-run-*/*.wandb"))
    new = listing(folder).keys() - before.keys()
    assert all(name.startswith(("run/", "home/")) for name in new)
    assert metrics_of(folder)[-1]["step"] == 4


@pytest.mark.slow
def test_torchrun_stopped_by_sigterm_resumes_in_one_process(folder: Path):
    words = tiny_words(folder, "train.steps=400", "train.checkpoint_every=50", "data.repeat=true")
    child = subprocess.Popen([*TORCHRUN, ROOT / "train.py", *words], cwd=folder, env=ONE_THREAD)
    metrics = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and '"step": 60,' in metrics.read_text()):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=40) != 0
    reached = metrics_of(folder)[-1]["step"]
    assert 60 <= reached < 400
    assert list_checkpoints(folder / "run")[-1].name == f"step_{reached:06d}"
    assert run(train.main, words) == 0
    steps = [line["step"] for line in metrics_of(folder) if "train/loss" in line]
    assert steps == list(range(1, 401))
    for tensor in load_weights(list_checkpoints(folder / "run")[-1]).values():
        assert torch.isfinite(tensor).all()
