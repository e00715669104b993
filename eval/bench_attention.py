"""Time and memory of the attention backends, in interleaved rounds against SDPA's plain causal attention."""

import ctypes
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from model.attend import BACKENDS, Transform, attend

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One problem that every backend solves: q, k and v of (batch, n_head, length, head_dim)."""

    direction: str
    length: int
    head_dim: int
    n_head: int
    batch: int
    dtype: str

    def inputs(self, device: torch.device) -> list[Tensor]:
        """q, k and v as a model gives them: the heads lie inside time in memory."""
        shape = self.batch, self.length, self.n_head, self.head_dim
        grad = self.direction == "forward_backward"
        tensors = (torch.randn(shape, device=device, dtype=DTYPES[self.dtype]).transpose(1, 2) for _ in range(3))
        return [x.requires_grad_(grad) for x in tensors]


def bench_attention(config: Any) -> dict[str, Any]:
    """Measure every backend on every case of the config; `{"machine": {...}, "rows": [...]}`.

    A row's `seconds` is the median over the rounds, `ratio_to_sdpa` the median of the ratios within a round, and
    `peak_bytes` what one pass adds to the memory in use before it (None where the system cannot tell). Raises
    ValueError, before any measurement, for a key of the config that cannot be served.
    """
    device = _checked(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    cases = [
        Case(direction, length, head_dim, config.n_head, config.batch, config.dtype)
        for length, head_dim, direction in product(config.lengths, config.head_dims, config.directions)
    ]
    rows = []
    for case in tqdm(cases, desc="cases"):
        rows += _measure(case, list(config.backends), config.tau, config.repeats, device)
    return {"machine": _machine(device), "rows": rows}


def _measure(case: Case, backends: list[str], tau: float, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    tensors = case.inputs(device)
    passes = {name: _pass(name, tensors, tau) for name in backends}
    peaks = {name: _peak_bytes(run, device) for name, run in passes.items()}  # and warms up
    rounds = [{name: _seconds(run, device) for name, run in passes.items()} for _ in range(repeats)]
    rows = []
    for name in backends:
        seconds = statistics.median(times[name] for times in rounds)
        rows.append(
            {
                "name": f"{name} {case.direction} T={case.length} d={case.head_dim}",
                "backend": name,
                **asdict(case),
                "seconds": seconds,
                "tokens_per_second": case.batch * case.length / seconds,
                "peak_bytes": peaks[name],
                "ratio_to_sdpa": statistics.median(times[name] / times["sdpa"] for times in rounds),
            }
        )
    return rows


def _pass(backend: str, tensors: list[Tensor], tau: float) -> Callable[[], object]:
    """A forward, or forward and backward, pass: scale-invariant (eq. 16 at its boundary) except for SDPA."""
    q, k, v = tensors
    t = torch.arange(q.shape[2], device=q.device, dtype=torch.float32)
    square = (2 * torch.log1p(t / tau) + 1)[None]
    transform = None if backend == "sdpa" else Transform(scale=square.sqrt(), shift=1 - square)
    ones = torch.ones_like(q)

    def run() -> object:
        out = attend(q, k, v, transform, backend)
        return torch.autograd.grad(out, tensors, ones) if q.requires_grad else out

    return run


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
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
        before = _resident_peak()
        run()
        return _resident_peak() - before
    except OSError:
        return None


def _resident_peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"^VmHWM:\s+(\d+) kB", status, flags=re.MULTILINE)[0])


def _checked(config: Any) -> torch.device:
    """The device to measure on, or one line about the first key that cannot be served."""
    known = {"backends": BACKENDS, "directions": ("forward", "forward_backward")}
    for key, values in known.items():
        if unknown := [name for name in config[key] if name not in values]:
            raise ValueError(f"{key}={list(config[key])}: {unknown[0]!r} is unknown; use {', '.join(values)}")
    if "sdpa" not in config.backends:
        raise ValueError(f"backends={list(config.backends)} must hold 'sdpa', which the others are compared with")
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype={config.dtype} is unknown; use {', '.join(DTYPES)}")
    for key in ("lengths", "head_dims", "n_head", "batch", "repeats", "threads", "tau"):
        values = config[key] if key in ("lengths", "head_dims") else [config[key]]
        if (key != "threads" or config.threads is not None) and any(value <= 0 for value in values):
            raise ValueError(f"{key}={config[key]} must be positive")
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device={config.device} is not here; use auto or cpu{', cuda' * torch.cuda.is_available()}")
    return torch.device(device)


def _machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, IndexError):
        name = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)[0]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
