"""What train.py hands on to the loader."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from data.loader import SHUFFLED_BLOCK, TrainBatches, open_split
from tests.tiny_run import tiny_config, write_tiny_data
from training.distributed import Process


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What TrainBatches is called with, memory that only a GPU's driver can lock left out."""
    calls: list[dict[str, Any]] = []

    def batches(*args: Any, pin_memory: bool) -> TrainBatches:
        calls.append({"pin_memory": pin_memory})
        return TrainBatches(*args)

    monkeypatch.setattr(train, "TrainBatches", batches)
    return calls


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_for_a_gpu_lie_in_page_locked_memory(tmp_path: Path, given: list[dict[str, Any]], device: str):
    write_tiny_data(tmp_path / "data")
    process = Process(rank=0, world_size=1, device=torch.device(device), precision="fp32")
    train.open_data(tiny_config(tmp_path), process)
    assert given == [{"pin_memory": device == "cuda"}]


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_a_shuffle_seed_orders_the_blocks_of_a_run(tmp_path: Path, rank: int, world_size: int):
    write_tiny_data(tmp_path / "data", train=16 * SHUFFLED_BLOCK)
    process = Process(rank=rank, world_size=world_size, device=torch.device("cpu"), precision="fp32")
    stream = open_split(tmp_path / "data", "train")
    orders: list[torch.Tensor] = []
    for seed in (None, 1, 2):
        words = [] if seed is None else [f"data.shuffle_seed={seed}"]
        batches, _ = train.open_data(tiny_config(tmp_path, *words), process)
        expected = TrainBatches(stream, 256, 32, rank, world_size, shuffle_seed=seed)
        rows, wanted = (torch.cat([x.batch(step)[0] for step in (0, 256, 512)]) for x in (batches, expected))
        assert rows.equal(wanted)  # of three blocks
        orders.append(rows)
    assert not any(a.equal(b) for a, b in combinations(orders, 2))
