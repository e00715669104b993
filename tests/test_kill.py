"""kill -9 at any moment, also in the middle of a save, never breaks a run nor changes where it ends."""

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from tests.ranks import start
from tests.runs import last_checkpoint, metrics_of
from tests.tiny_run import run, tiny_config, tiny_words, write_tiny_data
from training.checkpoint import restore_checkpoint
from training.checkpoint_folder import checkpoint_step, latest_checkpoint, list_checkpoints
from training.log import read_metrics_lines
from training.state import TrainState, build_state

STEPS = ("train.steps=800", "train.checkpoint_every=2", "validation.every=6", "data.repeat=true")
# When to kill: while the process starts, at a random moment of its work, or while a checkpoint is written or removed.
MOMENTS = ("start", "work", "save", "save") * 6


def train_in_child(words: list[str]) -> None:
    raise SystemExit(run(train.main, words))


def starts_of(folder: Path) -> list[int]:
    """The steps that the run was started from, in order."""
    log = folder / "run" / "log.txt"
    return [int(step) for step in re.findall(r"steps (\d+) to 800", log.read_text())] if log.exists() else []


def wait(until: Callable[[], bool], alive: Callable[[], bool]) -> None:
    while alive() and not until():
        time.sleep(0.0002)


def train_and_kill(folder: Path, moment: str, dice: random.Random) -> str:
    """Starts the run and kills it; tells whether that hit it in a save, outside one, or too late."""
    checkpoints, starts = folder / "run" / "checkpoints", len(starts_of(folder))
    child = start(train_in_child, tiny_words(folder, *STEPS), out=folder / "said.txt", environment={})
    if moment == "start":
        time.sleep(dice.uniform(0, 0.6))
    else:
        wait(lambda: len(starts_of(folder)) > starts, child.is_alive)
    if moment == "work":
        time.sleep(dice.uniform(0, 0.3))
    if moment == "save":
        for _ in range(dice.randrange(1, 4)):
            wait(lambda: not any(checkpoints.glob("*.partial")), child.is_alive)
            wait(lambda: any(checkpoints.glob("*.partial")), child.is_alive)
        time.sleep(dice.uniform(0, 0.002))
    if not child.is_alive():
        return "too late"
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    return "in a save" if any(checkpoints.glob("*.partial")) else "outside"


def check_whole(folder: Path, state: TrainState) -> None:
    """Every checkpoint loads, and no line of metrics.jsonl but the last is torn or there twice."""
    for checkpoint in list_checkpoints(folder / "run"):
        restore_checkpoint(checkpoint, state)
    lines = read_metrics_lines(folder / "run" / "metrics.jsonl")
    kinds = [(line["step"], "train/loss" in line) for line in lines]
    assert len(kinds) == len(set(kinds))
    assert [step for step, _ in kinds] == sorted(step for step, _ in kinds)


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_if_it_never_was(tmp_path: Path):
    for name in ("killed", "whole"):
        write_tiny_data(tmp_path / name / "data")
    assert run(train.main, tiny_words(tmp_path / "whole", *STEPS)) == 0
    folder, dice = tmp_path / "killed", random.Random(0)
    state = build_state(tiny_config(folder, *STEPS))
    hits: Counter[str] = Counter()
    for moment in MOMENTS:
        before, starts = latest_checkpoint(folder / "run"), starts_of(folder)
        hits[train_and_kill(folder, moment, dice)] += 1
        check_whole(folder, state)
        # it went on from the newest checkpoint, so no more than the steps after that one were done twice
        assert starts_of(folder)[len(starts) :] in ([], [checkpoint_step(before) if before else 0])
    assert hits["in a save"] + hits["outside"] >= 20
    assert hits["in a save"] >= 5
    assert run(train.main, tiny_words(folder, *STEPS)) == 0
    assert metrics_of(folder) == metrics_of(tmp_path / "whole")
    assert last_checkpoint(folder / "run") == last_checkpoint(tmp_path / "whole" / "run")
    assert not list((folder / "run" / "checkpoints").glob("*.partial"))
