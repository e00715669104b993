"""Launches the runs of an experiment as child processes, shows how far they are, and ends them together.

Nothing is kept outside the run folders, so starting the same sweep again resumes the interrupted runs and skips the
finished ones.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from tqdm import tqdm

from eval.child import (
    GRACE_SECONDS,
    POLL_SECONDS,
    Child,
    Failure,
    end,
    is_locked,
    locked_log,
    remembered_failure,
    stop_signals,
)
from eval.experiment import Run

ORDERS = ("seeds", "axes")


def torchrun(processes: int) -> Callable[[Run], list[str]]:
    """The command of a run: its script under torchrun with so many processes on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return lambda run: [*launcher, run.script, *run.overrides]


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
        threads = str(max(1, cores // (runs_at_once * gpus_per_run)))
        return [{"OMP_NUM_THREADS": threads, "THREADS_PER_PROCESS": threads}] * runs_at_once
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


def in_order(runs: Sequence[Run], order: str) -> list[Run]:
    """The runs in the order to start them in: "seeds" trains every scheme with one seed before any with the next, so
    that there is a whole comparison early; "axes" all seeds of a scheme together.
    """
    if order not in ORDERS:
        raise ValueError(f"order={order} is unknown; choose one of: {', '.join(ORDERS)}")
    seeds = list(dict.fromkeys(run.seed for run in runs))
    return sorted(runs, key=lambda run: seeds.index(run.seed)) if order == "seeds" else list(runs)


def to_start(runs: Sequence[Run], retry_failed: int) -> tuple[dict[Run, int], list[Failure]]:
    """Of the runs that are not finished: how often each may be started, and those that failed and stay so.

    Raises ValueError for a negative number of retries.
    """
    if retry_failed < 0:
        raise ValueError(f"retry_failed={retry_failed} must be at least 0")
    tries: dict[Run, int] = {}
    failures = []
    for run in runs:
        if run.status == "finished":
            continue
        failure = remembered_failure(run)
        if failure and not retry_failed:
            failures.append(failure)
        else:
            tries[run] = retry_failed + (failure is None)
    return tries, failures


def launch(
    runs: Sequence[Run],
    command: Callable[[Run], list[str]],
    slots: Sequence[Mapping[str, str]],
    retry_failed: int = 0,
) -> list[Failure]:
    """Runs what is not finished, as many at a time as there are slots, and returns the runs that failed.

    A failing run does not stop the others; it is started again up to `retry_failed` times, when all others have had
    their turn. One that failed in an earlier sweep is not started without that. On SIGINT, SIGTERM or SIGHUP the
    children are ended, resumably, and SystemExit(128 + signal) is raised. Raises ValueError, before anything starts,
    when another process is at one of the runs.
    """
    tries, failures = to_start(runs, retry_failed)
    waiting = list(tries)
    active: list[Child] = []
    free = list(slots)
    with contextlib.ExitStack() as stack:
        logs = {run: stack.enter_context(locked_log(run)) for run in waiting}
        received = stack.enter_context(stop_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        progress = Progress(runs)
        stack.callback(progress.bar.close)
        stack.callback(end, active)
        while (waiting or active) and not received:
            while waiting and free:
                run = waiting.pop(0)
                tries[run] -= 1
                progress.note(f"{run.id}: {'resumes' if run.status == 'interrupted' else 'starts'}")
                logs[run].truncate(0)
                active.append(Child(run, command(run), free.pop(0), logs[run]))
            time.sleep(POLL_SECONDS)
            ended = [child for child in active if child.process.poll() is not None]
            progress.show([child.run for child in active])
            for child in ended:
                run = child.run
                active.remove(child)
                free.append(child.environment)
                failure = child.failure()
                progress.note(f"{run.id}: {'FAILED' if failure else 'finished'}{_val_losses(run)}")
                if failure and tries[run]:
                    waiting.append(run)
                    continue
                logs[run].close()
                failures += [failure] if failure else []
        if active:
            progress.note(f"stopping: waiting up to {GRACE_SECONDS} s for {len(active)} to save and end")
    if received:
        print("stopped; the same command goes on from the last checkpoints", file=sys.stderr)
        raise SystemExit(128 + received[0])
    return failures


class Progress:
    """One bar over the tokens of all runs, read from their metrics; plain lines where stderr is no terminal."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.done = {run: tokens_done(run) for run in runs}
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
        self.done |= {run: tokens_done(run) for run in active}
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


def run_state(run: Run, jobs: Mapping[Run, object]) -> str:
    """What a run is up to: finished, its job's state, running, failed, interrupted or missing."""
    if run.status == "finished":
        return "finished"
    if run in jobs:
        return str(jobs[run])
    if is_locked(run):
        return "running"
    return "failed" if remembered_failure(run) else run.status


def status_table(runs: Sequence[Run], jobs: Mapping[Run, object]) -> pd.DataFrame:
    """One row a run: its status (`jobs` are those that are queued or under way), its last step and its last losses."""
    rows = []
    for run in runs:
        metrics = last_metrics(run)
        losses = {key: value for key, value in metrics.items() if key == "train/loss" or key.startswith("val/")}
        state = run_state(run, jobs)
        rows.append({"run": run.id, "status": state, "step": f"{metrics.get('step', 0)}/{run.steps}"} | losses)
    return pd.DataFrame(rows)


def tokens_done(run: Run) -> int:
    """How many tokens a run has been trained on."""
    return run.tokens if run.status == "finished" else last_metrics(run).get("tokens", 0)


def _train_loss(run: Run) -> str:
    loss = last_metrics(run).get("train/loss")
    return f" ({loss:.3f})" if loss is not None else ""


def _val_losses(run: Run) -> str:
    metrics = last_metrics(run)
    losses = [f"{key.removeprefix('val/loss_')}: {value:.3f}" for key, value in metrics.items() if "val/loss_" in key]
    return f" ({', '.join(losses)})" if losses else ""
