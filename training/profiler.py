"""A torch profiler trace of a few training steps: look at it with chrome://tracing or https://ui.perfetto.dev."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WAIT, WARMUP, STEPS = 1, 1, 3  # the first step compiles, and the profiler's own start costs the second
TRACE, TABLE = "trace.json.gz", "operators.txt"


@contextmanager
def profiled(enabled: bool, run_dir: Path, device: torch.device) -> Iterator[Callable[[], None]]:
    """Gives a function to call after each step; where enabled, the third to fifth go to run_dir/profile/.

    trace.json.gz holds every operation with its time and memory, operators.txt the operators that took longest in all.
    A run that ends before leaves what it got to.
    """
    if not enabled:
        yield lambda: None
        return
    folder = run_dir / "profile"
    folder.mkdir(exist_ok=True)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / TRACE))
        table = profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=30)
        (folder / TABLE).write_text(table + "\n")

    steps = schedule(wait=WAIT, warmup=WARMUP, active=STEPS, repeat=1)
    with profile(activities=kinds, schedule=steps, on_trace_ready=write, profile_memory=True) as profiler:
        yield profiler.step
