"""Row-strip attention with scale and shift by distance: O(T x block) memory, forward and backward.

The one idea: flip keys and values along time. In a strip of R query rows that see C keys, row r and flipped
column c are then at distance t = r + c - (R - 1), a function of r + c alone. So scale and shift of a whole
strip are strided views (strides 1, 1) of one 1-D table, without a copy, and R - 1 entries in front of distance 0,
scale 0 and shift -inf, are the causal mask. A strip holds complete rows: its softmax is the plain
one, and the backward pass needs only q, k and v to make it again. Copies (flipped, or in fp32) are made of one
group of heads at a time.

Where a strip would be longer than the cache, the forward pass cuts it into tiles, with an online softmax
(arXiv:1805.02867).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from model.attend.layout import heads_inside
from model.attend.transform import Transform

_ROWS = 128  # of a strip; half of it up to 1024 keys, where the masked triangle weighs more than the calls
_KEYS = 8192  # of the heads of a strip together, which should stay in the cache; two heads, for two threads, come first
_TILE_ROWS, _TILE_KEYS = 512, 512  # where a strip of the forward pass would have more than _ROWS x _KEYS logits
_MASKED = _TILE_ROWS - 1  # entries in front of distance 0: one less than the rows of any strip


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
    """The strips in both directions; saves its inputs, and makes the weights again."""

    @staticmethod
    def forward(ctx, q, k, v, scale, shift):
        ctx.save_for_backward(q, k, v, scale, shift)
        with _products_of(q.dtype):
            return _forward(q, k, v, scale, shift)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(grad.device.type, enabled=False), _products_of(grad.dtype):
            q, k, v, scale, shift = ctx.saved_tensors
            return _backward(q, k, v, scale, shift, grad, ctx.needs_input_grad[3:])


def _forward(
    q: Float[Tensor, "B H Tq d"],
    k: Float[Tensor, "B H Tk d"],
    v: Float[Tensor, "B H Tk d"],
    scale: Float[Tensor, "#H Tk"],
    shift: Float[Tensor, "#H Tk"],
) -> Float[Tensor, "B H Tq d"]:
    """Strip by strip: scores, weights in their place, mean values."""
    out, tables = heads_inside(q), _Tables(scale, shift, q.shape[3])
    in_tiles = min(q.shape[2], _ROWS) * k.shape[2] > _ROWS * _KEYS  # a strip of a few rows may be long
    groups, strips = _groups(k), _strips(q, k, _TILE_ROWS if in_tiles else _ROWS)
    workspace = scale.new_empty(_most_elements(groups, strips, _TILE_KEYS if in_tiles else k.shape[2]))
    mean_values = _mean_values_by_tile if in_tiles else _mean_values
    for group in groups:
        query, key, value = _merged(q[group], scale), _merged(k[group].flip(2), scale), _merged(v[group].flip(2), scale)
        for rows, seen in strips:
            means = mean_values(query[:, rows], key[:, -seen:], value[:, -seen:], tables, group[1], workspace)
            out[*group, rows] = means.unflatten(0, out[group].shape[:2])
    return out


def _mean_values(
    query: Float[Tensor, "bh R d"],
    key: Float[Tensor, "bh C d"],
    value: Float[Tensor, "bh C d"],
    tables: "_Tables",
    heads: slice,
    workspace: Float[Tensor, " n"],
) -> Float[Tensor, "bh R d"]:
    """Of a strip, whole."""
    scores = _strip(workspace, query, key.shape[1])
    torch.bmm(query, key.mT, out=scores)
    return torch.bmm(tables.softmax(scores, heads, out=scores), value)


def _mean_values_by_tile(
    query: Float[Tensor, "bh R d"],
    key: Float[Tensor, "bh C d"],
    value: Float[Tensor, "bh C d"],
    tables: "_Tables",
    heads: slice,
    workspace: Float[Tensor, " n"],
) -> Float[Tensor, "bh R d"]:
    """Of a strip, tile by tile: the means of two sets of keys, weighted by their sums of exp(logits), are that of both.

    The sum comes from the softmax of the tile, its highest weight being exp(highest logit) / sum: torch's softmax is
    several times faster than its exp.
    """
    means, log_sum = torch.zeros_like(query), query.new_full((*query.shape[:2], 1), -math.inf)
    for first in range(0, key.shape[1], _TILE_KEYS):
        tile = slice(first, min(first + _TILE_KEYS, key.shape[1]))
        scores = _strip(workspace, query, tile.stop - first)
        torch.bmm(query, key[:, tile].mT, out=scores)
        highest = tables.logits_(scores, heads, first).amax(-1, keepdim=True)
        weights = torch.softmax(scores, -1, out=scores)
        log_sum_of_tile = highest - weights.amax(-1, keepdim=True).log_()
        share = (log_sum_of_tile - log_sum).sigmoid_()
        if not highest.isfinite().all():  # a row of the tile has nothing but masked entries
            log_sum_of_tile = log_sum_of_tile.nan_to_num_(nan=-math.inf)
            weights.nan_to_num_(nan=0.0)
            share = share.nan_to_num_(nan=0.0)
        means.lerp_(torch.bmm(weights, value[:, tile]), share)
        log_sum = torch.logaddexp(log_sum, log_sum_of_tile)
    return means


def _backward(
    q: Float[Tensor, "B H Tq d"],
    k: Float[Tensor, "B H Tk d"],
    v: Float[Tensor, "B H Tk d"],
    scale: Float[Tensor, "#H Tk"],
    shift: Float[Tensor, "#H Tk"],
    grad: Float[Tensor, "B H Tq d"],
    tables_need_grad: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, scale and shift: in each strip the weights again, then the softmax backward."""
    d_q, d_k, d_v, tables = heads_inside(q), heads_inside(k), heads_inside(v), _Tables(scale, shift, q.shape[3])
    d_scale, d_shift = (
        torch.zeros_like(table) if need else None for table, need in zip((scale, shift), tables_need_grad, strict=True)
    )
    groups, strips = _groups(k), _strips(q, k, _ROWS)
    # the scores outlive the softmax only for the gradient of the scale
    workspaces = scale.new_empty(2 if d_scale is None else 3, _most_elements(groups, strips, k.shape[2]))
    for group in groups:
        query, d_out = _merged(q[group], scale), _merged(grad[group], scale)
        key, value = _merged(k[group].flip(2), scale), _merged(v[group].flip(2), scale)
        d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        for rows, seen in strips:
            weights, d_logits, *kept = (_strip(workspace, query[:, rows], seen) for workspace in workspaces)
            scores = kept[0] if kept else weights
            torch.bmm(query[:, rows], key[:, -seen:].mT, out=scores)
            tables.softmax(scores, group[1], out=weights)
            d_value[:, -seen:].baddbmm_(weights.mT, d_out[:, rows])
            torch.bmm(d_out[:, rows], value[:, -seen:].mT, out=d_logits)
            torch._softmax_backward_data(d_logits, weights, -1, weights.dtype, grad_input=d_logits)
            if d_shift is not None:
                _add_by_distance(d_shift, d_logits, group[1])
            if d_scale is not None:
                _add_by_distance(d_scale, scores.mul_(d_logits).mul_(q.shape[3] ** -0.5), group[1])
            d_scores = tables.rescale_(d_logits, group[1])
            d_q[*group, rows] = torch.bmm(d_scores, key[:, -seen:]).unflatten(0, d_q[group].shape[:2])
            d_key[:, -seen:].baddbmm_(d_scores.mT, query[:, rows])
        d_k[group], d_v[group] = (x.flip(1).unflatten(0, d_k[group].shape[:2]) for x in (d_key, d_value))
    return d_q, d_k, d_v, d_scale, d_shift


