import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from tests.tiny_run import run, tiny_config, tiny_words, write_tiny_data
from training.distributed import Process
from training.log import METRICS, RunLog, read_metrics_lines
from training.run_config import read_config

MAIN, OTHER = (Process(rank, 1, torch.device("cpu"), "fp32") for rank in (0, 1))


def lines_of(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "tokens": 256 * step, "train/loss": 1.0}) + "\n" for step in steps)


def steps_in(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / METRICS).read_text().splitlines()]


@pytest.mark.parametrize("line", ["{}", "[1, 2]", "3", '{"step": "a"}', '{"step": null}'])
def test_a_line_without_a_step_is_named_with_its_number(tmp_path: Path, line: str):
    (tmp_path / METRICS).write_text(lines_of(1) + line + "\n" + lines_of(2))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is no object with a step"):
        read_metrics_lines(tmp_path / METRICS)


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    (tmp_path / METRICS).write_text(lines_of(1, 2) + '{"step": 3, "tok')
    assert [line["step"] for line in read_metrics_lines(tmp_path / METRICS)] == [1, 2]


def test_a_missing_file_has_no_lines(tmp_path: Path):
    assert read_metrics_lines(tmp_path / METRICS) == []


def test_a_broken_line_in_the_middle_is_named_with_its_number(tmp_path: Path):
    (tmp_path / METRICS).write_text(lines_of(1) + "{oops\n" + lines_of(2))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_metrics_lines(tmp_path / METRICS)


def test_a_resumed_log_drops_what_lies_beyond_its_step_and_a_torn_line(tmp_path: Path):
    (tmp_path / METRICS).write_text(lines_of(0, 1, 2, 3, 4, 5) + '{"step": 6')
    log = RunLog(tmp_path, tiny_config(tmp_path), step=3, process=MAIN)
    log.metrics({"step": 4, "tokens": 1024, "train/loss": 2.0})
    log.close()
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4]


def test_a_log_from_step_zero_starts_empty(tmp_path: Path):
    (tmp_path / METRICS).write_text(lines_of(0, 1))
    RunLog(tmp_path, tiny_config(tmp_path), step=0, process=MAIN).close()
    assert steps_in(tmp_path) == []


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path: Path):
    log = RunLog(tmp_path, tiny_config(tmp_path), step=0, process=MAIN)
    log.metrics({"step": 1, "tokens": 256, "train/loss": 2.0})
    assert steps_in(tmp_path) == [1]
    log.close()


def test_numbers_read_back_exactly(tmp_path: Path):
    log = RunLog(tmp_path, tiny_config(tmp_path), step=0, process=MAIN)
    log.metrics({"step": 1, "tokens": 256, "train/loss": 0.1 + 0.2})
    log.close()
    assert read_metrics_lines(tmp_path / METRICS) == [{"step": 1, "tokens": 256, "train/loss": 0.1 + 0.2}]


def test_info_is_in_the_log_file_and_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture):
    log = RunLog(tmp_path, tiny_config(tmp_path), step=0, process=MAIN)
    log.info("step 1 of 12")
    log.close()
    assert (tmp_path / "log.txt").read_text().endswith("step 1 of 12\n")
    assert "step 1 of 12" in capsys.readouterr().err


def test_a_failure_leaves_its_traceback_in_the_log_file_only(tmp_path: Path, capsys: pytest.CaptureFixture):
    log = RunLog(tmp_path, tiny_config(tmp_path), step=0, process=MAIN)
    with pytest.raises(RuntimeError), log:
        raise RuntimeError("the disk is full")
    text = (tmp_path / "log.txt").read_text()
    assert "Traceback" in text
    assert "RuntimeError: the disk is full" in text
    assert "Traceback" not in capsys.readouterr().err


