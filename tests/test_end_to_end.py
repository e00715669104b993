"""A run from its first step to its evaluation: alone and under torchrun, stopped, killed and resumed."""

import gzip
import json
import math
import os
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import train
from eval.runs import load_run, run_status
from model.gpt import GPT
from tests.runs import assert_same_losses, last_checkpoint, metrics_of
from tests.tiny_run import ROOT, listing, run, tiny_words, write_tiny_data
from training.checkpoint import load_weights
from training.checkpoint_folder import awaits_validation, best_checkpoint, list_checkpoints
from training.log import read_metrics_lines
from training.state import TrainState

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


def act_at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Makes the run do something right after the update number `step`."""
    original = train.train_step

    def train_step(state, *arguments):
        loss = original(state, *arguments)
        if state.step == step:
            act()
        return loss

    monkeypatch.setattr(train, "train_step", train_step)


def test_metrics_have_the_documented_keys_in_order(uninterrupted: Path):
    lines = metrics_of(uninterrupted)
    steps = [(line["step"], "val" if "val/loss_32" in line else "train") for line in lines]
    expected = [(0, "val")]
    for step in range(1, 13):
        expected += [(step, "train")] + ([(step, "val")] if step % 4 == 0 else [])
    assert steps == expected
    for line in lines:
        assert line["tokens"] == 256 * line["step"]
        kinds = ({"val/loss_32", "val/loss_64"}, {"train/loss", "train/grad_norm", "train/lr_scale"})
        assert line.keys() - {"step", "tokens"} in kinds
    for line in read_metrics_lines(uninterrupted / "run" / "metrics.jsonl"):
        if "train/loss" in line:
            assert line["train/tokens_per_second"] > 0
            assert 10e6 < line["train/memory_bytes"] < 100e9


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
    documented = {"config.yaml", "metrics.jsonl", "log.txt", "environments.json", "checkpoints"}
    assert {path.name for path in run_dir.iterdir()} == documented
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"step_000008", "step_000012"}
    log = (run_dir / "log.txt").read_text()
    assert "step 12/12" in log
    assert f" torch {torch.__version__}, Python {platform.python_version()}, commit " in log.splitlines()[1]


def test_nothing_is_written_outside_the_run_directory(folder: Path):
    before = listing(folder)
    assert run(train.main, tiny_words(Path(), "run_dir=runs/mine")) == 0
    after = listing(folder)
    assert {name: after[name] for name in before} == before
    assert all(name.startswith("runs/mine/") for name in after.keys() - before.keys())
    assert {path.name for path in folder.iterdir()} == {"data", "runs"}


@pytest.mark.parametrize("micro_batch_tokens", [pytest.param(1, marks=pytest.mark.slow), 64])
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


def stop_in_validation(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Sends the run a SIGTERM at that batch of its validations, counted from its start."""
    original, batches = train.loss_by_length, []

    def loss_by_length(*arguments: Any, between: Callable[[], None]) -> dict[int, float]:
        def count() -> None:
            batches.append(1)
            if len(batches) == after:
                os.kill(os.getpid(), signal.SIGTERM)
            between()

        return original(*arguments, between=count)

    monkeypatch.setattr(train, "loss_by_length", loss_by_length)


@pytest.mark.parametrize(("step", "batch"), [pytest.param(8, 5, marks=pytest.mark.slow), (12, 8)])
def test_a_validation_is_cut_short_by_a_signal_and_made_up_for(
    folder: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, step: int, batch: int
):
    """Two batches a validation: at the steps 0, 4, 8 and 12."""
    with monkeypatch.context() as patch:
        stop_in_validation(patch, batch)
        assert run(train.main, tiny_words(folder)) == 128 + signal.SIGTERM
    last = list_checkpoints(folder / "run")[-1]
    assert last.name == f"step_{step:06d}"
    assert awaits_validation(last)
    assert metrics_of(folder)[-1].keys() >= {"train/loss"}
    assert run_status(folder / "run", 12) == "interrupted"
    assert run(train.main, tiny_words(folder)) == 0
    assert run_status(folder / "run", 12) == "finished"
    assert metrics_of(folder) == metrics_of(uninterrupted)
    assert last_checkpoint(folder / "run") == last_checkpoint(uninterrupted / "run")
    assert best_checkpoint(folder / "run") == folder / "run" / "checkpoints" / "step_000012"


