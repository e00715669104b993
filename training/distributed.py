"""Where this process runs: its rank, its device, its precision. The same code alone and under torchrun."""

import ctypes
import os
import resource
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from data.cores import available_cores
from model.precision import fast_bf16


class Stopped(Exception):
    """A signal asked the run to stop, between two steps or two batches of a validation."""


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

    def gather(self, value: float) -> list[float]:
        """Every process's `value`, by rank. Goes from CPU to CPU, so no GPU is waited for."""
        if self.world_size == 1:
            return [value]
        values = torch.zeros(self.world_size, dtype=torch.float64)
        values[self.rank] = value
        return self.sum(values).tolist()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work without communication on every process: when it fails on one, all of them end.

        The first process on which it failed raises the error, which names the process unless it is the main one; the
        others exit with code 2 and say nothing.
        """
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = self.gather(failure is not None)
        if failure is not None and not any(failed[: self.rank]):
            raise self.named(failure)
        if any(failed):
            sys.exit(2)

    def on_main(self, action: Callable[[], object]) -> None:
        """Runs `action` on the main process while the others wait; if it fails there, every process ends."""
        with self.together():
            if self.is_main:
                action()

    def named(self, error: Exception) -> Exception:
        """The error with a note of the process that it comes from, where that is not the main one."""
        note = f"(process {self.rank})"
        if not self.is_main and note not in getattr(error, "__notes__", []):
            error.add_note(note)
        return error


ALONE = Process(rank=0, world_size=1, device=torch.device("cpu"), precision="fp32")


def world_size() -> int:
    """The number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


# Keeps every process group of this process alive. DDP frees its own reference to it with Python's lock held, and if
# that is the last one, it waits for gloo's thread, which may be waiting for the lock: the process would never end.
_groups: list[dist.ProcessGroup | None] = []


@contextmanager
def start_process(device: str = "auto", precision: str = "auto") -> Iterator[Process]:
    """Joins the processes of this run (NCCL between GPUs, gloo between CPUs) and leaves them at the end.

    Args:
        device: "auto" (CUDA where there is one), "cpu" or "cuda".
        precision: "auto" (bf16 where the device multiplies it fast, else fp32), "fp32" or "bf16".

    Raises ValueError for device=cuda without one, or for more processes on a machine than it has CUDA devices. When
    another process of the run has ended, this one exits with code 2; the main process says so.
    """
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    try:
        place = choose_device(device, local_rank)
    except ValueError as error:
        if local_rank == torch.cuda.device_count() > 0:  # the first that lacks one; without any, all processes do
            error.add_note(f"(process {rank})")
        raise
    if place.type == "cuda":
        torch.cuda.set_device(place)
    else:
        keep_freed_memory()
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if threads := os.environ.get("THREADS_PER_PROCESS"):  # of a sweep, whose runs share the cores
            torch.set_num_threads(int(threads))
        elif local_ranks > 1:  # torchrun says one thread each; torch's own default would be all cores each
            torch.set_num_threads(max(1, available_cores() // local_ranks))
    if precision == "auto":
        precision = "bf16" if fast_bf16(place) else "fp32"
    if world_size() > 1:
        on_cuda = place.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=store_of_this_attempt(next(dist.rendezvous("env://"))[0], rank, world_size()),
            rank=rank,
            world_size=world_size(),
            device_id=place if on_cuda else None,
        )
        _groups.append(dist.group.WORLD)
    in_order = True
    try:
        yield Process(rank, world_size(), place, precision)
    except Exception as error:
        in_order = False  # the others may be gone or stuck, and to leave the group would be to wait for them
        if not lost_process(error):
            raise
        if rank == 0:
            print(
                f"error: another process of this run ended ({first_line(error)}); if it could still say why, the "
                "log.txt of the run directory tells",
                file=sys.stderr,
                flush=True,
            )
        sys.exit(2)  # this is no error of its own, and torchrun is to report that of the other one
    finally:
        if dist.is_initialized() and in_order:
            dist.destroy_process_group()


def store_of_this_attempt(
    store: dist.Store, rank: int, world_size: int, patience: timedelta = timedelta(minutes=30)
) -> dist.Store:
    """The part of the processes' common `store` that only those of this attempt have a name for.

    torchrun keeps one store for all its restarts, so a process could read there where another one listened before the
    restart, and connect to it in vain or for ever (pytorch/pytorch#135712). Its count of restarts differs between
    machines. So rank 0 draws a name for the attempt and tells it to who asks, until all have it: each asks with a name
    of its own, as the questions of an earlier attempt are still in the store, too.

    Raises TimeoutError when another process does not come within `patience`, by default that of gloo.
    """
    own_name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"question of {rank}", own_name)
        attempt = store.get(f"answer to {own_name}").decode()
        store.add(f"processes of {attempt}", 1)
        return dist.PrefixStore(attempt, store)
    deadline = time.monotonic() + patience.total_seconds()
    while (came := store.add(f"processes of {own_name}", 0)) < world_size - 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{came + 1} of {world_size} processes came together within {patience}")
        for other in range(1, world_size):
            if store.check([f"question of {other}"]):
                store.set(f"answer to {store.get(f'question of {other}').decode()}", own_name)
        time.sleep(0.01)
    return dist.PrefixStore(own_name, store)


def lost_process(error: BaseException) -> bool:
    """Whether an error only says that another process is gone: that one's own error is the one to read."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def first_line(error: BaseException) -> str:
    """What an error says in one line, without gloo's advice."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return line.split(". This is typically")[0]


class StopSignal:
    """Set by SIGTERM (what Slurm sends before it takes a machine away) or Ctrl-C; a second Ctrl-C stops at once.

    Not so under torchrun: it passes the terminal's Ctrl-C on to its processes, which have had it already. There the
    patience ends with torchrun's own, 30 seconds.
    """

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def check(self, process: Process) -> None:
        """Raises Stopped on every process if any has received a signal; every process must call it."""
        received = [int(number) for number in process.gather(self.number) if number]
        if received:
            self.number = self.number or received[0]
            raise Stopped

    def _receive(self, number: int, frame: object) -> None:
        self.number = number
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def choose_device(device: str, local_rank: int = 0) -> torch.device:
    """The torch device of `device` = auto, cpu or cuda for this process on its machine."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cuda":
        return torch.device(device)
    if (count := torch.cuda.device_count()) <= local_rank:
        raise ValueError(
            f"device=cuda: this machine has {count} CUDA devices, and process {local_rank} needs one of its own; use "
            f"device=cpu" + (f", or --nproc_per_node={count}" if count else "")
        )
    return torch.device("cuda", local_rank)


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


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: of the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
