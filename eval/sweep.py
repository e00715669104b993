"""Launches the runs of an experiment as child processes, shows how far they are, and ends them together.

Every child is its own session with one log, `child.log`, in its run folder. Nothing is kept outside the run folders, so
starting the same sweep again resumes the interrupted runs and skips the finished ones.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd
from tqdm import tqdm

from eval.experiment import Run

POLL_SECONDS = 0.2
# torchrun gives its workers 30 s before it kills them; killed itself before that, it would leave them running.
GRACE_SECONDS = 45
LOG = "child.log"
LOG_LINES = 15
# The first line that torchrun itself writes about a failed worker; the worker's own last words stand above it.
TORCHRUN_REPORT = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic/.*(failed \(exitcode|closing signal)")


@dataclass(frozen=True)
class Failure:
    """A run that did not finish: the exit code of its child and the last lines of its log."""

    run: Run
    returncode: int
    tail: str

    def __str__(self) -> str:
        log = self.run.run_dir / LOG
        return f"{self.run.id} failed with exit code {self.returncode}; the end of {log}:\n{self.tail}"


def torchrun(processes: int, script: str = "train.py") -> Callable[[Run], list[str]]:
    """The command of a run: the script under torchrun with so many processes on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return lambda run: [*launcher, script, *run.overrides]


