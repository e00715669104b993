"""The main job for real, small: prepare, train under torchrun, stop, go on, evaluate, tables and figures."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eval.runs import read_metrics

ROOT = Path(__file__).parents[1]
TINY = [
    *("model.n_layer=1", "model.width=32", "train.length=32", "train.tokens_per_step=256", "train.steps=300"),
    *("train.checkpoint_every=20", "validation.lengths=[32,64]", "validation.tokens=1024", "validation.every=100"),
]
COMMAND = [
    *(sys.executable, "scripts/reproduce.py", "experiment=quickstart", "name=tiny", "only=[rope,alibi]"),
    *("runs_at_once=1", f"overrides=[{','.join(json.dumps(word) for word in TINY)}]"),
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The project without its data, runs and results."""
    for part in ("configs", "data", "eval", "model", "scripts", "training"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("shards", "__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_reproduce_trains_and_evaluates_in_jobs_where_it_is_told_to(checkout: Path) -> None:
    words = ["launcher=submitit_local", "only=[alibi]"]
    done = subprocess.run([*COMMAND, *words], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    submitted = [line.partition(": job ")[0] for line in done.stdout.splitlines() if ": job " in line]
    assert submitted == ["alibi-seed0", "alibi-seed0 (evaluation)"]
    run_dir = checkout / "runs" / "tiny" / "alibi-seed0"
    assert json.loads((run_dir / "evaluation" / "job.json").read_text())["kind"] == "submitit_local"
    assert len(list((checkout / "runs" / "tiny" / "jobs").glob("*_log.out"))) == 2
    table = json.loads((checkout / "results" / "tiny" / "table.json").read_text())
    assert json.loads((run_dir / "eval.json").read_text())["loss"]["64"]["mean"] == table["rows"]["alibi"]["mean"][1]


@pytest.mark.slow
def test_reproduce_stopped_in_the_middle_goes_on_and_ends_with_the_table_of_its_runs(checkout: Path) -> None:
    rope, alibi = (checkout / "runs" / "tiny" / f"{name}-seed0" for name in ("rope", "alibi"))

    first = subprocess.Popen(COMMAND, cwd=checkout, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(rope.glob("checkpoints/step_000*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=120)[1]
    assert first.returncode == 130, said
    assert "goes on from the last checkpoint" in said
    assert not (rope / "checkpoints" / "step_000300").exists()
    stopped_at = max(read_metrics(rope)["step"])

    second = subprocess.run(COMMAND, cwd=checkout, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert "rope-seed0: resumes" in second.stderr
    assert list(read_metrics(rope)["step"]) == list(range(301))
    assert 20 <= stopped_at < 300
    table = json.loads((checkout / "results" / "tiny" / "table.json").read_text())
    assert table["columns"] == ["val@32", "val@64"]
    for name, run_dir in (("rope", rope), ("alibi", alibi)):
        last = read_metrics(run_dir).iloc[-1]
        assert table["rows"][name]["mean"] == [last["val/loss_32"], last["val/loss_64"]]
    assert table["rows"]["nope"]["mean"] == [None, None]
    assert (checkout / "results" / "tiny" / "loss_by_length.png").stat().st_size > 10_000

    assert (checkout / "results" / "tiny" / "loss_by_position.png").stat().st_size > 10_000
    assert "alibi-seed0 (evaluation): finished" in second.stderr
    assert not (checkout / "results" / "runs").exists()  # a run with a name is a trial

    losses = json.loads((alibi / "eval.json").read_text())["loss"]
    assert losses["64"]["mean"] == table["rows"]["alibi"]["mean"][1]  # evaluated as it was validated

    third = subprocess.run(COMMAND, cwd=checkout, capture_output=True, text=True, check=True)
    assert "starts" not in third.stderr
    assert "resumes" not in third.stderr
