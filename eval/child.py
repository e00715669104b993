"""One run as a child process, on this machine or inside a cluster's job: its log, its lock, and how it ended.

All of it lies in the run's folder: `child.log`, what the child said, is locked as long as the child or one of its
workers lives; `failure.json` is there from a failure until the run is started again.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from eval.experiment import Run

# torchrun gives its workers 30 s before it kills them; killed itself before that, it would leave them running.
GRACE_SECONDS = 45
POLL_SECONDS = 0.2
LOG, FAILURE = "child.log", "failure.json"
LOG_LINES = 15
# The first line that torchrun itself writes about a failed worker; the worker's own last words stand above it.
TORCHRUN_REPORT = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic/.*(failed \(exitcode|closing signal)")


@dataclass(frozen=True)
class Failure:
    """A run that did not finish: the exit code of its child (None: nobody saw it) and the last lines of its log."""

    run: Run
    returncode: int | None
    tail: str
    when: str = ""

    def __str__(self) -> str:
        how = "ended unfinished" if self.returncode is None else f"failed with exit code {self.returncode}"
        when = f" at {self.when}" if self.when else ""
        return f"{self.run.id} {how}{when}; the end of {self.run.run_dir / LOG}:\n{self.tail}"


class Child:
    """A run under way: its process group and the environment that it was given beside this process's own."""

    def __init__(self, run: Run, command: Sequence[str], environment: Mapping[str, str], log: BinaryIO) -> None:
        self.run, self.environment = run, environment
        (run.run_dir / FAILURE).unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [*_dies_with_its_parent(), *command],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a Ctrl-C reaches it through its parent only
        )

    def signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def failure(self) -> Failure | None:
        """Of a child that ended by itself; remembered in its run's folder."""
        if self.process.returncode == 0 and self.run.status == "finished":
            return None
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        path = self.run.run_dir / FAILURE
        partial = path.with_suffix(".partial")
        with contextlib.suppress(OSError):  # a full disk may be why it failed; then only this sweep knows
            partial.write_text(json.dumps({"returncode": self.process.returncode, "when": when}))
            os.replace(partial, path)
        return Failure(self.run, self.process.returncode, log_tail(self.run), when)


def _dies_with_its_parent() -> list[str]:
    """Where util-linux has it: a child whose parent is killed outright (kill -9) gets SIGTERM, and saves and ends."""
    return ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []


def end(children: Sequence[Child]) -> None:
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


def remembered_failure(run: Run) -> Failure | None:
    """How an unfinished run failed when it was last started; None when it did not, or was trained further since."""
    path = run.run_dir / FAILURE
    try:
        failed = path.stat().st_mtime
        record = json.loads(path.read_text())
        returncode, when = record["returncode"], record["when"]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and the run can be started again") from error
    log = run.run_dir / "log.txt"
    if run.status == "finished" or (log.exists() and log.stat().st_mtime > failed):
        return None
    return Failure(run, returncode, log_tail(run), when)


def log_tail(run: Run) -> str:
    """The last lines that a run's child wrote, without torchrun's own report."""
    try:
        lines = (run.run_dir / LOG).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    report = next((index for index, line in enumerate(lines) if TORCHRUN_REPORT.search(line)), len(lines))
    return "\n".join(lines[:report][-LOG_LINES:])


@contextlib.contextmanager
def stop_signals(*signums: int) -> Iterator[list[int]]:
    """Collects signals that ask to stop, instead of dying of them; one that was ignored (nohup) stays ignored."""
    received: list[int] = []
    previous = {}
    for signum in signums:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            previous[signum] = signal.signal(signum, lambda number, _frame: received.append(number))
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def locked_log(run: Run, patience: float = 0) -> Iterator[BinaryIO]:
    """The log of a run, locked for whoever writes to it.

    The lock goes with the open file to the child and to its workers, so it outlives a killed sweep as long as one of
    them still trains: two processes never train into one folder. Waits up to `patience` seconds for it.
    """
    run.run_dir.mkdir(parents=True, exist_ok=True)
    with (run.run_dir / LOG).open("ab") as log:
        deadline = time.monotonic() + patience
        while not _lock(log, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                raise ValueError(f"{run.run_dir} is being trained by another process; wait for it or end it")
            time.sleep(POLL_SECONDS)
        yield log


def is_locked(run: Run) -> bool:
    """Whether a process is at work in a run's folder: train.py, however it was started, or its launcher."""
    for name in (LOG, "log.txt"):
        with contextlib.suppress(FileNotFoundError), (run.run_dir / name).open("rb") as log:
            if not _lock(log, fcntl.LOCK_SH):  # shared, and gone at once
                return True
    return False


def _lock(file: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # some network file systems know no locks
    return True
