"""Where this process runs: its rank, its device, its precision. The same code alone and under torchrun."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Process:
    """One of `world_size` processes; rank 0 writes the files."""

    rank: int
    world_size: int
    device: torch.device
    precision: str

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def autocast(self) -> AbstractContextManager:
        """bf16 matrix products where the precision says so; everything else stays fp32."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def on_main(self, action: Callable[[], object]) -> None:
        """Runs `action` on the main process while the others wait; if it fails there, every process ends."""
        failure = None
        if self.is_main:
            try:
                action()
            except Exception as error:
                failure = error
        failed = self.sum(torch.tensor(float(failure is not None), device=self.device)).item()
        if failure is not None:
            raise failure
        if failed:
            sys.exit(2)  # the main process says why


def world_size() -> int:
    """The number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def start_process(device: str = "auto", precision: str = "auto") -> Iterator[Process]:
    """Joins the processes of this run (NCCL on CUDA, gloo on CPU) and leaves them at the end.

    Args:
        device: "auto" (CUDA where there is one), "cpu" or "cuda".
        precision: "auto" (bf16 where the device multiplies it fast, else fp32), "fp32" or "bf16".

    Raises ValueError for device=cuda without one, or for more processes on a machine than it has CUDA devices.
    """
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    try:
        place = choose_device(device, local_rank)
    except ValueError as error:
        if rank:
            error.add_note(f"(process {rank})")
        raise
    if place.type == "cuda":
        torch.cuda.set_device(place)
    else:
        keep_freed_memory()
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if local_ranks > 1:  # torchrun says one thread each; torch's own default would be all cores each
            torch.set_num_threads(max(1, available_cores() // local_ranks))
    if precision == "auto":
        precision = "bf16" if fast_bf16(place) else "fp32"
    if world_size() > 1:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Process(rank, world_size(), place, precision)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class StopSignal:
    """Set by SIGTERM (what Slurm sends before it takes a machine away) or Ctrl-C; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        self.number = number
        signal.signal(signal.SIGINT, signal.default_int_handler)


def available_cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(device: str, local_rank: int = 0) -> torch.device:
    """The torch device of `device` = auto, cpu or cuda for this process on its machine."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cuda":
        return torch.device(device)
    if (count := torch.cuda.device_count()) <= local_rank:
        raise ValueError(
            f"device=cuda: this machine has {count} CUDA devices, and process {local_rank} needs one of its own; use "
            f"device=cpu, or --nproc_per_node={max(count, 1)}"
        )
    return torch.device("cuda", local_rank)


def fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices faster than fp32 ones (elsewhere it emulates them, slowly)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    processor = torch.cpu.get_capabilities()
    return any(processor.get(feature, False) for feature in ("avx512_bf16", "amx_bf16"))


def keep_freed_memory() -> None:
    """Tells glibc to reuse large freed blocks instead of returning them to the system; elsewhere does nothing.

    By default each block over 32 MB is mapped anew, and page-faults, at every use: a third of a training step on a CPU.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, -1)
