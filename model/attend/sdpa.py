"""Torch's fused attention: every scheme that leaves the logits alone."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model.attend.transform import Transform

_MASK_ELEMENTS = 1 << 22


def sdpa(
    q: Float[Tensor, "B H Tq d"],
    k: Float[Tensor, "B H Tk d"],
    v: Float[Tensor, "B H Tk d"],
    transform: Transform | None = None,
) -> Float[Tensor, "B H Tq d"]:
    """Causal attention without a transform; row r of q stands at position Tk - Tq + r.

    As many queries as keys use the fused causal kernel, a single query needs no mask. In between, torch would
    put its lower-right causal mask of Tq x Tk into memory (always on a CPU), so the queries go in blocks of rows, each
    with an explicit mask of at most 4M entries and with only the keys that it sees.

    There must be no transform: the fused kernel has no place for it.
    """
    assert transform is None
    n_query, n_key = q.shape[-2], k.shape[-2]
    if n_query == n_key:
        return scaled_dot_product_attention(q, k, v, is_causal=True)
    if n_query == 1:
        return scaled_dot_product_attention(q, k, v)
    rows = max(1, _MASK_ELEMENTS // n_key)
    key = torch.arange(n_key, device=q.device)
    blocks = []
    for start in range(0, n_query, rows):
        stop = min(start + rows, n_query)
        seen = n_key - n_query + stop
        mask = key[seen - (stop - start) : seen, None] >= key[:seen]
        blocks.append(
            scaled_dot_product_attention(q[..., start:stop, :], k[..., :seen, :], v[..., :seen, :], attn_mask=mask)
        )
    return torch.cat(blocks, dim=-2)
