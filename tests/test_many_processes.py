"""A run of several processes: the same as one, stopped, resumed with another number, and ended by one that dies.

Most start their processes as torchrun would, which is faster; what torchrun itself does is tested with it, too.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from tests.ranks import Ended, run_ranks, start_ranks
from tests.runs import assert_same_losses, last_checkpoint, metrics_of
from tests.tiny_run import ROOT, listing, run, tiny_words, write_tiny_data
from training.checkpoint import load_weights
from training.checkpoint_folder import awaits_validation, list_checkpoints

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(*flags: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *flags]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with tiny data in data/."""
    write_tiny_data(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 12 steps by one process; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("alone")
    write_tiny_data(folder / "data")
    assert run(train.main, tiny_words(folder)) == 0
    return folder


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by two processes."""
    folder = tmp_path_factory.mktemp("by_two")
    write_tiny_data(folder / "data")
    assert [ended.code for ended in train_by(2, folder, tiny_words(folder))] == [0, 0]
    return folder


def train_by(world_size: int, folder: Path, words: list[str], **incident: Any) -> list[Ended]:
    return run_ranks(world_size, train_with_incident, words, incident, folder=folder)


def train_with_incident(words: list[str], incident: dict[str, Any]) -> None:
    """A run in which on one rank, right after one of its steps or before a batch of its validations, `act` is done."""
    if incident and os.environ["RANK"] == str(incident["rank"]):
        step, loss_by_length = train.train_step, train.loss_by_length

        def train_step(state: Any, *rest: Any) -> Any:
            result = step(state, *rest)
            if state.step == incident.get("step"):
                ACTS[incident["act"]]()
            return result

        def interrupted(*arguments: Any, between: Callable[[], None]) -> dict[int, float]:
            def act_between() -> None:
                if arguments[0].output.weight.any():  # not the validation of the initial weights
                    ACTS[incident["act"]]()
                between()

            return loss_by_length(*arguments, between=act_between)

        train.train_step = train_step
        if "step" not in incident:
            train.loss_by_length = interrupted  # pyright: ignore[reportAttributeAccessIssue]
    raise SystemExit(run(train.main, words))


def raise_a_bug() -> None:
    raise RuntimeError("a bug on one process")


def raise_a_mistake() -> None:
    raise ValueError("a mistake on one process")


ACTS: dict[str, Callable[[], object]] = {
    "bug": raise_a_bug,
    "mistake": raise_a_mistake,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


def test_two_processes_train_to_the_same_losses_as_one(by_two: Path, alone: Path):
    assert_same_losses(metrics_of(by_two), metrics_of(alone), tolerance=2e-4)
    assert last_checkpoint(by_two / "run").keys() == last_checkpoint(alone / "run").keys()
    assert metrics_of(by_two)[0] == metrics_of(alone)[0]  # validation alone is the same bit for bit


def test_a_run_of_two_processes_stopped_on_one_goes_on_bit_for_bit(folder: Path, by_two: Path):
    assert [ended.code for ended in train_by(2, folder, tiny_words(folder), rank=1, step=6, act="stop")] == [143, 143]
    assert list_checkpoints(folder / "run")[-1].name == "step_000006"
    assert [ended.code for ended in train_by(2, folder, tiny_words(folder))] == [0, 0]
    assert metrics_of(folder) == metrics_of(by_two)
    assert last_checkpoint(folder / "run") == last_checkpoint(by_two / "run")


@pytest.mark.slow
def test_a_validation_of_two_processes_stopped_on_one_is_made_up_for(folder: Path, by_two: Path):
    assert [ended.code for ended in train_by(2, folder, tiny_words(folder), rank=1, act="stop")] == [143, 143]
    last = list_checkpoints(folder / "run")[-1]
    assert last.name == "step_000004"
    assert awaits_validation(last)
    assert [ended.code for ended in train_by(2, folder, tiny_words(folder))] == [0, 0]
    assert metrics_of(folder) == metrics_of(by_two)


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_processes(folder: Path, alone: Path, before: int, after: int):
    words = [*tiny_words(folder), "train.micro_batch_tokens=64"]
    train_by(before, folder, words, rank=0, step=6, act="stop")
    assert list_checkpoints(folder / "run")[-1].name == "step_000006"
    assert [ended.code for ended in train_by(after, folder, words)] == [0] * after
    assert_same_losses(metrics_of(folder), metrics_of(alone), tolerance=2e-4)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_bug_on_one_process_ends_all_with_its_traceback_in_the_log(folder: Path, rank: int):
    ended = train_by(2, folder, tiny_words(folder), rank=rank, step=6, act="bug")
    assert ended[rank].code == 1
    assert ended[1 - rank].code == 2
    log = (folder / "run" / "log.txt").read_text()
    assert f"process {rank} ended with an error\nTraceback" in log
    assert "RuntimeError: a bug on one process" in log
    assert log.count("Traceback") == 1
    assert f"process {1 - rank} ended because another one did" in log
    survivor = [line for line in ended[1 - rank].said.splitlines() if "step" not in line and ", torch " not in line]
    assert len(survivor) == (1 if rank else 0)  # the main process says in one line what happened, another one nothing
    assert all(line.startswith("error: another process of this run ended") for line in survivor)


def test_a_mistake_that_one_process_meets_is_said_by_it(folder: Path):
    ended = train_by(2, folder, tiny_words(folder), rank=1, step=6, act="mistake")
    assert [code for code, _ in ended] == [2, 2]
    assert ended[1].said == "error: a mistake on one process (process 1)\n"
    assert "ValueError: a mistake on one process" in (folder / "run" / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_the_run_which_then_goes_on(folder: Path, by_two: Path, rank: int):
    ended = train_by(2, folder, tiny_words(folder), rank=rank, step=6, act="die")
    assert [ended[rank].code, ended[1 - rank].code] == [-signal.SIGKILL, 2]
    assert f"process {1 - rank} ended because another one did" in (folder / "run" / "log.txt").read_text()
    assert [ended.code for ended in train_by(2, folder, tiny_words(folder))] == [0, 0]
    assert metrics_of(folder) == metrics_of(by_two)
    assert last_checkpoint(folder / "run") == last_checkpoint(by_two / "run")


def test_a_mistake_that_all_processes_make_is_said_once(folder: Path):
    ended = train_by(2, folder, tiny_words(folder, "train.tokens_per_step=96"))
    assert [code for code, _ in ended] == [2, 2]
    assert ended[0].said.startswith("error: 2 processes cannot share the 3 rows")
    assert ended[1].said == ""


def test_processes_that_see_different_checkpoints_are_refused(folder: Path, alone: Path):
    """As on two nodes that do not share a file system."""
    ended = run_ranks(2, train_where_only_the_main_process_sees, tiny_words(alone), folder=folder)
    assert [code for code, _ in ended] == [2, 2]
    assert "process 1 goes on from step 0, but the main process from step 12" in ended[0].said
    assert "a file system that all nodes share" in ended[0].said
    assert ended[1].said == ""


def train_where_only_the_main_process_sees(words: list[str]) -> None:
    if os.environ["RANK"] == "1":
        train.latest_checkpoint = lambda run_dir: None  # pyright: ignore[reportAttributeAccessIssue]
    raise SystemExit(run(train.main, words))


def wait_for_step(folder: Path, step: int, child: subprocess.Popen) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_torchrun_gives_the_same_run_and_writes_nothing_outside_it(folder: Path, by_two: Path):
    before = listing(folder)
    command = [*torchrun("--standalone", "--nproc_per_node=2"), ROOT / "train.py", *tiny_words(folder)]
    subprocess.run(command, cwd=folder, env=ONE_THREAD, check=True)
    assert metrics_of(folder) == metrics_of(by_two)
    assert last_checkpoint(folder / "run") == last_checkpoint(by_two / "run")
    assert all(name.startswith("run/") for name in listing(folder).keys() - before.keys())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sigterm", "ctrl_c"])
def test_torchrun_stopped_by_a_signal_saves_the_last_step_and_resumes_in_one_process(folder: Path, how: str):
    words = tiny_words(folder, "train.steps=400", "train.checkpoint_every=50", "data.repeat=true")
    command = [*torchrun("--standalone", "--nproc_per_node=2"), ROOT / "train.py", *words]
    child = subprocess.Popen(command, cwd=folder, env=ONE_THREAD, start_new_session=True)
    wait_for_step(folder, 60, child)
    if how == "sigterm":
        child.send_signal(signal.SIGTERM)
    else:
        os.killpg(child.pid, signal.SIGINT)  # a terminal sends it to torchrun and to its processes
    assert child.wait(timeout=120) != 0
    reached = metrics_of(folder)[-1]["step"]
    assert 60 <= reached < 400
    assert list_checkpoints(folder / "run")[-1].name == f"step_{reached:06d}"
    assert run(train.main, words) == 0
    steps = [line["step"] for line in metrics_of(folder) if "train/loss" in line]
    assert steps == list(range(1, 401))
    for tensor in load_weights(list_checkpoints(folder / "run")[-1]).values():
        assert torch.isfinite(tensor).all()


DIES_ONCE = (
    "import os, pathlib, signal, sys; sys.path.insert(0, sys.argv.pop(1)); import train; step = train.train_step\n"
    "def train_step(state, *rest):\n"
    "    once = pathlib.Path('died')\n"
    "    if state.step == 6 and os.environ['RANK'] == '1' and not once.exists():\n"
    "        once.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
    "    return step(state, *rest)\n"
    "train.train_step = train_step; train.main()"
)


@pytest.mark.slow
def test_torchrun_restarts_a_run_from_its_last_checkpoint(folder: Path, by_two: Path):
    (folder / "dies_once.py").write_text(DIES_ONCE)
    command = [*torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=1"), "dies_once.py", ROOT]
    assert subprocess.Popen([*command, *tiny_words(folder)], cwd=folder, env=ONE_THREAD).wait(timeout=200) == 0
    assert (folder / "died").exists()
    assert "steps 4 to 12" in (folder / "run" / "log.txt").read_text()
    assert metrics_of(folder) == metrics_of(by_two)
    assert last_checkpoint(folder / "run") == last_checkpoint(by_two / "run")


@pytest.mark.slow
def test_two_nodes_give_the_same_run_as_one(folder: Path, by_two: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}")
    command = [*torchrun(*flags), ROOT / "train.py", *tiny_words(folder)]
    nodes = [subprocess.Popen(command, cwd=folder, env=ONE_THREAD) for _ in range(2)]
    assert [node.wait(timeout=200) for node in nodes] == [0, 0]
    assert metrics_of(folder) == metrics_of(by_two)
    assert last_checkpoint(folder / "run") == last_checkpoint(by_two / "run")


@pytest.mark.slow
def test_four_processes_train_to_the_same_losses_as_one(folder: Path, alone: Path):
    assert [ended.code for ended in train_by(4, folder, tiny_words(folder))] == [0] * 4
    assert_same_losses(metrics_of(folder), metrics_of(alone), tolerance=2e-4)


@pytest.mark.slow
def test_a_run_killed_with_all_its_processes_goes_on(folder: Path, by_two: Path):
    processes = start_ranks(2, train_with_incident, tiny_words(folder), {}, folder=folder)
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and '"step": 6,' in metrics.read_text()):
        assert all(process.is_alive() for process in processes)
        time.sleep(0.001)
    for process in processes:
        process.kill()
        process.join()
    assert [ended.code for ended in train_by(2, folder, tiny_words(folder))] == [0, 0]
    assert metrics_of(folder) == metrics_of(by_two)
    assert last_checkpoint(folder / "run") == last_checkpoint(by_two / "run")
