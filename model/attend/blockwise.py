"""Row-strip attention with scale and shift by distance: O(T x block) memory, forward and backward.

The one idea: flip keys and values along time. In a strip of R query rows that see C keys, row r and flipped
column c are then at distance t = r + c - (R - 1), a function of r + c alone. So scale and shift of a whole
strip are strided views (strides 1, 1) of one 1-D table, without a copy, and R - 1 entries in front of distance 0,
scale 0 and shift -inf, are the causal mask. A strip holds complete rows: its softmax is the plain
one, and the backward pass needs only q, k and v to make it again.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from model.attend.transform import Transform

_ROWS = 128  # of a strip; half of it up to 1024 keys, where the masked triangle weighs more than the calls
_KEYS = 8192  # of the heads of a strip together: it should stay in the cache


@torch.compiler.disable  # dynamo would unroll the strips
def blockwise(
    q: Float[Tensor, "B H Tq d"],
    k: Float[Tensor, "B H Tk d"],
    v: Float[Tensor, "B H Tk d"],
    transform: Transform | None = None,
) -> Float[Tensor, "B H Tq d"]:
    """Causal attention with a transform, exact, with O(Tk) logits in memory instead of Tq x Tk.

        out[h,i] = sum_j softmax_{j<=i}(scale[h,t] <q_i, k_j> / sqrt(d) + shift[h,t]) v_j,    t = i - j

    Row r of q stands at position i = Tk - Tq + r. Differentiable once, in q, k, v and both tables. Logits, softmax,
    tables and sums are fp32 (fp64 for fp64). bf16 activations are multiplied as bf16 with fp32 sums on a CPU that can;
    all other half precision is multiplied in fp32. Returns the dtype of q.
    """
    n_key = k.shape[2]
    precise = torch.promote_types(q.dtype, torch.float32)
    scale = torch.ones(1, n_key, dtype=precise, device=q.device)
    shift = torch.zeros(1, n_key, dtype=precise, device=q.device)
    if transform is not None and transform.scale is not None:
        scale = transform.scale[:, :n_key].to(precise)
    if transform is not None and transform.shift is not None:
        shift = transform.shift[:, :n_key].to(precise)
    return _Blockwise.apply(q, k, v, scale, shift)  # pyright: ignore[reportReturnType]


class _Blockwise(torch.autograd.Function):
    """The strips in both directions; saves q, flipped k and v, and the tables."""

    @staticmethod
    def forward(ctx, q, k, v, scale, shift):
        out = _heads_inside(q)
        q, k, v = (x.flatten(0, 1) for x in (q, k.flip(2), v.flip(2)))
        ctx.save_for_backward(q, k, v, scale, shift)
        with _products_of(q.dtype):
            return _forward(q, k, v, scale, shift, out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(grad.device.type, enabled=False), _products_of(grad.dtype):
            return _backward(ctx.saved_tensors, grad, ctx.needs_input_grad[3:])


def _forward(
    q: Float[Tensor, "BH Tq d"],
    k: Float[Tensor, "BH Tk d"],
    v: Float[Tensor, "BH Tk d"],
    scale: Float[Tensor, "#H Tk"],
    shift: Float[Tensor, "#H Tk"],
    out: Float[Tensor, "B H Tq d"],
) -> Float[Tensor, "B H Tq d"]:
    """Fill `out`; k and v are flipped along time."""
    q, k, v = (x.to(scale.dtype) for x in (q, k, v))
    tables = _Tables(scale, shift, q.shape[-1])
    B, H, n_query, _ = out.shape
    strips = list(_strips(B, H, n_query, k.shape[1]))
    workspace = q.new_empty(max(math.prod(strip.shape) for strip in strips))
    for strip in strips:
        scores = workspace[: math.prod(strip.shape)].view(strip.shape)
        torch.bmm(q[strip.queries], k[strip.keys].mT, out=scores)
        weights = tables.softmax(scores, strip, out=scores)
        out[strip.heads_queries] = torch.bmm(weights, v[strip.keys]).unflatten(0, strip.by_head)
    return out


def _backward(
    saved: tuple[Tensor, ...], grad: Float[Tensor, "B H Tq d"], tables_need_grad: tuple[bool, bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, scale and shift: in each strip the weights again, then the softmax backward."""
    q, k, v, scale, shift = saved
    dtype, (B, H, n_query, d), n_key = grad.dtype, grad.shape, k.shape[1]
    d_scale, d_shift = (
        torch.zeros_like(table) if need else None for table, need in zip((scale, shift), tables_need_grad, strict=True)
    )
    d_q = _heads_inside(grad)
    q, k, v, grad = (x.to(scale.dtype) for x in (q, k, v, grad.flatten(0, 1)))
    d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
    tables = _Tables(scale, shift, d)
    strips = list(_strips(B, H, n_query, n_key))
    # the scores outlive the softmax only for the gradient of the scale
    workspace = q.new_empty(2 if d_scale is None else 3, max(math.prod(strip.shape) for strip in strips))
    for strip in strips:
        weights, d_logits, *kept = (x[: math.prod(strip.shape)].view(strip.shape) for x in workspace)
        scores = kept[0] if kept else weights
        torch.bmm(q[strip.queries], k[strip.keys].mT, out=scores)
        tables.softmax(scores, strip, out=weights)
        d_v[strip.keys].baddbmm_(weights.mT, grad[strip.queries])
        torch.bmm(grad[strip.queries], v[strip.keys].mT, out=d_logits)
        torch._softmax_backward_data(d_logits, weights, -1, weights.dtype, grad_input=d_logits)
        if d_shift is not None:
            _add_by_distance(d_shift, d_logits, strip)
        if d_scale is not None:
            _add_by_distance(d_scale, scores.mul_(d_logits).mul_(1 / math.sqrt(d)), strip)
        d_scores = tables.rescale_(d_logits, strip)
        d_q[strip.heads_queries] = torch.bmm(d_scores, k[strip.keys]).unflatten(0, strip.by_head)
        d_k[strip.keys].baddbmm_(d_scores.mT, q[strip.queries])
    d_k, d_v = (x.unflatten(0, (B, H)).flip(2).to(dtype) for x in (d_k, d_v))
    return d_q, d_k, d_v, d_scale, d_shift


