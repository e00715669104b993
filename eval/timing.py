"""Timing and memory of a function, in rounds that several candidates share, so that they share the machine's moods."""

import ctypes
import re
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


Name = TypeVar("Name", bound=Hashable)


def compare(
    passes: Mapping[Name, Callable[[], object]], reference: Name, repeats: int, device: torch.device
) -> dict[Name, dict[str, Any]]:
    """Measures every candidate in each of `repeats` rounds.

    A candidate's `seconds` is the median over the rounds, `ratio` the median of its ratios to `reference` within a
    round, and `peak_bytes` what one pass adds to the memory in use before it (None where the system cannot tell).
    """
    peaks = {name: peak_bytes(run, device) for name, run in passes.items()}  # and warms up
    rounds = [{name: seconds(run, device) for name, run in passes.items()} for _ in range(repeats)]
    return {
        name: {
            "seconds": statistics.median(times[name] for times in rounds),
            "peak_bytes": peaks[name],
            "ratio": statistics.median(times[name] / times[reference] for times in rounds),
        }
        for name in passes
    }


def choose_device(device: str) -> torch.device:
    """cpu, cuda, or auto for CUDA where there is one. Raises ValueError for a device that is not here."""
    chosen = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if chosen not in ("cpu", "cuda") or (chosen == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device={device} is not here; use auto or cpu{', cuda' * torch.cuda.is_available()}")
    return torch.device(chosen)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Memory that a pass needs beyond what was in use; on a CPU from Linux's resident high-water mark."""
    if device.type == "cuda":
        run()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    run()
    try:
        with suppress(AttributeError):  # a C library other than glibc keeps nothing back
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the mark starts again at what is resident now
        before = resident_bytes("VmHWM")
        run()
        return resident_bytes("VmHWM") - before
    except OSError:
        return None


def resident_bytes(mark: str = "VmRSS") -> int:
    """This process's resident memory, or with "VmHWM" the most it ever was; OSError where the system isn't Linux."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(rf"^{mark}:\s+(\d+) kB", status, flags=re.MULTILINE)[0])
