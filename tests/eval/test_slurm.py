"""Jobs: what Slurm would be told (a pretended sbatch), what a job does on its node, and who is submitted."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from configs.command import compose
from eval import slurm
from eval.child import locked_log, remembered_failure
from eval.slurm import Job, RunJob, jobs_of, make_executor, minutes, submit, torchrun_in_job, wait_for
from tests.fake_train import fake_train, make_runs, starts
from tests.fake_train import wait_for as wait_until

SBATCH = """#!/bin/sh
[ -e "$SLURM_FAKE/refuse" ] && { echo "sbatch: error: invalid partition" >&2; exit 1; }
id=$((100 + $(ls "$SLURM_FAKE" | grep -c 'sh$')))
cp "$1" "$SLURM_FAKE/$id.sh"
echo "$id PENDING" >> "$SLURM_FAKE/queue"
echo "Submitted batch job $id"
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """An empty working directory and a pretended Slurm: the scripts it was given, and its queue, lie in the folder."""
    fake, programs = tmp_path / "slurm", tmp_path / "bin"
    fake.mkdir()
    programs.mkdir()
    (fake / "queue").touch()
    for name, text in {"sbatch": SBATCH, "srun": "", "squeue": '#!/bin/sh\ncat "$SLURM_FAKE/queue"\n'}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_FAKE", str(fake))
    monkeypatch.chdir(tmp_path)
    return fake


def launcher(*words: str, name: str = "slurm"):
    return compose("sweep", ["experiment=quickstart", f"launcher={name}", *words]).launcher


def flags(script: Path) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if line.startswith("#SBATCH")}


