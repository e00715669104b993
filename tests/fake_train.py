"""A small script in the place of train.py, for what starts runs and looks after them, and the runs that it trains.

As a script it does what its run's row says, as train.py would: appends metrics, saves the last checkpoint at the end.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the script is to start fast
    from eval.experiment import Run

STEPS = 20


def make_runs(*rows: str) -> list["Run"]:
    """Runs of the given rows in the working directory."""
    from eval.experiment import Run

    config = {"train": {"steps": STEPS, "tokens_per_step": 10}, "validation": {"lengths": [256]}, "device": "cpu"}
    return [Run(row, 0, {"position": row}, (), Path("runs", f"{row}-seed0"), config) for row in rows]


def fake_train(run: "Run") -> list[str]:
    """The command that pretends to train a run."""
    return [sys.executable, "-S", __file__, str(run.run_dir)]


def starts(run: "Run") -> int:
    """How often it was started."""
    path = run.run_dir / "starts"
    return len(path.read_text().split()) if path.exists() else 0


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in four minutes"
        time.sleep(0.02)


def main(run_dir: Path) -> None:
    row = run_dir.name.rpartition("-")[0]
    with (run_dir / "starts").open("a") as file:
        file.write("start\n")
    (run_dir / "config.yaml").write_text("seed: 0\n")
    if row == "fails":
        print(*[f"line {n}" for n in range(100)], "the reason", sep="\n")
        print("E1130 12:00:00.123 77 /x/torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1)")
        print(*["torchrun's own words"] * 40, sep="\n")
        sys.exit(3)
    if row == "fails_once" and (run_dir / "starts").read_text().count("start") == 1:
        sys.exit(3)
    if row == "sleeps":
        (run_dir / "pid").write_text(str(os.getpid()))
        time.sleep(60)
    if row in ("left", "right"):  # each waits until the other one is there too
        other = run_dir.parent / {"left": "right-seed0", "right": "left-seed0"}[row] / "starts"
        while not other.exists():
            time.sleep(0.01)
    with (run_dir / "metrics.jsonl").open("w") as metrics:
        for step in range(1, STEPS + 1):
            time.sleep(0.04 if row == "slow" else 0)
            line = {"step": step, "tokens": 10 * step, "train/loss": 5 / step, "train/tokens_per_second": 100.0}
            print(json.dumps(line), file=metrics, flush=True)
        print(json.dumps({"step": STEPS, "tokens": 10 * STEPS, "val/loss_256": 1.5}), file=metrics)
    if row != "forgets":
        (run_dir / "checkpoints" / f"step_{STEPS:06d}").mkdir(parents=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
