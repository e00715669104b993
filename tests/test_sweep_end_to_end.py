"""scripts/sweep.py for real, small: torchrun children on a CPU, and jobs of submitit on this machine."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eval.runs import read_metrics
from tests.fake_train import wait_for
from tests.tiny_run import ROOT, write_tiny_data

TINY = [
    *("model.n_layer=1", "model.width=32", "train.length=32", "train.tokens_per_step=256", "train.steps=600"),
    *("train.checkpoint_every=20", "validation.lengths=[32,64]", "validation.tokens=1024", "validation.every=200"),
    *("data.dir=data", "data.repeat=true", "device=cpu", "precision=fp32"),
]

needs_linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for children in /proc")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the repository's root, with data."""
    write_tiny_data(tmp_path / "data")
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str) -> list[str]:
    overrides = f"overrides=[{','.join(json.dumps(word) for word in TINY)}]"
    chosen = ("experiment=quickstart", "name=tiny", "only=[rope]")
    return [sys.executable, str(ROOT / "scripts" / "sweep.py"), *chosen, overrides, *words]


def sweep(*words: str) -> tuple[int, str]:
    """The exit code of a sweep and all that it says. Through a file: what it leaves running would keep a pipe open."""
    with open("said.txt", "w+") as said:
        code = subprocess.run(command(*words), stdout=said, stderr=said, check=False).returncode
        said.seek(0)
        return code, said.read()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def signal_all(pids: list[int], signum: int) -> None:
    for pid in pids:
        os.kill(pid, signum)


@pytest.mark.slow
@needs_linux
def test_two_processes_a_run_are_stopped_by_sigterm_and_go_on_to_the_end(folder: Path) -> None:
    run_dir = folder / "runs" / "tiny" / "rope-seed0"
    first = subprocess.Popen(command("gpus_per_run=2"), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(run_dir.glob("checkpoints/step_000*")))
    (torchrun,) = children(first.pid)
    workers = children(torchrun)
    assert len(workers) == 2
    signal_all(workers, signal.SIGSTOP)  # so that they are not done before the next sweep has looked
    code, said = sweep("gpus_per_run=2")
    assert (code, said) == (
        2,
        "error: runs/tiny/rope-seed0 is being trained by another process; wait for it or end it\n",
    )
    first.send_signal(signal.SIGTERM)
    signal_all(workers, signal.SIGCONT)
    _, said = first.communicate(timeout=240)
    assert first.returncode == 143, said
    assert "stopped by a signal" in (run_dir / "log.txt").read_text()
    assert sweep("status=true")[1].splitlines()[1].split()[:2] == ["rope-seed0", "interrupted"]
    code, said = sweep("gpus_per_run=2")
    assert code == 0, said
    assert "rope-seed0: resumes" in said
    assert list(read_metrics(run_dir)["step"]) == list(range(601))
    assert "on 2 x cpu" in (run_dir / "log.txt").read_text()


@pytest.mark.slow
@needs_linux
def test_a_job_is_submitted_once_and_signalled_before_its_end_goes_on_from_its_checkpoint(folder: Path) -> None:
    run_dir = folder / "runs" / "tiny" / "rope-seed0"
    code, said = sweep("launcher=submitit_local")
    assert code == 0, said
    match = re.search(r"rope-seed0: job (\d+)$", said, re.MULTILINE)
    assert match, said
    controller = int(match.group(1))
    wait_for(lambda: list(run_dir.glob("checkpoints/step_000*")))
    (task,) = children(controller)
    (torchrun,) = children(task)
    workers = children(torchrun)
    signal_all(workers, signal.SIGSTOP)  # so that they are not done before the next sweeps have looked
    assert f"rope-seed0 running (job {controller})" in " ".join(sweep("status=true")[1].split())
    code, said = sweep("launcher=submitit_local")
    assert (code, said) == (0, f"rope-seed0: running (job {controller}) already\n")

    os.kill(task, signal.SIGUSR2)
    signal_all(workers, signal.SIGCONT)
    code, said = sweep("launcher=submitit_local", "wait=true")
    assert code == 0, said
    assert f"rope-seed0: job {controller} has ended, finished" in said
    log = (run_dir / "log.txt").read_text()
    assert "stopped by a signal" in log
    assert len(re.findall(r"steps \d+ to 600", log)) == 2
    assert list(read_metrics(run_dir)["step"]) == list(range(601))
    assert sweep("launcher=submitit_local") == (0, "")


@pytest.mark.slow
def test_a_run_that_fails_in_its_job_is_failed_in_the_status_and_not_submitted_again(folder: Path) -> None:
    (folder / "train.py").unlink()
    (folder / "train.py").write_text("raise SystemExit('no such luck')")
    code, said = sweep("launcher=submitit_local", "wait=true")
    assert code == 1
    assert "no such luck\n\n1 failed: rope-seed0; retry_failed=1 starts them again" in said
    code, said = sweep("status=true")
    assert said.splitlines()[1].split()[:2] == ["rope-seed0", "failed"]
    assert "no such luck" in said
    assert sweep("launcher=submitit_local")[0] == 1
    assert len(list(folder.glob("runs/tiny/jobs/*_submitted.pkl"))) == 1
