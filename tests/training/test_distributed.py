import os
import signal

import pytest
import torch

from training import distributed
from training.distributed import Process, StopSignal, choose_device, start_process


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
        process.barrier()


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
