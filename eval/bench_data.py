"""The loader's speed: batches of a training run made from a warm page cache, and nothing done with them."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from data.cores import available_cores
from data.loader import SHUFFLED_BLOCK, TokenStream, TrainBatches, open_split
from data.shards import count_tokens, read_shard, write_shard
from eval.timing import compare
from training.environment import machine

VOCAB_SIZE = 50257
CPU = torch.device("cpu")


def bench_data(config: Any) -> dict[str, Any]:
    """Measures three readers at each row length; `{"machine": {...}, "rows": [...]}`.

    `plain` is what a short training script does: a slice of a memory-mapped shard, converted to int64 once for the
    tokens and once for the targets. `loader` and `loader shuffled` are `TrainBatches`, with the check of every id
    against the vocabulary and the thread; the latter is left out where there are no two blocks to shuffle, or the
    length does not divide one. A row has the `seconds` of a pass, `tokens_per_second`, `peak_bytes`, and its
    `ratio` to `plain`.

    Raises ValueError, before any measurement, for a key that can't be served.
    """
    for key in ("tokens", "tokens_per_step", "repeats", "threads"):
        if config[key] is not None and config[key] < 1:
            raise ValueError(f"{key}={config[key]} must be at least 1")
    if config.tokens <= config.tokens_per_step:
        raise ValueError(f"tokens={config.tokens} must be more than tokens_per_step={config.tokens_per_step}")
    for length in config.lengths:
        if length < 1 or config.tokens_per_step % length:
            raise ValueError(
                f"lengths={list(config.lengths)}: {length} must divide tokens_per_step={config.tokens_per_step}; "
                "change one of them"
            )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with tempfile.TemporaryDirectory() as temporary:
        if config.dir is None:
            stream = TokenStream([_random_shard(Path(temporary), config.tokens)], VOCAB_SIZE)
        else:
            stream = TokenStream(open_split(config.dir, "train", key="dir").paths[:1])
        rows = []
        cases = [(length, _readers(stream, config, length)) for length in config.lengths]
        for length, readers in tqdm(cases, desc="lengths", disable=None):
            rows += _measure(readers, config, length, _n_steps(stream, config))
    return {"machine": {**machine(CPU), "cores_available": available_cores()}, "rows": rows}


def _measure(readers: dict[str, Callable[[], object]], config: Any, length: int, n_steps: int) -> list[dict[str, Any]]:
    tokens = n_steps * config.tokens_per_step
    return [
        {
            "name": f"{name} S={config.tokens_per_step} T={length}",
            "reader": name,
            "length": length,
            "tokens_per_step": config.tokens_per_step,
            "tokens": tokens,
            **measured,
            "tokens_per_second": tokens / measured["seconds"],
        }
        for name, measured in compare(readers, "plain", config.repeats, CPU).items()
    ]


def _readers(stream: TokenStream, config: Any, length: int) -> dict[str, Callable[[], object]]:
    """A pass of each reader over the first shard. Raises ValueError where that is shorter than a step."""
    per_step, n_steps = config.tokens_per_step, _n_steps(stream, config)
    if len(stream) <= per_step:
        raise ValueError(
            f"tokens_per_step={per_step} needs one token more than that, but {stream.paths[0]} has {len(stream)}; "
            "use a lower tokens_per_step, or more data"
        )
    ids = read_shard(stream.paths[0])

    def plain() -> None:
        for start in range(0, n_steps * per_step, per_step):
            for first in (start, start + 1):  # tokens, then targets
                torch.from_numpy(ids[first : first + per_step].astype(np.int64)).view(-1, length)

    def passes(batches: TrainBatches) -> Callable[[], None]:
        def run() -> None:
            for step in range(n_steps):
                batches.batch(step)

        return run

    readers: dict[str, Callable[[], object]] = {
        "plain": plain,
        "loader": passes(TrainBatches(stream, per_step, length)),
    }
    if SHUFFLED_BLOCK % length == 0 and len(stream) >= 2 * SHUFFLED_BLOCK:
        readers["loader shuffled"] = passes(TrainBatches(stream, per_step, length, shuffle_seed=0))
    return readers


def _n_steps(stream: TokenStream, config: Any) -> int:
    return max(1, (min(config.tokens, count_tokens(stream.paths[0])) - 1) // config.tokens_per_step)


def _random_shard(folder: Path, n_tokens: int) -> Path:
    path = folder / "random_train_000001.bin"
    write_shard(path, np.random.default_rng(0).integers(0, VOCAB_SIZE, n_tokens, dtype=np.uint16))
    return path
