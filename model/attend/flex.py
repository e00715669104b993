"""FlexAttention with the transform as its score modification: the GPU path of the schemes with a `logits` slot.

Compiled once for each bucket of lengths: a sequence is filled up at its end to the next 128 * 2^k or 384 * 2^k tokens,
which no real query sees, so that many lengths need few compilations. Without gradients the rows are filled up, too, to
a power of two: those that a validation has left at its end, or prompts generated from together. Scale and shift are
looked up in their tables, or, as `flex_closed_form`, computed anew for every logit: which is faster on a GPU is still
to be measured.
"""

from functools import lru_cache

import torch
import torch._dynamo
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from model.attend.transform import Formula, Transform

BLOCK = 128
# Past its limit of 8, dynamo would go on in eager mode, T x T in memory and many times slower. Raise instead.
_COMPILE_LIMITS = {"recompile_limit": 256, "fail_on_recompile_limit_hit": True}


@torch.compiler.disable
def flex(
    q: Float[Tensor, "B H Tq d"],
    k: Float[Tensor, "B H Tk d"],
    v: Float[Tensor, "B H Tk d"],
    transform: Transform | None = None,
) -> Float[Tensor, "B H Tq d"]:
    """Causal attention whose logits are scaled and shifted by distance, in one fused kernel.

        out[h,i] = sum_j softmax_{j<=i}(scale[h,t] <q_i, k_j> / sqrt(d) + shift[h,t]) v_j,    t = i - j

    Logits, tables and softmax are fp32. Differentiable in q, k, v and the tables, on CUDA.

    Raises ValueError for what the kernel can't serve: fewer queries than keys, fp64, and gradients on a CPU.
    """
    if reason := unsupported(q, k, v, transform):
        raise ValueError(f"attention=flex can't serve this: {reason}; use blockwise")
    length = q.shape[2]
    scale, shift = (
        None if table is None else pad(table[:, :length], (0, bucket(length) - length))
        for table in ((None, None) if transform is None else (transform.scale, transform.shift))
    )
    return _run(q, k, v, scale, shift, None)


@torch.compiler.disable
def flex_closed_form(
    q: Float[Tensor, "B H Tq d"],
    k: Float[Tensor, "B H Tk d"],
    v: Float[Tensor, "B H Tk d"],
    transform: Transform | None = None,
) -> Float[Tensor, "B H Tq d"]:
    """The same as `flex`, with scale and shift computed by the transform's formula in fp32.

    The transform must have a formula. Raises ValueError as `flex` does.
    """
    if reason := unsupported(q, k, v, transform):
        raise ValueError(f"attention=flex_closed_form can't serve this: {reason}; use flex or blockwise")
    return _run(q, k, v, None, None, None if transform is None else transform.formula)


def _run(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None, shift: Tensor | None, formula: Formula | None
) -> Tensor:
    """Fills up to a bucket, attends with the compiled kernel, cuts off."""
    rows, length = q.shape[0], q.shape[2]
    more_rows = 0 if torch.is_grad_enabled() else (1 << (rows - 1).bit_length()) - rows
    filled = bucket(length)
    q, k, v = (pad(x, (0, 0, 0, filled - length, 0, 0, 0, more_rows)) for x in (q, k, v))
    with torch._dynamo.config.patch(_COMPILE_LIMITS):
        return _compiled()(q, k, v, causal_block_mask(filled, q.device), scale, shift, formula)[:rows, :, :length]


def unsupported(q: Tensor, k: Tensor, v: Tensor, transform: Transform | None) -> str | None:
    """Why the kernel can't serve these arguments; None if it can."""
    tables = [] if transform is None else [transform.scale, transform.shift]
    if q.shape[2] != k.shape[2]:
        return f"{q.shape[2]} queries for {k.shape[2]} keys"
    if q.dtype == torch.float64:
        return "fp64 activations"
    if q.shape[3] < 16 or q.shape[3] & (q.shape[3] - 1):
        return f"a head dimension of {q.shape[3]}, which is not a power of two from 16 on"
    wants_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, *tables))
    if q.device.type == "cpu" and wants_gradient:
        return "gradients on a CPU"
    return None


def bucket(length: int) -> int:
    """The next length of the form 128 * 2^k or 384 * 2^k."""
    size = BLOCK
    while size < length:
        if size >= 2 * BLOCK and length <= size * 3 // 2:
            return size * 3 // 2
        size *= 2
    return size


@lru_cache(maxsize=16)
def causal_block_mask(length: int, device: torch.device) -> BlockMask:
    """Row block r sees the blocks before it whole and itself in part: (length / 128)^2 indices, never T x T."""
    blocks = length // BLOCK
    row = torch.arange(blocks, dtype=torch.int32, device=device)
    whole = row.expand(1, 1, blocks, blocks).contiguous()
    itself = whole.roll(1, dims=-1).clone()
    itself[..., 0] = row
    return BlockMask.from_kv_blocks(
        kv_num_blocks=torch.ones(1, 1, blocks, dtype=torch.int32, device=device),
        kv_indices=itself,
        full_kv_num_blocks=row.expand(1, 1, blocks).contiguous(),
        full_kv_indices=whole,
        BLOCK_SIZE=BLOCK,
        mask_mod=_causal,
        seq_lengths=(length, length),
    )


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


@lru_cache(maxsize=1)
def _compiled():
    return torch.compile(_attend, dynamic=False)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    scale: Tensor | None,
    shift: Tensor | None,
    formula: Formula | None,
) -> Tensor:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        t = (i - j).clamp(min=0)  # the masked side of a block on the diagonal is computed too
        if formula is None:
            factor, addend = (None if table is None else table[_row(table, h), t] for table in (scale, shift))
        else:
            factor, addend = formula.function(t, *(parameter[_row(parameter, h)] for parameter in formula.parameters))
        score = score if factor is None else score * factor
        return score if addend is None else score + addend

    out = flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)
    assert isinstance(out, Tensor)
    return out


def _row(values: Tensor, h: Tensor) -> Tensor | int:
    """Of a head, in what has one row a head or one for all."""
    return h if values.shape[0] > 1 else 0
