"""Validation loss by sequence length and by position: the same tokens at each length, summed and divided once.

A position is that of the predicted token's last input, so that at position p the model sees p + 1 tokens. Whether a
scheme loses at its sequences' beginnings or ends, the loss by length alone does not tell.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data.loader import TokenStream, validation_batches
from model.gpt import GPT
from training.distributed import Process


@dataclass(frozen=True)
class PositionLoss:
    """Mean cross-entropy in nats over the positions [edges[k], edges[k + 1]), and over how many tokens."""

    edges: list[int]
    mean: list[float]
    tokens: list[int]


def loss_by_length(
    model: GPT,
    stream: TokenStream,
    lengths: Sequence[int],
    n_tokens: int,
    process: Process,
    micro_batch_tokens: int = 65536,
    progress: bool = False,
    between: Callable[[], None] = lambda: None,
) -> dict[int, float]:
    """Mean cross-entropy in nats per token over the first `n_tokens` of the stream, cut into sequences of each length.

    The batches are shared out over the processes, and the same whatever their number. Each sequence is summed in fp64,
    and the sums are added in the order of the stream, so any number of processes gives the same loss bit for bit. The
    output layer and the cross-entropy are taken in chunks, and at least one sequence is fed at a time, so memory grows
    with the longest length and not with the vocabulary.

    Args:
        between: is called before each batch, equally often on every process; what it raises ends the evaluation.

    Raises ValueError when a length does not divide `n_tokens`, or the stream is too short.
    """
    whole = {int(length): [(0, int(length))] for length in lengths}
    sums = _sums(model, stream, whole, n_tokens, process, micro_batch_tokens, progress, between)
    return {length: total / n_tokens for length, (total,) in sums.items()}


def loss_by_length_and_position(
    model: GPT, stream: TokenStream, lengths: Sequence[int], n_tokens: int, process: Process, **settings: Any
) -> tuple[dict[int, float], dict[int, PositionLoss]]:
    """`loss_by_length`, bit for bit, and from the same forward passes the loss by position at each length.

    Each range of positions is summed as a whole sequence is, so these too do not depend on the number of processes.
    """
    edges = {int(length): position_edges(int(length)) for length in lengths}
    parts = {length: [(0, length), *pairwise(of_length)] for length, of_length in edges.items()}
    sums = _sums(model, stream, parts, n_tokens, process, **settings)
    by_position = {}
    for length, (_, *totals) in sums.items():
        tokens = [(end - start) * (n_tokens // length) for start, end in pairwise(edges[length])]
        mean = [total / count for total, count in zip(totals, tokens, strict=True)]
        by_position[length] = PositionLoss(edges[length], mean, tokens)
    return {length: total / n_tokens for length, (total, *_) in sums.items()}, by_position


def position_edges(length: int) -> list[int]:
    """0, the powers of two below `length`, and `length`: position 0, 1, 2-3, 4-7, ... (of 6: 0, 1, 2, 4, 6)."""
    return [0, *(2**k for k in range((length - 1).bit_length())), length]


@torch.no_grad()
def _sums(
    model: GPT,
    stream: TokenStream,
    parts: Mapping[int, Sequence[tuple[int, int]]],
    n_tokens: int,
    process: Process,
    micro_batch_tokens: int = 65536,
    progress: bool = False,
    between: Callable[[], None] = lambda: None,
) -> dict[int, list[float]]:
    """The summed cross-entropy at each length, over the positions [start, end) of each of its `parts`."""
    total_tokens = len(parts) * n_tokens // process.world_size
    with tqdm(total=total_tokens, unit="tok", unit_scale=True, leave=False, disable=None if progress else True) as bar:
        totals = {}
        for length, of_length in parts.items():
            bar.set_description(f"loss at {length}")
            rows = max(1, micro_batch_tokens // length)
            mine = validation_batches(stream, length, n_tokens, rows, process.rank, process.world_size)
            sums = torch.zeros(len(of_length), n_tokens // length, dtype=torch.float64, device=process.device)
            for first in range(0, sums.shape[1], rows * process.world_size):
                between()
                if (batch := next(mine, None)) is None:  # the last round may have fewer batches than processes
                    continue
                tokens, targets = (x.to(process.device) for x in batch)
                with process.autocast():
                    by_token = model(tokens, targets, reduction="none")
                start = first + process.rank * rows
                _add_up(by_token, of_length, sums[:, start : start + len(tokens)])
                bar.update(tokens.numel())
            # a sequence is zero on all processes but one, so their sum is exact
            totals[length] = [math.fsum(part) for part in process.sum(sums).tolist()]
    return totals


def _add_up(by_token: Tensor, parts: Sequence[tuple[int, int]], sums: Tensor) -> None:
    """sums[k, row] = the row's loss over the positions of part k."""
    for (start, end), of_part in zip(parts, sums, strict=True):
        of_part.copy_(by_token[:, start:end].sum(dim=1, dtype=torch.float64))
