"""Attention as its definition, with all T x T logits at once: the oracle of the tests."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from model.attend.transform import Transform


def dense(
    q: Float[Tensor, "B H Tq d"],
    k: Float[Tensor, "B H Tk d"],
    v: Float[Tensor, "B H Tk d"],
    transform: Transform | None = None,
) -> Float[Tensor, "B H Tq d"]:
    """Causal attention in fp32 (fp64 for fp64), differentiated by autograd; O(Tq Tk) memory.

    out[h,i] = sum_j softmax_{j<=i}(scale[h,t] <q_i, k_j> / sqrt(d) + shift[h,t]) v_j,    t = i - j,
    where row r of q stands at position i = Tk - Tq + r. Returns the dtype of q.
    """
    precise = torch.promote_types(q.dtype, torch.float32)
    n_query, n_key = q.shape[-2], k.shape[-2]
    key = torch.arange(n_key, device=q.device)
    distance = key[n_key - n_query :, None] - key
    logits = q.to(precise) @ k.to(precise).mT / math.sqrt(q.shape[-1])
    if transform is not None and transform.scale is not None:
        logits = logits * transform.scale.to(precise)[:, distance.clamp(min=0)]
    if transform is not None and transform.shift is not None:
        logits = logits + transform.shift.to(precise)[:, distance.clamp(min=0)]
    weights = logits.masked_fill(distance < 0, -math.inf).softmax(-1)
    return (weights @ v.to(precise)).to(q.dtype)