@dataclass(frozen=True)
class _Strip:
    """Rows of consecutive (batch, head) pairs: of whole batch elements, or of some heads of one."""

    batch: slice
    heads: slice
    rows: slice
    n_head: int
    n_key: int
    seen: int

    @property
    def pairs(self) -> slice:
        """Where the strip lies in the merged dimension B x H."""
        last = (self.batch.stop - 1) * self.n_head
        return slice(self.batch.start * self.n_head + self.heads.start, last + self.heads.stop)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.pairs.stop - self.pairs.start, self.rows.stop - self.rows.start, self.seen

    @property
    def by_head(self) -> tuple[int, int]:
        return -1, self.heads.stop - self.heads.start

    @property
    def queries(self) -> tuple[slice, slice]:
        return self.pairs, self.rows

    @property
    def heads_queries(self) -> tuple[slice, slice, slice]:
        return self.batch, self.heads, self.rows

    @property
    def keys(self) -> tuple[slice, slice]:
        """The seen keys are the last of the flipped ones."""
        return self.pairs, slice(self.n_key - self.seen, None)


def _strips(B: int, H: int, n_query: int, n_key: int) -> Iterator[_Strip]:
    """Strips that cover all rows, of as many (batch, head) pairs as the workspace is meant for."""
    height = _ROWS // 2 if n_key <= 1024 else _ROWS
    for start in range(0, n_query, height):
        stop = min(start + height, n_query)
        seen = n_key - n_query + stop
        heads = min(H, max(1, _KEYS // seen))
        batches = max(1, _KEYS // (seen * H))
        for b in range(0, B, batches):
            for h in range(0, H, heads):
                batch, head = slice(b, min(b + batches, B)), slice(h, min(h + heads, H))
                yield _Strip(batch, head, slice(start, stop), H, n_key, seen)


class _Tables:
    """Scale / sqrt(d) and shift by distance, with the mask in front of distance 0."""

    def __init__(self, scale: Float[Tensor, "#h Tk"], shift: Float[Tensor, "#h Tk"], d: int):
        self._scale = pad(scale / math.sqrt(d), (_ROWS - 1, 0), value=0.0)
        self._shift = pad(shift, (_ROWS - 1, 0), value=-math.inf)

    def softmax(self, scores: Tensor, strip: _Strip, out: Tensor) -> Float[Tensor, "BH R C"]:
        """Attention weights of raw scores <q, k>; `out` may be the scores."""
        logits = out.unflatten(0, strip.by_head)
        scale, shift = self._view(self._scale, strip), self._view(self._shift, strip)
        torch.addcmul(shift, scores.unflatten(0, strip.by_head), scale, out=logits)
        return torch.softmax(out, -1, out=out)

    def rescale_(self, d_logits: Tensor, strip: _Strip) -> Float[Tensor, "BH R C"]:
        """From the gradient of the logits to that of the raw scores, in place."""
        d_logits.unflatten(0, strip.by_head).mul_(self._view(self._scale, strip))
        return d_logits

    def _view(self, padded: Tensor, strip: _Strip) -> Float[Tensor, "h R C"]:
        """Entry (r, c) is the value at distance r + c - (R - 1)."""
        _, R, C = strip.shape
        part = padded[:, _ROWS - R :] if padded.shape[0] == 1 else padded[strip.heads, _ROWS - R :]
        return part.as_strided((part.shape[0], R, C), (part.stride(0), 1, 1))


def _add_by_distance(d_table: Float[Tensor, "h Tk"], values: Float[Tensor, "BH R C"], strip: _Strip) -> None:
    """Add to a table's gradient the sums over equal distances of values that are 0 where masked.

    Row r has distance t in column t + R - 1 - r, at the flat place R - 1 + r (C - 1) + t: rows of length C - 1. What
    wraps into a next row is masked there. The greatest distance, C - 1, stands alone at the end.
    """
    _, R, C = strip.shape
    flat = values.unflatten(0, strip.by_head).sum(0).flatten(1)
    sums = flat[:, R - 1 : R - 1 + R * (C - 1)].unflatten(1, (R, C - 1)).sum(1)
    sums = torch.cat([sums, flat[:, -1:]], dim=1)
    if d_table.shape[0] == 1:
        d_table[:, :C] += sums.sum(0)
    else:
        d_table[strip.heads, :C] += sums


def _heads_inside(like: Float[Tensor, "B H T d"]) -> Float[Tensor, "B H T d"]:
    """Empty tensor that lies in memory as (B, T, H, d), so that joining the heads later is free."""
    B, H, T, d = like.shape
    return like.new_empty(B, T, H, d).transpose(1, 2)


@contextmanager
def _products_of(dtype: torch.dtype) -> Iterator[None]:
    """On a CPU, let fp32 products of bf16 values run as bf16 products with fp32 sums and results.

    torch.bmm of bf16 tensors would round its result, the logits, to bf16.
    """
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = matmul.fp32_precision
    try:
        if dtype == torch.bfloat16:
            matmul.fp32_precision = "bf16"
        yield
    finally:
        matmul.fp32_precision = before
