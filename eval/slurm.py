"""Submits the runs of an experiment as jobs of their own, through submitit: to Slurm, or to this machine to try it out.

A job runs torchrun on the run's arguments, one task a node. Before its time is over (and where Slurm preempts it), it
has the run save, and asks to be queued again; it then goes on from the run's last checkpoint. `job.json` in the run's
folder names its job, so that a run which is queued or under way is not submitted twice.

submitit hands a job over as a pickle in the sweep's own folder of jobs. Only the job itself reads it: what a run or a
job leaves behind is never unpickled here.
"""

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError
from submitit.helpers import DelayedSubmission
from tqdm import tqdm

from eval.child import POLL_SECONDS, Child, Failure, end, locked_log, remembered_failure, stop_signals
from eval.experiment import Run
from eval.sweep import Progress, torchrun

JOB = "job.json"
SLURM, HERE = "slurm", "submitit_local"
LOCK_PATIENCE = 60  # seconds: whoever submits a job still holds the run when the job begins
KILL_PATIENCE = 900  # seconds after a SIGTERM, in which Slurm ends the job, and queues it again if it preempted it
ASK_EVERY = {SLURM: 15.0, HERE: POLL_SECONDS}  # seconds
TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?")


@dataclass(frozen=True)
class Job:
    """A submitted run: `state` is Slurm's word in small letters, or "unknown" where Slurm can't be asked; `log` is what
    the job itself says, beside the run's own log.
    """

    kind: str
    id: str
    state: str
    log: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.state} (job {self.id})"


@dataclass
class RunJob:
    """What a job does on each of its nodes. submitit pickles it, and again when the job is queued again."""

    run: Run
    processes: int
    tries: int = 1

    def __call__(self) -> None:
        """Trains the run to its end. A run that fails is remembered as failed, and ends the job with exit code 1."""
        job = submitit.JobEnvironment()
        last_call = getattr(signal, f"SIG{job.USR_SIG}")  # what Slurm sends before the time is over
        requeue: Any = signal.getsignal(last_call)  # submitit's; called when the child has ended, not inside a wait
        with stop_signals(signal.SIGTERM, last_call) as received:
            failure = self._train(job, received, last_call)
            deadline = time.monotonic() + KILL_PATIENCE
            while received == [signal.SIGTERM] and job.cluster == SLURM and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)  # a job that ended by itself would not be queued again after a preemption
        if last_call in received:
            requeue(last_call, None)
        elif received:
            raise SystemExit(128 + received[0])
        elif failure:
            print(failure, file=sys.stderr)
            raise SystemExit(1)

    def checkpoint(self) -> DelayedSubmission:
        """What submitit queues again: the same, which goes on from the run's last checkpoint."""
        return DelayedSubmission(self)

    def _train(self, job: Any, received: list[int], last_call: int) -> Failure | None:
        failure = None
        with contextlib.ExitStack() as stack:
            # the run's log and lock are the first node's; what the others say is in their jobs' own logs
            log = stack.enter_context(locked_log(self.run, LOCK_PATIENCE)) if job.node == 0 else sys.stdout.buffer
            for _ in range(self.tries):
                # Slurm may signal children too; they inherit that this signal is blocked
                signal.pthread_sigmask(signal.SIG_BLOCK, {last_call})
                child = Child(self.run, torchrun_in_job(self.run, self.processes, job), {}, log)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {last_call})
                try:
                    while child.process.poll() is None and not received:
                        time.sleep(POLL_SECONDS)
                finally:
                    end([child])
                # the first node speaks for all, and the others' ends are often but a consequence of its own
                failure = None if received or job.node else child.failure()
                if not failure:
                    break
        return failure


def torchrun_in_job(run: Run, processes: int, job: Any) -> list[str]:
    """The command of a run on one of the nodes of its job, `processes` on each."""
    if job.num_nodes == 1:
        return torchrun(processes)(run)
    port = 20000 + int(job.job_id) % 10000  # another one for each job that may have the same first node
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={job.num_nodes}", f"--nproc_per_node={processes}"),
        *("--rdzv_backend=c10d", f"--rdzv_endpoint={job.hostnames[0]}:{port}", f"--rdzv_id={job.job_id}"),
        *(run.script, *run.overrides),
    ]


def minutes(text: str) -> int:
    """A time limit in minutes, from Slurm's "minutes", "hours:minutes:seconds" or "days-hours:minutes:seconds"."""
    if str(text).isdecimal() and int(text) > 0:
        return int(text)
    if not (match := TIME.fullmatch(str(text))) or not any(map(int, match.groups(default="0"))):
        raise ValueError(f"launcher.time={text} must be minutes, HH:MM:SS or D-HH:MM:SS, such as 24:00:00")
    days, hours, mins, seconds = map(int, match.groups(default="0"))
    return (days * 24 + hours) * 60 + mins + (seconds > 0)