def test_sbatch_is_told_of_nodes_gpus_time_partition_signal_and_requeueing(cluster):
    (run,) = make_runs("rope")
    run.config["device"] = "auto"  # pyright: ignore[reportIndexIssue]
    words = ("launcher.nodes=2", "launcher.partition=gpu", "launcher.account=lab", "launcher.time='1-02:30:00'")
    words += ("launcher.cpus_per_task=64", "+launcher.sbatch.mem=64G", "+launcher.sbatch.constraint=a100")
    jobs = submit({run: 1}, launcher(*words), 8, Path("jobs"))
    script = cluster / "100.sh"
    assert flags(script) >= {
        *("--job-name=rope-seed0", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=64"),
        *("--partition=gpu", "--account=lab", "--time=1590", "--mem=64G", "--constraint=a100"),
        *("--signal=USR2@120", "--requeue", "--open-mode=append"),
    }
    (line,) = [line for line in script.read_text().splitlines() if line.startswith("srun")]
    assert "--kill-on-bad-exit=1 --cpus-per-task=64 " in line
    assert line.endswith(f"{sys.executable} -u -m submitit.core._submit {Path('jobs').absolute()}")
    assert jobs == {run: Job("slurm", "100", "pending")}
    log = f"{Path('jobs').absolute()}/100_0_log.out"
    assert json.loads((run.run_dir / "job.json").read_text()) == {"kind": "slurm", "id": "100", "log": log}
    assert Path("jobs/100_submitted.pkl").is_file()


def test_runs_on_a_cpu_ask_for_no_gpus(cluster):
    submit(dict.fromkeys(make_runs("rope"), 1), launcher(), 4, Path("jobs"))
    assert not any("gpu" in flag or "partition" in flag for flag in flags(cluster / "100.sh"))


def test_a_run_has_its_job_as_long_as_slurm_knows_it_and_the_run_is_not_finished(cluster):
    rope, alibi = runs = make_runs("rope", "alibi")
    submit(dict.fromkeys(runs, 1), launcher(), 1, Path("jobs"))
    assert {run.id: str(job) for run, job in jobs_of(runs).items()} == {
        "rope-seed0": "pending (job 100)",
        "alibi-seed0": "pending (job 101)",
    }
    (cluster / "queue").write_text("101 RUNNING\n1010 PENDING\n")
    assert jobs_of(runs) == {alibi: Job("slurm", "101", "running")}
    (alibi.run_dir / "checkpoints" / "step_000020").mkdir(parents=True)
    assert jobs_of(runs) == {}
    assert jobs_of([rope]) == {}


def test_without_slurm_the_state_of_a_job_is_unknown(cluster, monkeypatch):
    runs = make_runs("rope")
    submit(dict.fromkeys(runs, 1), launcher(), 1, Path("jobs"))
    monkeypatch.setenv("PATH", "")
    assert [job.state for job in jobs_of(runs).values()] == ["unknown"]


def test_a_damaged_record_of_a_job_is_named(cluster):
    (run,) = make_runs("rope")
    run.run_dir.mkdir(parents=True)
    (run.run_dir / "job.json").write_text("[]")
    with pytest.raises(ValueError, match=r"rope-seed0/job\.json is damaged .*delete it"):
        jobs_of([run])


def test_what_sbatch_refuses_is_said_and_leaves_no_job(cluster):
    (run,) = make_runs("rope")
    (cluster / "refuse").touch()
    with pytest.raises(ValueError, match=r"rope-seed0: sbatch refused the job: .*invalid partition"):
        submit({run: 1}, launcher(), 1, Path("jobs"))
    assert jobs_of([run]) == {}


def test_a_run_that_another_process_trains_is_not_submitted(cluster):
    (run,) = make_runs("rope")
    with locked_log(run), pytest.raises(ValueError, match="rope-seed0 is being trained by another process"):
        submit({run: 1}, launcher(), 1, Path("jobs"))
    assert not list(cluster.glob("*.sh"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launcher.time=soon"], r"launcher\.time=soon must be minutes, HH:MM:SS"),
        (["launcher.nodes=0"], r"launcher\.nodes=0 must be at least 1"),
        (["launcher.requeues=-1"], r"launcher\.requeues=-1 must be at least 0"),
        (["launcher.time=2", "launcher.save_seconds=120"], r"launcher\.save_seconds=120 must be less than"),
        (["launcher.partition='a\nb'"], "partition='a\\\\nb' must be one line"),
        (["+launcher.sbatch.mem='a\nb'"], "mem='a\\\\nb' must be one line"),
    ],
    ids=str,
)
def test_a_wrong_setting_of_the_launcher_is_refused(cluster, words, message):
    with pytest.raises(ValueError, match=message):
        make_executor(launcher(*words), Path("jobs"), "job", 1)
    assert not Path("jobs").exists()


def test_slurm_where_there_is_none_and_several_nodes_on_one_machine_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"launcher=slurm: there is no sbatch here; .*launcher=submitit_local"):
        make_executor(launcher(), tmp_path / "jobs", "job", 1)
    with pytest.raises(ValueError, match=r"launcher\.nodes=2 must be 1 with launcher=submitit_local"):
        make_executor(launcher("launcher.nodes=2", name="submitit_local"), tmp_path / "jobs", "job", 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("24:00:00", 1440), ("1-00:00:00", 1440), ("2-03:04:05", 3065), ("1:30", 90)],
)
def test_a_time_limit_is_read_as_slurm_does(text, expected):
    assert minutes(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-5", "00:00:00", "1:2:3", "1.5", "1d"])
def test_what_is_no_time_limit_is_refused(text):
    with pytest.raises(ValueError, match=r"launcher\.time=.* must be"):
        minutes(text)


def test_the_torchruns_of_several_nodes_meet_at_the_first_one():
    (run,) = make_runs("rope")
    nodes = SimpleNamespace(num_nodes=2, hostnames=["n7", "n9"], job_id="123456")
    words = torchrun_in_job(run, 8, nodes)[1:]
    assert words[:4] == ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=8"]
    assert words[4:] == ["--rdzv_backend=c10d", "--rdzv_endpoint=n7:23456", "--rdzv_id=123456", "train.py"]
    one = torchrun_in_job(run, 8, SimpleNamespace(num_nodes=1))
    assert "--standalone" in one


@pytest.fixture
def node(tmp_path, monkeypatch):
    """This process in the place of a job's: with submitit's environment and handler, which notes that it was called."""
    calls = []
    variables = {"EXECUTOR": "local", "LOCAL_JOB_ID": "7", "LOCAL_NODEID": "0", "LOCAL_JOB_NUM_NODES": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SUBMITIT_{name}", value)
    for name, value in {"JOB_ID": "7", "NODEID": "0", "JOB_NUM_NODES": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(slurm, "torchrun_in_job", lambda run, processes, job: fake_train(run))
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    signal.signal(signal.SIGUSR2, lambda number, frame: calls.append(number))
    yield calls
    for number, handler in before.items():
        signal.signal(number, handler)


def send(signum: int, when: Path) -> None:
    """Sends this process a signal when a file is there."""

    def wait() -> None:
        wait_until(lambda: when.exists() and when.read_text())
        os.kill(os.getpid(), signum)

    threading.Thread(target=wait, daemon=True).start()


def test_a_job_trains_its_run(node):
    (run,) = make_runs("rope")
    RunJob(run, 1)()
    assert run.status == "finished"
    assert not node


def test_a_job_whose_run_fails_says_so_and_ends_with_an_error_and_the_failure_is_remembered(node, capsys):
    (run,) = make_runs("fails")
    with pytest.raises(SystemExit) as exit:
        RunJob(run, 1, tries=2)()
    assert exit.value.code == 1
    assert starts(run) == 2
    assert "the reason" in capsys.readouterr().err
    failure = remembered_failure(run)
    assert failure is not None
    assert failure.returncode == 3


def test_before_its_time_is_over_a_job_ends_its_run_resumably_and_is_queued_again(node):
    (run,) = make_runs("sleeps")
    send(signal.SIGUSR2, run.run_dir / "pid")
    RunJob(run, 1)()
    assert node == [signal.SIGUSR2]
    assert (run.status, remembered_failure(run)) == ("interrupted", None)
    with pytest.raises(ProcessLookupError):
        os.kill(int((run.run_dir / "pid").read_text()), 0)


def test_a_job_that_is_to_end_ends_its_run_resumably(node):
    (run,) = make_runs("sleeps")
    send(signal.SIGTERM, run.run_dir / "pid")
    with pytest.raises(SystemExit) as exit:
        RunJob(run, 1)()
    assert (exit.value.code, run.status, remembered_failure(run)) == (143, "interrupted", None)


def test_a_preempted_job_waits_for_slurm_to_take_it_away_or_to_have_it_queued_again(node, monkeypatch):
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    (run,) = make_runs("sleeps")
    send(signal.SIGTERM, run.run_dir / "pid")
    ended = []
    monkeypatch.setattr(slurm, "end", lambda children: ended.append([child.signal(15) for child in children]))
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    RunJob(run, 1)()
    assert ended
    assert node == [signal.SIGUSR2]


def test_only_the_first_node_of_a_job_locks_the_run_and_speaks_of_its_failure(node, monkeypatch):
    monkeypatch.setenv("SUBMITIT_LOCAL_NODEID", "1")
    (run,) = make_runs("fails")
    with locked_log(run):  # as the first node has it
        monkeypatch.setattr(sys, "stdout", (run.run_dir / "node1.txt").open("w"))
        RunJob(run, 1)()
    assert remembered_failure(run) is None
    assert "the reason" in (run.run_dir / "node1.txt").read_text()


def test_waiting_ends_with_the_last_job_and_names_what_did_not_finish(cluster, monkeypatch, capsys):
    monkeypatch.setitem(slurm.ASK_EVERY, "slurm", 0.01)
    rope, alibi = runs = make_runs("rope", "alibi")
    jobs = submit(dict.fromkeys(runs, 1), launcher(), 1, Path("jobs"))

    def work() -> None:
        (rope.run_dir / "checkpoints" / "step_000020").mkdir(parents=True)
        (cluster / "queue").write_text("")

    threading.Timer(0.5, work).start()
    (failure,) = wait_for(runs, jobs)
    assert (failure.run, failure.returncode) == (alibi, None)
    assert str(failure).startswith("alibi-seed0 ended unfinished")
    assert "jobs/101_0_log.out" in failure.tail
    assert "rope-seed0: job 100 has ended, finished" in capsys.readouterr().err


def test_a_signal_ends_the_waiting_but_not_the_jobs(cluster, capsys):
    runs = make_runs("rope")
    jobs = submit(dict.fromkeys(runs, 1), launcher(), 1, Path("jobs"))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit) as exit:
        wait_for(runs, jobs)
    assert exit.value.code == 143
    assert "1 jobs go on" in capsys.readouterr().err
    assert list(jobs_of(runs)) == runs


def test_the_job_of_another_launcher_file_keeps_its_settings():
    assert launcher(name="submitit_local") == OmegaConf.merge(launcher(), {"kind": "submitit_local"})
