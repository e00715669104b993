"""scripts/sweep.py from the outside, where it starts no training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from configs.command import compose
from scripts import sweep as script
from tests.tiny_run import SIZES, write_tiny_data

ROOT = Path(__file__).parents[2]


def sweep(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "sweep.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ, check=False)


def test_plan_prints_the_six_runs_of_the_quickstart_and_writes_nothing(tmp_path):
    done = sweep("experiment=quickstart", "plan=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "missing" in line]
    schemes = ["rope", "p_rope", "nope", "alibi", "logn_p_rope", "scale_invariant_p_rope"]
    assert [row[:4] for row in rows] == [[f"{name}-seed0", "missing", "3,276,800", "3,276,800"] for name in schemes]
    assert "position=alibi seed=0 run_dir=runs/quickstart/alibi-seed0" in done.stdout
    assert "6 runs, 6 to train; 19,660,800 tokens, 19,660,800 left" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_status_prints_a_line_a_run(tmp_path):
    done = sweep("experiment=quickstart", "status=true", "fast=true", "only=[alibi]", cwd=tmp_path)
    assert done.stdout.splitlines()[1].split()[:2] == ["alibi-seed0", "missing"]
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_line_and_exit_code_2_and_nothing_is_written(tmp_path):
    for argument, words in {
        "experiment=tabel1": "experiment=tabel1 is unknown; choose one of:",
        "only=[yarn]": "only=yarn matches no run",
        "scale=full": "scale=full is not defined for experiment=quickstart; choose one of: proxy",
        "order=size": "order=size is unknown; choose one of: seeds, axes",
        "launcher=cloud": "launcher=cloud is unknown; choose one of: local, slurm, submitit_local",
    }.items():
        chosen = [] if argument.startswith("experiment=") else ["experiment=quickstart"]
        done = sweep(*chosen, argument, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {words}")
        assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("attention=flex", "attention=flex has no gradients on a CPU; use attention=auto"),
        ("device=cuda", "device=cuda: this machine has 0 CUDA devices"),
    ],
)
def test_what_this_machine_can_not_train_is_refused_before_anything_starts(word, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(script, "launch", lambda *_: pytest.fail("a run was started"))
    write_tiny_data(tmp_path / "data")
    words = [*SIZES, f"data.dir={tmp_path / 'data'}", word]
    config = compose(
        "sweep", ["experiment=quickstart", "only=[rope]", f"overrides=[{','.join(map(json.dumps, words))}]"]
    )
    _, runs = script.read_runs(config)
    with pytest.raises(ValueError, match=message):
        script.train(runs[:1], config)


def test_what_train_py_would_refuse_is_refused_before_anything_starts(tmp_path):
    for arguments, words in {
        ("only=[rope]",): "data.dir=data/shards/sotu_bytes: no such folder; make it:",
        ("only=[alibi]", 'overrides=["position.logits.slopes=[1,2,3]"]'): "alibi-seed0: position.logits.slopes",
        ("only=[alibi]", 'overrides=["dry_run=true"]'): "overrides=dry_run=true: a sweep trains",
    }.items():
        done = sweep("experiment=quickstart", *arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {words}"), done.stderr
    assert list(tmp_path.iterdir()) == []
