"""Processes for a test, forked from one that has torch loaded: several gloo ranks, or one to kill."""

import faulthandler
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from training.distributed import Process, start_process

# Not forked from the tests' own process: that one has threads, and may have run a backward pass, after which its
# children could not.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "train", "torch.profiler"])
PATIENCE = 240  # seconds: a process that has not ended by then hangs


class Ended(NamedTuple):
    """How a process ended, and what it said."""

    code: int | None
    said: str


def start(function: Callable[..., object], *arguments: Any, out: Path, environment: dict[str, str]) -> BaseProcess:
    """A process that runs the function, with its words (stdout and stderr) in the file `out`."""
    process = SERVER.Process(target=_main, args=(function, arguments, str(out), environment))
    process.start()
    return process


def start_ranks(world_size: int, function: Callable[..., object], *arguments: Any, folder: Path) -> list[BaseProcess]:
    """The same function in `world_size` processes, started as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": f"{world_size}", "LOCAL_WORLD_SIZE": f"{world_size}", "MASTER_ADDR": "127.0.0.1"}
    return [
        start(
            function,
            *arguments,
            out=folder / f"rank{rank}.txt",
            environment={**shared, "MASTER_PORT": f"{port}", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
        )
        for rank in range(world_size)
    ]


def run_ranks(world_size: int, function: Callable[..., object], *arguments: Any, folder: Path) -> list[Ended]:
    """Waits for them, and tells how each ended: one that hangs by SIGKILL, having said where."""
    ended = []
    for rank, process in enumerate(start_ranks(world_size, function, *arguments, folder=folder)):
        process.join(PATIENCE + 20)
        if process.is_alive():
            process.kill()
            process.join()
        ended.append(Ended(process.exitcode, (folder / f"rank{rank}.txt").read_text()))
    return ended


def compute_in_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, folder: Path) -> list[Any]:
    """What function(process, *arguments) gives on each rank, in fp32 on the CPU; fails when a rank does."""
    for rank, ended in enumerate(run_ranks(world_size, _compute, function, arguments, folder, folder=folder)):
        assert ended.code == 0, f"rank {rank}: {ended.said}"
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world_size)]


def _compute(function: Callable[[Process], Any], arguments: tuple, folder: Path) -> None:
    with start_process("cpu", "fp32") as process:
        torch.save(function(process, *arguments), folder / f"rank{process.rank}.pt")


def _main(function: Callable[..., object], arguments: tuple, out: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    with open(out, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.dump_traceback_later(PATIENCE, file=2)
    code = 0
    try:
        function(*arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # as the end of a real process does, but without a second look at the server's threads