def make_executor(launcher: Any, folder: Path, job_name: str, gpus_per_node: int) -> Any:
    """submitit's executor for the keys of configs/launcher/. Raises ValueError naming the key that can't be."""
    limit = minutes(launcher.time)
    for key, lowest in {"nodes": 1, "requeues": 0, "save_seconds": 1}.items():
        if launcher[key] < lowest:
            raise ValueError(f"launcher.{key}={launcher[key]} must be at least {lowest}")
    if launcher.save_seconds >= 60 * limit:
        raise ValueError(f"launcher.save_seconds={launcher.save_seconds} must be less than launcher.time")
    shared = {"signal_delay_s": launcher.save_seconds, "stderr_to_stdout": True, "gpus_per_node": gpus_per_node}
    if launcher.kind == HERE:
        if launcher.nodes > 1:
            raise ValueError(f"launcher.nodes={launcher.nodes} must be 1 with launcher={HERE}")
        executor = submitit.LocalExecutor(folder, max_num_timeout=launcher.requeues)
        executor.update_parameters(timeout_min=limit, **shared)
        return executor
    if lacking := [command for command in ("sbatch", "srun", "squeue") if shutil.which(command) is None]:
        raise ValueError(
            f"launcher={launcher.kind}: there is no {lacking[0]} here; use a machine that submits to Slurm, or try the "
            f"jobs on this one with launcher={HERE}"
        )
    named = {key: launcher[key] for key in ("partition", "account", "qos", "cpus_per_task") if launcher[key]}
    for key, value in {**named, **launcher.sbatch}.items():
        if "\n" in str(value) + str(key):
            raise ValueError(f"launcher: {key}={value!r} must be one line")
    srun = ["--kill-on-bad-exit=1"]
    srun += [f"--cpus-per-task={launcher.cpus_per_task}"] if launcher.cpus_per_task else []  # not srun's default
    if not gpus_per_node:
        del shared["gpus_per_node"]
    executor = submitit.SlurmExecutor(folder, max_num_timeout=launcher.requeues)
    executor.update_parameters(
        job_name=job_name,
        time=limit,
        nodes=launcher.nodes,
        ntasks_per_node=1,
        srun_args=srun,
        additional_parameters={"requeue": True, **launcher.sbatch},
        **named,
        **shared,
    )
    return executor


def submit(tries: Mapping[Run, int], launcher: Any, processes: int, folder: Path) -> dict[Run, Job]:
    """Submits each run as a job that may start it so often; returns the jobs.

    Raises ValueError when another process is at one of the runs, or Slurm refuses a job.
    """
    jobs: dict[Run, Job] = {}
    for run in tqdm(tries, desc="submitting", unit="job", disable=None):
        on_cpu = run.config["device"] == "cpu"
        executor = make_executor(launcher, folder, run.id, 0 if on_cpu else processes)
        with locked_log(run) as log:
            log.truncate(0)
            try:
                job = executor.submit(RunJob(run, processes, tries[run]))
            except FailedJobError as error:
                raise ValueError(f"{run.id}: sbatch refused the job: {' '.join(str(error).split())}") from error
            partial = run.run_dir / f"{JOB}.partial"
            record = {"kind": launcher.kind, "id": job.job_id, "log": str(job.paths.stdout)}
            partial.write_text(json.dumps(record))
            os.replace(partial, run.run_dir / JOB)
        jobs[run] = Job(state="pending" if launcher.kind == SLURM else "running", **record)
    return jobs


def jobs_of(runs: Sequence[Run]) -> dict[Run, Job]:
    """The runs that are not finished and have a job that is queued or under way, as far as can be known here."""
    named: dict[Run, Job] = {}
    for run in runs:
        path = run.run_dir / JOB
        if run.status != "finished" and path.exists():
            try:
                record = json.loads(path.read_text())
                named[run] = Job(record["kind"], str(record["id"]), "unknown", record["log"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path} is damaged ({error}); delete it if the run has no job any more") from error
    states = _squeue() if any(job.kind == SLURM for job in named.values()) else {}
    jobs = {}
    for run, job in named.items():
        if job.kind == HERE:
            state = "running" if _is_controller(job.id) else None
        else:
            state = "unknown" if states is None else states.get(job.id)
        if state:
            jobs[run] = replace(job, state=state)
    return jobs


def wait_for(runs: Sequence[Run], jobs: Mapping[Run, Job]) -> list[Failure]:
    """Waits until the jobs have ended, with a bar over all runs; returns the runs that did not finish.

    A signal ends the waiting, not the jobs, with SystemExit(128 + signal).
    """
    left = dict(jobs)
    with stop_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as received:
        progress = Progress(runs)
        asked = 0.0
        while left and not received:
            time.sleep(POLL_SECONDS)
            if time.monotonic() - asked < min(ASK_EVERY[job.kind] for job in left.values()):
                continue
            progress.show(list(left))
            active = jobs_of(list(left))
            asked = time.monotonic()
            for run in [run for run in left if run not in active]:
                progress.note(f"{run.id}: job {left.pop(run).id} has ended, {run.status}")
        progress.bar.close()
    if received:
        print(f"stopped waiting; {len(left)} jobs go on, and status=true shows them", file=sys.stderr)
        raise SystemExit(128 + received[0])
    unfinished = [run for run in jobs if run.status != "finished"]
    return [remembered_failure(run) or Failure(run, None, f"(see {jobs[run].log})") for run in unfinished]


def _squeue() -> dict[str, str] | None:
    """The state of each of this user's jobs that Slurm has not forgotten; None where there is no Slurm."""
    command = ["squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%i %T"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        return None
    except subprocess.CalledProcessError as error:
        raise ValueError(f"squeue failed: {' '.join(error.stderr.split())}; try again") from error
    return {words[0]: words[1].lower() for line in said.splitlines() if len(words := line.split()) == 2}


def _is_controller(pid: str) -> bool:
    """Whether a process of this machine is the one that looks after a local job (Linux)."""
    try:
        return b"submitit.local._local" in Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return False