def _groups(k: Float[Tensor, "B H Tk d"]) -> list[tuple[slice, slice]]:
    """Slices of (batch, head) that share strips: whole batch elements, or some heads of one."""
    B, H, n_key, _ = k.shape
    heads, batches = min(H, max(2, _KEYS // n_key)), max(1, _KEYS // (n_key * H))
    return [
        (slice(b, min(b + batches, B)), slice(h, min(h + heads, H)))
        for b in range(0, B, batches)
        for h in range(0, H, heads)
    ]


def _strips(q: Float[Tensor, "B H Tq d"], k: Float[Tensor, "B H Tk d"], height: int) -> list[tuple[slice, int]]:
    """Slices of query rows, each with the number of keys that its last row sees."""
    n_query, n_key = q.shape[2], k.shape[2]
    height = height // 2 if n_key <= 1024 else height
    blocks = (slice(start, min(start + height, n_query)) for start in range(0, n_query, height))
    return [(rows, n_key - n_query + rows.stop) for rows in blocks]


def _most_elements(groups: list[tuple[slice, slice]], strips: list[tuple[slice, int]], width: int) -> int:
    """Of the largest strip, or of a tile of `width` keys of it."""
    pairs = max((batch.stop - batch.start) * (heads.stop - heads.start) for batch, heads in groups)
    return pairs * max((rows.stop - rows.start) * min(seen, width) for rows, seen in strips)


def _merged(x: Float[Tensor, "b h T d"], like: Tensor) -> Float[Tensor, "bh T d"]:
    """As one batch of matrices, in the dtype of the tables."""
    return x.to(like.dtype).flatten(0, 1)


def _strip(workspace: Float[Tensor, " n"], query: Float[Tensor, "bh R d"], seen: int) -> Float[Tensor, "bh R C"]:
    """The beginning of the workspace as the matrices of a strip."""
    shape = query.shape[0], query.shape[1], seen
    return workspace[: math.prod(shape)].view(shape)


class _Tables:
    """Scale / sqrt(d) and shift by distance, with the mask in front of distance 0."""

    def __init__(self, scale: Float[Tensor, "#h Tk"], shift: Float[Tensor, "#h Tk"], d: int):
        self._scale = pad(scale / math.sqrt(d), (_MASKED, 0), value=0.0)
        self._shift = pad(shift, (_MASKED, 0), value=-math.inf)

    def softmax(self, scores: Tensor, heads: slice, out: Tensor) -> Float[Tensor, "bh R C"]:
        """Attention weights of raw scores <q, k>; `out` may be the scores."""
        self._logits(scores, heads, 0, out)
        return torch.softmax(out, -1, out=out)

    def logits_(self, scores: Tensor, heads: slice, first: int) -> Float[Tensor, "bh R C"]:
        """Of the columns of a strip from `first` on, in the place of their raw scores."""
        self._logits(scores, heads, first, scores)
        return scores

    def _logits(self, scores: Tensor, heads: slice, first: int, out: Tensor) -> None:
        logits, scores = _by_head(out, heads), _by_head(scores, heads)
        shift, scale = _at(self._shift, logits, heads, first), _at(self._scale, logits, heads, first)
        torch.addcmul(shift, scores, scale, out=logits)

    def rescale_(self, d_logits: Tensor, heads: slice) -> Float[Tensor, "bh R C"]:
        """From the gradient of the logits to that of the raw scores, in place."""
        by_head = _by_head(d_logits, heads)
        by_head.mul_(_at(self._scale, by_head, heads))
        return d_logits


def _by_head(strip: Float[Tensor, "bh R C"], heads: slice) -> Float[Tensor, "b h R C"]:
    return strip.unflatten(0, (-1, heads.stop - heads.start))


def _at(
    padded: Float[Tensor, "h N"], strip: Float[Tensor, "_ _ R C"], heads: slice, first: int = 0
) -> Float[Tensor, "_ R C"]:
    """A table over a strip from column `first` on, without a copy: its value at distance r + first + c - (R - 1)."""
    _, _, R, C = strip.shape
    start = _MASKED - (R - 1) + first
    part = padded[:, start:] if padded.shape[0] == 1 else padded[heads, start:]
    return part.as_strided((part.shape[0], R, C), (part.stride(0), 1, 1))


def _add_by_distance(d_table: Float[Tensor, "h Tk"], values: Float[Tensor, "bh R C"], heads: slice) -> None:
    """Add to a table's gradient the sums over equal distances of values that are 0 where masked.

    Row r has distance t in column t + R - 1 - r, at the flat place R - 1 + r (C - 1) + t: rows of length C - 1. What
    wraps into a next row is masked there. The greatest distance, C - 1, stands alone at the end.
    """
    _, R, C = values.shape
    flat = _by_head(values, heads).sum(0).flatten(1)
    sums = flat[:, R - 1 : R - 1 + R * (C - 1)].unflatten(1, (R, C - 1)).sum(1)
    sums = torch.cat([sums, flat[:, -1:]], dim=1)
    if d_table.shape[0] == 1:
        d_table[:, :C] += sums.sum(0)
    else:
        d_table[heads, :C] += sums


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
