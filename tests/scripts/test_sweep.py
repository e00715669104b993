"""scripts/sweep.py from the outside, where it starts no training."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def sweep(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "sweep.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ, check=False)


def test_plan_prints_the_six_runs_of_the_quickstart_and_writes_nothing(tmp_path):
    done = sweep("experiment=quickstart", "plan=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = [line.partition("-seed0: missing, ")[0] for line in done.stdout.splitlines() if "seed0: missing" in line]
    assert runs == ["rope", "p_rope", "nope", "alibi", "logn_p_rope", "scale_invariant_p_rope"]
    assert "position=alibi seed=0 run_dir=runs/quickstart/alibi-seed0" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_status_prints_a_line_a_run(tmp_path):
    done = sweep("status=true", "fast=true", "only=[alibi]", cwd=tmp_path)
    assert done.stdout.splitlines()[1].split()[:2] == ["alibi-seed0", "missing"]
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_line_and_exit_code_2_and_nothing_is_written(tmp_path):
    for argument, words in {
        "experiment=tabel1": "experiment=tabel1 is unknown; choose one of:",
        "only=[yarn]": "only=yarn matches no run",
        "scale=full": "scale=full is not defined for experiment=quickstart; choose one of: proxy",
    }.items():
        done = sweep(argument, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {words}")
        assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
