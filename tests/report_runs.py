"""Run directories for the tests of the report, written by hand, with round numbers."""

import json
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tests.tiny_run import tiny_config
from training.run_config import write_config

STEPS = 40


@cache
def composed(*words: str) -> dict[str, Any]:
    """A tiny config; kept, because composing takes its time."""
    config = OmegaConf.to_container(tiny_config(Path("tiny"), f"train.steps={STEPS}", *words))
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def write_report_run(
    run_dir: Path, losses: dict[int, float], *words: str, seed: int = 0, steps: int = STEPS, **settings: Any
) -> Path:
    """A run of 40 steps that has made `steps` of them and ends at `losses` by length; `settings` go into the config."""
    config = {**composed(f"validation.lengths={list(losses)}", *words), "seed": seed, "run_dir": str(run_dir)}
    write_config(run_dir, OmegaConf.create({**config, **settings}))
    lines = []
    for step in range(steps + 1):
        line: dict[str, Any] = {"step": step, "tokens": 256 * step}
        if step:
            line |= {"train/loss": 5 - step / 20, "train/lr_scale": 1.0, "train/grad_norm": 1.0}
            line |= {"train/tokens_per_second": 1000.0 + step, "train/memory_bytes": 2e9}
        if step % 10 == 0:
            line |= {f"val/loss_{length}": loss + (steps - step) / 10 for length, loss in losses.items()}
        lines.append(line)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    started = f"2026-01-02 03:04:05 proxy (1,234 parameters), rope, 32 tokens a sequence: steps 0 to {STEPS} of 256 "
    started += "tokens on 2 x cuda in bf16, 3 forward passes a step\n"
    started += "2026-01-02 03:04:05 on A GPU, 8 cores, 4 threads of AVX2, torch 2.13.0, Python 3.11.7, commit abc\n"
    (run_dir / "log.txt").write_text(f"{started}2026-01-02 03:05:06 step {steps}/{STEPS}\n")
    (run_dir / "checkpoints" / f"step_{steps:06d}").mkdir(parents=True)
    return run_dir


def write_evaluation(run_dir: Path, losses: dict[int, float]) -> None:
    """eval.json with the losses, and by position a tenth less with each doubling."""
    by_position = {}
    for length, loss in losses.items():
        edges = [0, *(2**k for k in range(length.bit_length()))]
        means = [loss - k / 10 for k in range(len(edges) - 1)]
        by_position[str(length)] = {"edges": edges, "mean": means, "tokens": [100] * len(means)}
    loss = {str(length): {"mean": value, "tokens": 1024} for length, value in losses.items()}
    document = {"loss": loss, "by_position": by_position, "step": STEPS}
    (run_dir / "eval.json").write_text(json.dumps(document))


def write_needles(run_dir: Path, accuracies: dict[int, float]) -> None:
    """needle.json, in which the first half of the depths is always found, and no needle lay in the last part."""
    accuracy = {}
    for length, mean in accuracies.items():
        parts = [{"from": k / 10, "to": (k + 1) / 10, "mean": 1.0 if k < 5 else 0.25, "needles": 3} for k in range(10)]
        parts[-1] |= {"mean": None, "needles": 0}
        accuracy[str(length)] = {"mean": mean, "stderr": 0.1, "needles": 30, "by_depth": parts}
    (run_dir / "needle.json").write_text(json.dumps({"accuracy": accuracy, "run_dir": str(run_dir)}))


def png(width: int = 3, height: int = 2) -> bytes:
    """A grey picture."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\x80" * width) * height)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
