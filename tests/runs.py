"""What two runs that should be the same are compared by."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from training.checkpoint import load_weights
from training.checkpoint_folder import list_checkpoints

MEASURED = ("train/tokens_per_second", "train/memory_bytes")


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Every line of folder/run/metrics.jsonl, without the numbers that depend on the machine."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


def last_checkpoint(run_dir: Path) -> dict[str, Any]:
    """Every value of the newest checkpoint but its config, by name, tensors as the bytes that they consist of."""
    folder = list_checkpoints(run_dir)[-1]
    values: dict[str, Any] = {"folder": folder.name}

    def walk(node: Any, name: str) -> None:
        if isinstance(node, dict | list | tuple):
            for key, child in node.items() if isinstance(node, dict) else enumerate(node):
                walk(child, f"{name}.{key}")
        else:
            values[name] = node.numpy().tobytes() if isinstance(node, torch.Tensor) else node

    walk(load_weights(folder), "model")
    rest = torch.load(folder / "training.pt", weights_only=True)
    walk({key: value for key, value in rest.items() if key != "config"}, "training")
    return values


def assert_same_losses(a: list[dict[str, Any]], b: list[dict[str, Any]], tolerance: float) -> None:
    assert [line.keys() for line in a] == [line.keys() for line in b]
    for one, other in zip(a, b, strict=True):
        for key in one:
            relative = 1e-2 if key == "train/grad_norm" else 0
            assert one[key] == pytest.approx(other[key], abs=tolerance, rel=relative), (key, one["step"])