def make_slots(
    gpus_per_run: int, runs_at_once: int | str, gpus: Sequence[str], cores: int, n_runs: int
) -> list[dict[str, str]]:
    """The environment of each run that may be under way at a time.

    On GPUs a slot is a share of `gpus` (values of CUDA_VISIBLE_DEVICES), on a CPU a share of the cores: threads per
    process = cores / runs_at_once / gpus_per_run. "auto" fills the GPUs, or on a CPU the cores with at most `n_runs`:
    small models gain less from a second thread than from a second run beside them.

    Raises ValueError when the GPUs do not suffice.
    """
    if gpus_per_run < 1:
        raise ValueError(f"gpus_per_run={gpus_per_run} must be at least 1")
    if gpus and gpus_per_run > len(gpus):
        raise ValueError(f"gpus_per_run={gpus_per_run}, but there are {len(gpus)} GPUs; give at most that many")
    if runs_at_once == "auto":
        runs_at_once = len(gpus) // gpus_per_run if gpus else max(1, min(cores // gpus_per_run, n_runs))
    if not isinstance(runs_at_once, int) or runs_at_once < 1:
        raise ValueError(f"runs_at_once={runs_at_once} must be auto or a whole number, at least 1")
    if not gpus:
        threads = max(1, cores // (runs_at_once * gpus_per_run))
        return [{"OMP_NUM_THREADS": str(threads)}] * runs_at_once
    if runs_at_once * gpus_per_run > len(gpus):
        raise ValueError(
            f"runs_at_once={runs_at_once} with gpus_per_run={gpus_per_run} needs {runs_at_once * gpus_per_run} GPUs, "
            f"but there are {len(gpus)}; try runs_at_once=auto"
        )
    shares = [gpus[i * gpus_per_run : (i + 1) * gpus_per_run] for i in range(runs_at_once)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; empty without CUDA."""
    import torch  # here, so that a sweep that starts nothing does not wait for it

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def available_cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(
    runs: Sequence[Run], command: Callable[[Run], list[str]], slots: Sequence[Mapping[str, str]]
) -> list[Failure]:
    """Runs what is not finished, as many at a time as there are slots, and returns the runs that failed.

    A failing run does not stop the others. On SIGINT, SIGTERM or SIGHUP the children are ended, resumably, and
    SystemExit(128 + signal) is raised. Raises ValueError, before anything starts, when another process is at one of
    the runs.
    """
    waiting = [run for run in runs if run.status != "finished"]
    failures: list[Failure] = []
    active: list[_Child] = []
    free = list(slots)
    with contextlib.ExitStack() as stack:
        logs = {run: stack.enter_context(_locked_log(run)) for run in waiting}
        received = stack.enter_context(_signals())
        progress = _Progress(runs)
        stack.callback(progress.bar.close)
        stack.callback(_end, active)
        while (waiting or active) and not received:
            while waiting and free:
                run = waiting.pop(0)
                progress.note(f"{run.id}: {'resumes' if run.status == 'interrupted' else 'starts'}")
                active.append(_Child(run, command(run), free.pop(0), logs[run]))
            time.sleep(POLL_SECONDS)
            ended = [child for child in active if child.process.poll() is not None]
            progress.show([child.run for child in active])
            for child in ended:
                active.remove(child)
                free.append(child.slot)
                logs[child.run].close()
                if failure := child.failure():
                    failures.append(failure)
                progress.note(f"{child.run.id}: {'FAILED' if failure else 'finished'}{_val_losses(child.run)}")
        if active:
            progress.note(f"stopping: waiting up to {GRACE_SECONDS} s for {len(active)} to save and end")
    if received:
        print("stopped; the same command goes on from the last checkpoints", file=sys.stderr)
        raise SystemExit(128 + received[0])
    return failures


class _Child:
    """A run under way: its process group and its slot."""

    def __init__(self, run: Run, command: list[str], slot: Mapping[str, str], log: BinaryIO) -> None:
        self.run, self.slot = run, slot
        log.truncate(0)
        self.process = subprocess.Popen(
            command,
            env=os.environ | slot,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a Ctrl-C reaches it through the sweep only
        )

    def signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def failure(self) -> Failure | None:
        if self.process.returncode == 0 and self.run.status == "finished":
            return None
        return Failure(self.run, self.process.returncode, _log_tail(self.run.run_dir / LOG))


def _end(children: Sequence[_Child]) -> None:
    """SIGTERM to every child's group, then SIGKILL to what is left after the grace time."""
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for child in children:
        try:
            child.process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.signal(signal.SIGKILL)
            child.process.wait()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the signals that ask to stop, instead of dying of them; one that was ignored (nohup) stays ignored."""
    received: list[int] = []
    previous = {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            previous[signum] = signal.signal(signum, lambda number, _frame: received.append(number))
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _locked_log(run: Run) -> Iterator[BinaryIO]:
    """The log of a run, locked for whoever writes to it.

    The lock goes with the open file to the child and to its workers, so it outlives a killed sweep as long as one of
    them still trains: two processes never train into one folder.
    """
    run.run_dir.mkdir(parents=True, exist_ok=True)
    with (run.run_dir / LOG).open("ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{run.run_dir} is being trained by another process; wait for it or end it") from None
        yield log


class _Progress:
    """One bar over the tokens of all runs, read from their metrics; plain lines where stderr is no terminal."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.done = {run: _tokens_done(run) for run in runs}
        self.total, self.at_start = sum(run.tokens for run in runs), sum(self.done.values())
        self.next_line = self.at_start + self.total / 10
        self.began, self.terminal = time.monotonic(), sys.stderr.isatty()
        self.bar = tqdm(
            total=self.total,
            initial=self.at_start,
            unit="tok",
            unit_scale=True,
            dynamic_ncols=True,
            smoothing=0.05,
            disable=not self.terminal,
        )

    def show(self, active: Sequence[Run]) -> None:
        before = sum(self.done.values())
        self.done |= {run: _tokens_done(run) for run in active}
        now = sum(self.done.values())
        current = ", ".join(run.id + _train_loss(run) for run in active[:3])
        self.bar.set_postfix_str(current, refresh=False)
        self.bar.update(now - before)
        if not self.terminal and now >= self.next_line:
            self.next_line = now + self.total / 10
            rate = (now - self.at_start) / (time.monotonic() - self.began)
            left = tqdm.format_interval((self.total - now) / rate)
            self.note(f"{now / self.total:.0%} of {self.total:,} tokens, {rate:,.0f} tok/s, {left} left; {current}")

    def note(self, text: str) -> None:
        self.bar.write(text, file=sys.stderr)


def last_metrics(run: Run) -> dict[str, Any]:
    """The newest value of each key in the last few lines of metrics.jsonl (cheap to poll); empty without a file."""
    metrics: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError), (run.record / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        for line in file.read().split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):  # the first line may begin before what was read
                metrics |= json.loads(line)
    return metrics


def status_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row a run: its status, its last step and its last losses."""
    rows = []
    for run in runs:
        metrics = last_metrics(run)
        losses = {key: value for key, value in metrics.items() if key == "train/loss" or key.startswith("val/")}
        rows.append({"run": run.id, "status": run.status, "step": f"{metrics.get('step', 0)}/{run.steps}"} | losses)
    return pd.DataFrame(rows)


def _tokens_done(run: Run) -> int:
    return run.tokens if run.status == "finished" else last_metrics(run).get("tokens", 0)


def _train_loss(run: Run) -> str:
    loss = last_metrics(run).get("train/loss")
    return f" ({loss:.3f})" if loss is not None else ""


def _val_losses(run: Run) -> str:
    metrics = last_metrics(run)
    losses = [f"{key.removeprefix('val/loss_')}: {value:.3f}" for key, value in metrics.items() if "val/loss_" in key]
    return f" ({', '.join(losses)})" if losses else ""


def _log_tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    end = next((index for index, line in enumerate(lines) if TORCHRUN_REPORT.search(line)), len(lines))
    return "\n".join(lines[:end][-LOG_LINES:])
