import json
from pathlib import Path

import pytest
import torch

from tests.tiny_run import tiny_config
from training.distributed import Process
from training.log import METRICS, RunLog, read_metrics_lines

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
    with pytest.raises(RuntimeError) as caught, log:
        raise RuntimeError("no")
    assert caught.value.__notes__ == ["(process 1)"]  # the command says it, since the main process may not know
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""
