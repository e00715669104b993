"""The smallest training run that is still a real one: 1 layer, width 32, 264 ids, 256 tokens a step."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from configs.command import compose
from data.shards import write_shard

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 264
SIZES = (
    *("model=proxy", "model.n_layer=1", "model.width=32", "model.n_head=2", "data=custom"),
    *("train.length=32", "train.tokens_per_step=256", "train.steps=12", "train.checkpoint_every=4"),
    *("validation.lengths=[32,64]", "validation.tokens=1024", "validation.every=4"),
    *("device=cpu", "precision=fp32"),  # the same on every machine
)


def write_tiny_data(folder: Path, train: int = 4000, val: int = 1500) -> Path:
    """Two shards of a learnable sequence (each id is the last one plus a small step) in a folder without a manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.cumsum(np.random.default_rng(0).integers(1, 4, train + val)) % 257
    write_shard(folder / "tiny_train_000001.bin", ids[:train])
    write_shard(folder / "tiny_val_000000.bin", ids[train:])
    return folder


def tiny_words(folder: Path, *more: str) -> list[str]:
    """The arguments of train.py for a run in `folder`/run on the data in `folder`/data; later words win."""
    return [*SIZES, f"data.dir={folder / 'data'}", f"run_dir={folder / 'run'}", *more]


def tiny_config(folder: Path, *more: str) -> Any:
    return compose("train", tiny_words(folder, *more))


def run(main: Callable[[], None], words: list[str]) -> int:
    """A command in this process, as if typed; gives its exit code, and leaves the signal handlers as they were."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with patch.object(sys, "argv", ["command", *words]):
            main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def refusal(main: Callable[[], None], words: list[str], capsys: Any) -> str:
    """The one line on stderr with which a command refuses its arguments, exit code 2."""
    capsys.readouterr()
    code = run(main, words)
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def listing(folder: Path) -> dict[str, bytes]:
    """Every file under `folder`, by relative name, with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
