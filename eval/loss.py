"""Validation loss by sequence length: the same tokens at each length, summed over tokens and divided once."""

from collections.abc import Sequence

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
) -> dict[int, float]:
    """Mean cross-entropy in nats per token over the first `n_tokens` of the stream, cut into sequences of each length.

    The sequences are shared out over the processes. The output layer and the cross-entropy are taken in chunks, and at
    least one sequence is fed at a time, so memory grows with the longest length and not with the vocabulary.

    Raises ValueError when a length does not divide `n_tokens`, or the stream is too short.
    """
    total_tokens = len(lengths) * n_tokens // process.world_size
    with tqdm(total=total_tokens, unit="tok", unit_scale=True, leave=False, disable=None if progress else True) as bar:
        losses = {}
        for length in lengths:
            bar.set_description(f"loss at {length}")
            # fp64: a sum of millions of losses keeps its last digits, in any order
            total = torch.zeros((), dtype=torch.float64, device=process.device)
            rows = max(1, micro_batch_tokens // length)
            for tokens, targets in validation_batches(stream, length, n_tokens, rows, process.rank, process.world_size):
                with process.autocast():
                    total += model(tokens.to(process.device), targets.to(process.device), reduction="sum").double()
                bar.update(tokens.numel())
            losses[int(length)] = process.sum(total).item() / n_tokens
    return losses