def test_a_run_stopped_in_its_first_validation_begins_anew(
    folder: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        stop_in_validation(patch, 2)
        assert run(train.main, tiny_words(folder)) == 128 + signal.SIGTERM
    assert not list_checkpoints(folder / "run")
    assert run(train.main, tiny_words(folder)) == 0
    assert metrics_of(folder) == metrics_of(uninterrupted)


def test_a_run_killed_between_a_belated_validation_and_its_record_makes_it_again(
    folder: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        stop_in_validation(patch, 5)
        run(train.main, tiny_words(folder))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train, "record_validation", killed)
        with pytest.raises(KeyboardInterrupt):
            run(train.main, tiny_words(folder))
    assert metrics_of(folder)[-1].keys() >= {"val/loss_32"}
    assert run(train.main, tiny_words(folder)) == 0
    assert metrics_of(folder) == metrics_of(uninterrupted)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_step_that_is_not_finite_stops_the_run_and_can_be_skipped(
    folder: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, kind: str
):
    poison_step(monkeypatch, 7, kind)
    assert run(train.main, tiny_words(folder)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    what = "the loss and the gradient of step 7 are" if kind == "loss" else "the gradient of step 7 is"
    for part in (f"error: {what} not finite", "tokens 1,536 to 1,792", "checkpoints/step_000004", "nonfinite=skip"):
        assert part in line
    last = metrics_of(folder)[-1]
    counts = {"train/nonfinite_gradient": 1} | ({"train/nonfinite_loss": 1} if kind == "loss" else {})
    assert last.items() >= {"step": 7, **counts}.items()
    assert ("train/loss" in last) == (kind == "gradient")
    assert metrics_of(folder)[:-1] == metrics_of(uninterrupted)[: len(metrics_of(folder)) - 1]
    assert [path.name for path in list_checkpoints(folder / "run")] == ["step_000004"]

    assert run(train.main, tiny_words(folder, "train.nonfinite=skip")) == 0
    assert f"{what} not finite" in (folder / "run" / "log.txt").read_text().split("skipped the update")[0]
    text = (folder / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    lines = [line for line in metrics_of(folder) if "train/lr_scale" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line.get("train/nonfinite_gradient", 0) for line in lines] == [0] * 6 + [1] * 6
    assert 0 < last["train/lr_scale"] <= 1
    assert torch.load(list_checkpoints(folder / "run")[-1] / "training.pt", weights_only=True)["nonfinite"] == {
        "loss": int(kind == "loss"),
        "gradient": 1,
    }


def test_a_skipped_step_changes_no_weight_and_no_optimizer(folder: Path, monkeypatch: pytest.MonkeyPatch):
    words = ("train.nonfinite=skip", "train.checkpoint_every=1", "train.steps=7", "train.keep_checkpoints=9")
    poison_step(monkeypatch, 7, "gradient")
    assert run(train.main, tiny_words(folder, *words)) == 0
    before, after = list_checkpoints(folder / "run")[-2:]
    assert (before / "model.safetensors").read_bytes() == (after / "model.safetensors").read_bytes()
    one, other = (torch.load(path / "training.pt", weights_only=True)["optimizers"] for path in (before, after))
    torch.testing.assert_close([o["state"] for o in other], [o["state"] for o in one], rtol=0, atol=0)


def poison_step(monkeypatch: pytest.MonkeyPatch, step: int, kind: str) -> None:
    """Makes the loss, or only the gradient, of one step of the run infinite or not a number."""
    original = train.build_state

    def build_state(*arguments: Any) -> TrainState:
        state = original(*arguments)

        def spoil_loss(_module: object, inputs: tuple, loss: torch.Tensor) -> torch.Tensor:
            return loss * math.inf if torch.is_grad_enabled() and state.step == step - 1 else loss

        def spoil_gradient(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * math.nan if state.step == step - 1 else gradient

        if kind == "loss":
            state.model.register_forward_hook(spoil_loss)
        else:
            state.model.embedding.weight.register_hook(spoil_gradient)
        return state

    monkeypatch.setattr(train, "build_state", build_state)


def test_the_best_checkpoint_survives_and_is_found_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch):
    original = train.loss_by_length

    def loss_by_length(model: GPT, *arguments: Any, **keywords: Any) -> dict[int, float]:
        losses = original(model, *arguments, **keywords)
        return {length: 1.0 if len(list_checkpoints(folder / "run")) == 0 else 2.0 for length in losses}

    monkeypatch.setattr(train, "loss_by_length", loss_by_length)
    assert run(train.main, tiny_words(folder, "train.keep_checkpoints=1")) == 0
    assert [path.name for path in list_checkpoints(folder / "run")] == ["step_000004", "step_000012"]
    best, _ = load_run(folder / "run", step="best")
    assert torch.equal(best.output.weight, load_run(folder / "run", step=4)[0].output.weight)
    assert not torch.equal(best.output.weight, load_run(folder / "run")[0].output.weight)


def test_two_runs_never_train_in_one_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    codes: list[int] = []
    act_at_step(monkeypatch, 6, lambda: codes.append(run(train.main, tiny_words(folder))))
    assert run(train.main, tiny_words(folder)) == 0
    assert codes == [2]
    assert [line["step"] for line in metrics_of(folder) if "train/loss" in line] == list(range(1, 13))


def test_a_full_disk_ends_the_run_in_one_line_with_its_last_checkpoint_whole(
    folder: Path, uninterrupted: Path, capsys: pytest.CaptureFixture
):
    """The kernel cuts every file of the run off at some size; without the limit the same command goes on."""
    metrics = uninterrupted / "run" / "metrics.jsonl"
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    words = tiny_words(folder)
    largest = max(path.stat().st_size for path in (uninterrupted / "run").rglob("*.*"))
    said: list[str] = []
    for limit in (100, metrics.stat().st_size // 2, largest // 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        try:
            assert run(train.main, words) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        said.append(capsys.readouterr().err.splitlines()[-1])
        for checkpoint in list_checkpoints(folder / "run"):
            load_weights(checkpoint)
    assert [line.startswith("error: ") for line in said] == [True] * 3
    assert "File too large" in said[1]
    assert "can't write" in said[2]
    assert "the same command goes on from the start" in said[2]
    assert run(train.main, words) == 0
    assert metrics_of(folder) == metrics_of(uninterrupted)
    assert last_checkpoint(folder / "run") == last_checkpoint(uninterrupted / "run")


def test_a_profile_holds_a_few_steps(folder: Path):
    assert run(train.main, tiny_words(folder, "profile=true")) == 0
    with gzip.open(folder / "run" / "profile" / "trace.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert {name for name in names if name.startswith("ProfilerStep")} == {f"ProfilerStep#{step}" for step in (2, 3, 4)}
    assert "aten::mm" in names
    assert "aten::mm" in (folder / "run" / "profile" / "operators.txt").read_text()


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