def test_closed_logs_leave_no_handler_behind(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        log = RunLog(tmp_path / name, tiny_config(tmp_path), step=0, process=MAIN)
        log.info(f"run {name}")
        log.close()
    assert "run b" not in (tmp_path / "a" / "log.txt").read_text()


def test_a_process_other_than_the_main_one_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
    log = RunLog(tmp_path, tiny_config(tmp_path), step=0, process=OTHER)
    log.metrics({"step": 1, "tokens": 256})
    log.info("hello")
    log.sync()
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_the_error_of_another_process_is_in_the_log_file_with_its_number(tmp_path: Path, capsys: pytest.CaptureFixture):
    log = RunLog(tmp_path, tiny_config(tmp_path), step=0, process=OTHER)
    with pytest.raises(RuntimeError) as caught, log:
        raise RuntimeError("no such luck")
    assert caught.value.__notes__ == ["(process 1)"]  # the command says it, since the main process may not know
    text = (tmp_path / "log.txt").read_text()
    assert "process 1 ended with an error\nTraceback" in text
    assert "RuntimeError: no such luck" in text
    assert capsys.readouterr().err == ""


def test_the_loss_of_another_process_is_one_line_without_a_traceback(tmp_path: Path):
    log = RunLog(tmp_path, tiny_config(tmp_path), step=0, process=OTHER)
    with pytest.raises(RuntimeError) as caught, log:
        raise RuntimeError("[third_party/gloo/pair.cc:1] Connection closed by peer")
    assert not hasattr(caught.value, "__notes__")
    text = (tmp_path / "log.txt").read_text()
    assert text.count("\n") == 1
    assert "process 1 ended because another one did ([third_party/gloo/pair.cc:1] Connection closed by peer)" in text


def step_metrics(step: int, **more: float) -> dict[str, float]:
    measured = {"train/loss": 2.5, "train/tokens_per_second": 12345.6, "train/memory_bytes": 3e9}
    return {"step": step, "tokens": 256 * step, "train/lr_scale": 1.0, **measured, **more}


def test_a_line_every_so_often_says_how_the_run_is_doing(tmp_path: Path, capsys: pytest.CaptureFixture):
    log = RunLog(tmp_path, tiny_config(tmp_path, "train.log_every=5"), step=0, process=MAIN)
    for step in range(1, 13):
        log.metrics(step_metrics(step))
    log.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 5/12", "step 10/12", "step 12/12"]
    for part in ("loss 2.500", "3.0 GB", "12,346 tokens/s", "left"):
        assert part in lines[0]
    assert [line.split(" ", 2)[2] for line in (tmp_path / "log.txt").read_text().splitlines()] == lines


def test_the_time_left_is_that_of_the_steps_so_far_since_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    log = RunLog(tmp_path, tiny_config(tmp_path, "train.log_every=3", "train.steps=103"), step=0, process=MAIN)
    now[0] += 30
    log.metrics(step_metrics(3))
    log.close()
    assert "16:40 left" in (tmp_path / "log.txt").read_text()  # 100 steps of 10 s


def test_utilisation_is_shown_where_it_is_known_and_a_lost_loss_where_it_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    log = RunLog(tmp_path, tiny_config(tmp_path, "train.log_every=1"), step=0, process=MAIN)
    log.metrics(step_metrics(1, **{"train/utilisation": 0.423}))
    lost = step_metrics(2)
    del lost["train/loss"]
    log.metrics(lost)
    log.close()
    first, second = capsys.readouterr().err.splitlines()
    assert "42% utilised" in first
    assert "not finite" in second


def test_a_validation_that_the_checkpoint_does_not_know_is_forgotten(tmp_path: Path):
    validated = json.dumps({"step": 3, "tokens": 768, "val/loss_32": 1.0}) + "\n"
    (tmp_path / METRICS).write_text(lines_of(1, 2, 3) + validated)
    RunLog(tmp_path, tiny_config(tmp_path), step=3, process=MAIN, validated=True).close()
    assert steps_in(tmp_path) == [1, 2, 3, 3]
    RunLog(tmp_path, tiny_config(tmp_path), step=3, process=MAIN, validated=False).close()
    assert steps_in(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("full", [METRICS, "log.txt"])
def test_a_full_disk_is_noticed_at_once(tmp_path: Path, full: str):
    (tmp_path / full).symlink_to("/dev/full")
    log = RunLog(tmp_path, tiny_config(tmp_path, "train.log_every=1"), step=0, process=MAIN)
    if full == METRICS:  # which was replaced by a new one
        (tmp_path / "elsewhere").symlink_to("/dev/full")
        log._metrics = (tmp_path / "elsewhere").open("ab", buffering=0)
    with pytest.raises(OSError, match="No space left on device"), log:
        log.metrics(step_metrics(1))


class FakeWandb(types.ModuleType):
    """Takes down what a run tells wandb."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_codes: list[int] = []

    def init(self, **settings: Any) -> "FakeWandb":
        self.started.append(settings)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake, errors = FakeWandb(), types.ModuleType("wandb.errors")
    errors.Error = type("Error", (Exception,), {})  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setitem(sys.modules, "wandb.errors", errors)
    return fake


def test_wandb_hears_of_every_step_and_of_a_failure(tmp_path: Path, wandb: FakeWandb):
    config = tiny_config(tmp_path, "wandb.mode=online", "wandb.id=abc", "wandb.group=mine")
    log = RunLog(tmp_path, config, step=0, process=MAIN)
    log.metrics({"step": 1, "tokens": 256, "train/loss": 2.0})
    with pytest.raises(RuntimeError), log:
        raise RuntimeError
    (settings,) = wandb.started
    expected = {"mode": "online", "id": "abc", "resume": "allow", "group": "mine", "dir": str(tmp_path)}
    assert settings.items() >= expected.items()
    assert settings["config"]["train"]["length"] == 32
    assert wandb.logged == [(1, {"step": 1, "tokens": 256, "train/loss": 2.0})]
    assert wandb.exit_codes == [1]


def test_wandb_that_cannot_start_is_a_mistake_in_one_line(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
):
    def refuse(**_: Any) -> None:
        raise sys.modules["wandb.errors"].Error("no network")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"wandb\.mode=online: no network; use wandb\.mode=offline"):
        RunLog(tmp_path, tiny_config(tmp_path, "wandb.mode=online", "wandb.id=abc"), step=0, process=MAIN)


def test_a_resumed_run_keeps_its_wandb_id_and_a_new_one_in_the_same_place_gets_another(
    tmp_path: Path, wandb: FakeWandb
):
    write_tiny_data(tmp_path / "data")
    short = ("train.steps=2", "train.checkpoint_every=1", "wandb.mode=offline")
    assert run(train.main, tiny_words(tmp_path, *short)) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")
    assert run(train.main, tiny_words(tmp_path, *short, "wandb.mode=online")) == 0
    folder = tmp_path / "run" / "checkpoints" / "step_000002"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000001")
    saved = torch.load(folder / "training.pt", weights_only=True)["config"]["wandb"]["id"]
    shutil.rmtree(tmp_path / "run")
    assert run(train.main, tiny_words(tmp_path, *short)) == 0
    ids = [settings["id"] for settings in wandb.started]
    assert ids[0] == ids[1] == saved != ids[2]
    assert [step for step, metrics in wandb.logged if "train/loss" in metrics] == [1, 2, 2, 1, 2]


def test_without_wandb_a_run_has_no_id(tmp_path: Path, wandb: FakeWandb):
    write_tiny_data(tmp_path / "data")
    assert run(train.main, tiny_words(tmp_path, "train.steps=1")) == 0
    assert read_config(tmp_path / "run").wandb.id is None
    assert not wandb.started
