"""How attention spreads over ranges of distances (arXiv:2505.17083, definitions 3.1 to 3.3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from model.position import Plan, PositionScheme, build_position


@dataclass(frozen=True)
class RangeStatistics:
    """Of the logits L over the distances of each range, in nats.

    log_total = log Z, Z = sum exp(L); entropy = log Z - N/Z, N = sum exp(L) L, is that of the attention inside a range.
    """

    log_total: Float[Tensor, "*rows ranges"]
    entropy: Float[Tensor, "*rows ranges"]

    def share(self) -> Float[Tensor, "*rows ranges"]:
        """Of all attention to the given ranges together."""
        return self.log_total.softmax(-1)


def range_statistics(logits: Float[Tensor, "*rows T"], edges: Sequence[int]) -> RangeStatistics:
    """Range r holds the entries edges[r] to edges[r+1] - 1 of the last dimension. Works in fp64.

    Raises ValueError unless the edges rise within 0 .. T.
    """
    if any(a >= b for a, b in pairwise(edges)) or not 0 <= edges[0] < edges[-1] <= logits.shape[-1]:
        raise ValueError(f"edges={list(edges)} must rise from at least 0 to at most {logits.shape[-1]}")
    totals, entropies = [], []
    for start, stop in pairwise(edges):
        part = logits[..., start:stop].double()
        log_z = part.logsumexp(-1)
        totals.append(log_z)
        entropies.append(log_z - ((part - log_z[..., None]).exp() * part).sum(-1))
    return RangeStatistics(torch.stack(totals, -1), torch.stack(entropies, -1))


def iid_logits(
    scheme: PositionScheme, start: int, stop: int, length: int, draws: int, generator: torch.Generator, n_head: int = 1
) -> Float[Tensor, "rows keys"]:
    """Logits of the last of `length` queries at the distances start .. stop - 1, over scores S ~ N(0, 1), in fp64.

    L = scale[h,t] s[h] S + shift[h,t]; every head of the scheme has a row of its own in every draw.
    """
    scores = torch.randn(draws, n_head, stop - start, generator=generator, dtype=torch.float64)
    return logits_by_distance(scores, scheme.plan(length, start=length - 1), 0, start).flatten(0, 1)


def logits_by_distance(
    scores: Float[Tensor, "*draws h N"], plan: Plan, query: int, start: int = 0
) -> Float[Tensor, "*draws h N"]:
    """Logits of one query at the distances start .. start + N - 1 over its scores S = <R_i q_i, R_j k_j> / sqrt(d).

    L = scale[t] s temperature S + shift[t], in fp64; `query` is its row in the plan, which has one layer.
    """
    stop = start + scores.shape[-1]
    logits = scores.double() * plan.temperature
    if plan.query_scale is not None:
        logits *= plan.query_scale[0, :, query, None]
    if plan.transform is not None and plan.transform.scale is not None:
        logits *= plan.transform.scale[:, start:stop]
    if plan.transform is not None and plan.transform.shift is not None:
        logits += plan.transform.shift[:, start:stop]
    return logits


def without_vectors(position: Mapping[str, Any], n_head: int = 1) -> PositionScheme:
    """A scheme for logits without vectors: of its slots only the query scale and the logits matter."""
    return build_position(position, head_dim=2, n_head=n_head, train_length=1).requires_grad_(False)
