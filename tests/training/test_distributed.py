import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import compute_in_ranks, run_ranks
from training import distributed
from training.distributed import (
    Process,
    Stopped,
    StopSignal,
    choose_device,
    peak_memory,
    start_process,
    store_of_this_attempt,
)


@pytest.fixture
def _handlers_as_they_were():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_alone_a_process_is_the_main_one_and_sums_nothing():
    with start_process("cpu") as process:
        assert (process.rank, process.world_size, process.is_main) == (0, 1, True)
        assert process.sum(torch.tensor([2.0])).item() == 2.0
        assert process.gather(3) == [3.0]


@pytest.mark.parametrize(
    ("environment", "threads"),
    [({}, []), ({"LOCAL_WORLD_SIZE": "2"}, [4]), ({"LOCAL_WORLD_SIZE": "2", "THREADS_PER_PROCESS": "1"}, [1])],
    ids=str,
)
def test_processes_share_the_cores_with_each_other_and_with_the_other_runs_of_a_sweep(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], threads: list[int]
):
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(distributed, "available_cores", lambda: 8)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with start_process("cpu"):
        assert chosen == threads


@pytest.mark.parametrize("last", [0, 1, 2])
def test_an_attempt_after_a_restart_reads_nothing_of_the_one_before(last: int):
    common = dist.HashStore()

    def attempt(name: str) -> list[list[str]]:
        def join(rank: int) -> list[str]:
            time.sleep(0.1 if rank == last else 0)  # so that the others meet what the attempt before has left
            store = store_of_this_attempt(common, rank, 3)
            store.set(f"address of {rank}", f"{name}{rank}")
            return [store.get(f"address of {other}").decode() for other in range(3)]

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(join, range(3)))

    assert attempt("first") == [["first0", "first1", "first2"]] * 3
    assert attempt("second") == [["second0", "second1", "second2"]] * 3


def test_a_process_that_does_not_come_is_waited_for_only_so_long():
    with pytest.raises(TimeoutError, match="1 of 2 processes came together within"):
        store_of_this_attempt(dist.HashStore(), 0, 2, patience=timedelta(seconds=0.2))


@pytest.mark.parametrize(("fast", "precision"), [(True, "bf16"), (False, "fp32")])
def test_auto_precision_is_bf16_only_where_the_device_is_fast_at_it(
    monkeypatch: pytest.MonkeyPatch, fast: bool, precision: str
):
    monkeypatch.setattr(distributed, "fast_bf16", lambda device: fast)
    with start_process("cpu", "auto") as process:
        assert process.precision == precision


def test_only_bf16_casts_matrix_products():
    x = torch.ones(2, 2)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with Process(0, 1, torch.device("cpu"), precision).autocast():
            assert (x @ x).dtype == dtype


def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"device=cuda: this machine has 0 CUDA devices.*device=cpu"):
        choose_device("cuda")


def test_more_processes_than_cuda_devices_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda", local_rank=1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"process 2 needs one of its own.*nproc_per_node=2"):
        choose_device("cuda", local_rank=2)


def test_auto_takes_cuda_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")


@pytest.mark.usefixtures("_handlers_as_they_were")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_does_not_interrupt(number: signal.Signals):
    stop = StopSignal()
    assert stop.number == 0
    os.kill(os.getpid(), number)
    assert stop.number == number


@pytest.mark.usefixtures("_handlers_as_they_were")
def test_a_second_ctrl_c_stops_at_once():
    StopSignal()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("_handlers_as_they_were")
def test_under_torchrun_a_second_ctrl_c_is_the_same_one_passed_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    stop = StopSignal()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.number == signal.SIGINT


@pytest.mark.usefixtures("_handlers_as_they_were")
def test_a_signal_to_one_process_stops_all_of_them_at_the_same_call(tmp_path: Path):
    assert compute_in_ranks(2, checks_until_stopped, folder=tmp_path) == [[4, signal.SIGTERM], [4, signal.SIGTERM]]


def checks_until_stopped(process: Process) -> list[int]:
    stop = StopSignal()
    for call in range(10):
        if call == 4 and process.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            stop.check(process)
        except Stopped:
            return [call, stop.number]
    return []


def fail_on(failing: list[int]) -> None:
    with start_process("cpu") as process, process.together():
        if process.rank in failing:
            raise ValueError(f"bad luck {process.rank}")


@pytest.mark.parametrize(("failing", "speaker"), [([0, 1, 2], 0), ([1, 2], 1), ([2], 2)])
def test_when_processes_fail_the_first_of_them_says_why_and_all_end(tmp_path: Path, failing: list[int], speaker: int):
    ended = run_ranks(3, fail_on, failing, folder=tmp_path)
    assert all(code != 0 for code, _ in ended)
    assert f"ValueError: bad luck {speaker}" in ended[speaker].said
    assert ("(process" in ended[speaker].said) == (speaker > 0)
    assert [said for rank, (_, said) in enumerate(ended) if rank != speaker] == ["", ""]


def die_in_the_middle() -> None:
    with start_process("cpu") as process:
        process.gather(1)
        if process.rank == 1:
            os._exit(3)
        process.gather(2)


def test_a_process_that_dies_ends_the_others_in_one_line(tmp_path: Path):
    survivor, dead = run_ranks(2, die_in_the_middle, folder=tmp_path)
    assert dead.code == 3
    assert survivor.code == 2
    assert survivor.said.startswith("error: another process of this run ended")
    assert survivor.said.count("\n") == 1


def test_the_peak_memory_of_a_process_is_what_the_system_says():
    block = torch.ones(50_000_000)
    status = Path("/proc/self/status").read_text()
    high_water = 1024 * int(status.split("VmHWM:")[1].split()[0])
    assert peak_memory(torch.device("cpu")) == pytest.approx(high_water, rel=0.02)
    assert peak_memory(torch.device("cpu")) > block.nbytes
