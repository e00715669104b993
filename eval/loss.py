"""Validation loss by sequence length: the same tokens at each length, summed over tokens and divided once."""

import math
from collections.abc import Callable, Sequence

import torch
from tqdm import tqdm

from data.loader import TokenStream, validation_batches
from model.gpt import GPT
from training.distributed import Process


@torch.no_grad()
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
    total_tokens = len(lengths) * n_tokens // process.world_size
    with tqdm(total=total_tokens, unit="tok", unit_scale=True, leave=False, disable=None if progress else True) as bar:
        losses = {}
        for length in lengths:
            bar.set_description(f"loss at {length}")
            rows = max(1, micro_batch_tokens // length)
            mine = validation_batches(stream, length, n_tokens, rows, process.rank, process.world_size)
            sums = torch.zeros(n_tokens // length, dtype=torch.float64, device=process.device)
            for first in range(0, len(sums), rows * process.world_size):
                between()
                if (batch := next(mine, None)) is None:  # the last round may have fewer batches than processes
                    continue
                tokens, targets = (x.to(process.device) for x in batch)
                with process.autocast():
                    by_token = model(tokens, targets, reduction="none")
                start = first + process.rank * rows
                sums[start : start + len(tokens)] = by_token.sum(dim=1, dtype=torch.float64)
                bar.update(tokens.numel())
            # a sequence is zero on all processes but one, so their sum is exact
            losses[int(length)] = math.fsum(process.sum(sums).tolist()) / n_tokens
    return losses
