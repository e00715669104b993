"""kill -9 at any moment, also in the middle of a save, never breaks a run nor changes where it ends."""

import os
import random
import re
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import train
from tests.ranks import start
from tests.runs import last_checkpoint, metrics_of
from tests.tiny_run import run, tiny_config, tiny_words, write_tiny_data
from training.checkpoint import restore_checkpoint
from training.checkpoint_folder import checkpoint_step, latest_checkpoint, list_checkpoints
from training.log import read_metrics_lines
from training.state import build_state

KILLS = 24
STEPS = ("train.steps=60", "train.checkpoint_every=2", "validation.every=6", "data.repeat=true")


def train_in_child(words: list[str]) -> None:
    raise SystemExit(run(train.main, words))


def kill_at_random(child: BaseProcess, run_dir: Path, dice: random.Random) -> str | None:
    """Waits a random time, or until a save or a removal is under way, and kills; None when the child was faster."""
    in_a_save = dice.random() < 0.5
    moment = time.monotonic() + (dice.uniform(0.2, 1.5) if not in_a_save else 30)
    checkpoints = run_dir / "checkpoints"
    saves = dice.randrange(1, 4)
    while child.is_alive() and time.monotonic() < moment:
        if in_a_save and any(checkpoints.glob("*.partial")):
            saves -= 1
            if not saves:
                time.sleep(dice.uniform(0, 0.004))
                break
            while child.is_alive() and any(checkpoints.glob("*.partial")):
                pass
        time.sleep(0.0002)
    if not child.is_alive():
        return None
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    return "save" if any(checkpoints.glob("*.partial")) else "other"


def check_whole(folder: Path) -> None:
    """Every checkpoint loads, and no line of metrics.jsonl but the last is torn or there twice."""
    for checkpoint in list_checkpoints(folder / "run"):
        restore_checkpoint(checkpoint, build_state(tiny_config(folder, *STEPS)))
    lines = read_metrics_lines(folder / "run" / "metrics.jsonl")
    kinds = [(line["step"], "train/loss" in line) for line in lines]
    assert len(kinds) == len(set(kinds))
    assert [step for step, _ in kinds] == sorted(step for step, _ in kinds)


def starts_of(folder: Path) -> list[int]:
    """The steps that the run was started from, in order."""
    return [int(step) for step in re.findall(r"steps (\d+) to 60", (folder / "run" / "log.txt").read_text())]


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_if_it_never_was(tmp_path: Path):
    for name in ("killed", "whole"):
        write_tiny_data(tmp_path / name / "data")
    assert run(train.main, tiny_words(tmp_path / "whole", *STEPS)) == 0
    folder, dice = tmp_path / "killed", random.Random(0)
    kills: list[str] = []
    while True:
        before = latest_checkpoint(folder / "run")
        known = len(starts_of(folder)) if (folder / "run" / "log.txt").exists() else 0
        child = start(train_in_child, tiny_words(folder, *STEPS), out=tmp_path / "said.txt", environment={})
        how = kill_at_random(child, folder / "run", dice) if len(kills) < KILLS else None
        child.join()
        if (folder / "run").exists():
            check_whole(folder)
            # it went on from the newest checkpoint, so no more than the steps after that one were done twice
            assert starts_of(folder)[known:] in ([], [checkpoint_step(before) if before else 0])
        if how is None:
            assert child.exitcode == 0, (tmp_path / "said.txt").read_text()
            break
        kills.append(how)
    assert len(kills) >= 20
    assert kills.count("save") >= 5
    assert metrics_of(folder) == metrics_of(tmp_path / "whole")
    assert last_checkpoint(folder / "run") == last_checkpoint(tmp_path / "whole" / "run")
    assert not list((folder / "run" / "checkpoints").glob("*.partial"))
