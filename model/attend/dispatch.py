"""Checks the arguments of attention and picks the backend."""

import warnings
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from model.attend.blockwise import blockwise
from model.attend.dense import dense
from model.attend.flex import flex, flex_closed_form, unsupported
from model.attend.native import native
from model.attend.native import unavailable as unavailable_natively
from model.attend.sdpa import sdpa
from model.attend.transform import Transform
from model.precision import has_bf16_unit

BACKENDS = {
    "dense": dense,
    "sdpa": sdpa,
    "blockwise": blockwise,
    "native": native,
    "flex": flex,
    "flex_closed_form": flex_closed_form,
}

_FEWEST_ROWS = 16  # of queries for which "auto" takes native


def attend(
    q: Float[Tensor, "B H Tq d"],
    k: Float[Tensor, "B H Tk d"],
    v: Float[Tensor, "B H Tk d"],
    transform: Transform | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B H Tq d"]:
    """Causal attention whose logits are scaled and shifted by distance.

        logits[h,i,j] = scale[h,t] * <q_i, k_j> / sqrt(d) + shift[h,t],    t = i - j >= 0
        out[h,i] = sum_{j <= i} softmax_j(logits[h,i,:]) v_j

    Distances t are in tokens. The queries are the last Tq of the Tk positions, so row r of q stands at position
    i = Tk - Tq + r (cached decoding when Tq < Tk). `backend` is a key of BACKENDS, or "auto": "native" on a CPU, and
    on CUDA "flex" where there is a transform; where they can't serve, "blockwise" with a transform and else "sdpa".
    Autocast is off inside: the products keep the dtype that is given.

    Returns a tensor of the shape and dtype of q. Raises ValueError for shapes, dtypes or devices that do not
    fit, for an unknown backend, and for a backend that cannot serve the request.
    """
    if transform is not None and transform.scale is None and transform.shift is None:
        transform = None
    _check(q, k, v, transform)
    check_backend(backend, transform)
    if backend == "auto":
        backend = _automatic(q, k, v, transform)
    with torch.autocast(q.device.type, enabled=False):
        return BACKENDS[backend](q, k, v, transform)


def _automatic(q: Tensor, k: Tensor, v: Tensor, transform: Transform | None) -> str:
    if q.is_cuda and transform is not None and not unsupported(q, k, v, transform):
        return "flex"
    # A few rows are not worth packing all keys. The others multiply bf16 as such, which pays only with a unit for it:
    # with AVX512_BF16, at twice the speed of fp32, the kernel is faster although it turns everything into fp32.
    own_products = q.dtype == torch.float64 or (q.dtype == torch.bfloat16 and has_bf16_unit(q.device))
    if q.device.type == "cpu" and not own_products and q.shape[2] >= _FEWEST_ROWS:
        if not (reason := unavailable_natively(q)):
            return "native"
        if transform is not None:
            _warn_once(reason)
    return "sdpa" if transform is None else "blockwise"


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"attention=auto takes blockwise instead of native, which is faster: {reason}", stacklevel=4)


def check_backend(backend: str, transform: Transform | None) -> None:
    """Raises ValueError for an unknown backend, and for one that can't serve the transform of a scheme."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"attention={backend} is unknown; choose one of: auto, {', '.join(BACKENDS)}")
    if backend == "sdpa" and transform is not None:
        raise ValueError(
            "attention=sdpa cannot scale or shift logits by distance, as this position scheme does; choose auto, flex, "
            "native, blockwise or dense"
        )
    if backend == "flex_closed_form" and transform is not None and transform.formula is None:
        raise ValueError(
            "attention=flex_closed_form can't serve scale and shift that are learned or have no closed form; choose "
            "auto, flex, native or blockwise"
        )


def check_trainable(backend: str, device: torch.device) -> None:
    """Raises ValueError for a backend without gradients on the device, or one that can't work there at all."""
    if backend.startswith("flex") and device.type == "cpu":
        raise ValueError(f"attention={backend} has no gradients on a CPU; use attention=auto, native or blockwise")
    if backend == "native" and (reason := unavailable_natively(torch.empty(0, device=device))):
        raise ValueError(f"attention=native can't serve this: {reason}; use attention=auto or blockwise")


def _check(q: Tensor, k: Tensor, v: Tensor, transform: Transform | None) -> None:
    """Raise ValueError with one line when the arguments do not fit each other."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"attention takes q (B, H, Tq, d) and k, v (B, H, Tk, d), got {shapes}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must share one shape (B, H, Tk, d), got {shapes}")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k and v must agree in batch, heads and head dim, got {shapes}")
    if not 1 <= q.shape[2] <= k.shape[2]:
        raise ValueError(f"Tq={q.shape[2]} must lie in 1..Tk={k.shape[2]}: the queries are the last Tq positions")
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast first")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if transform is not None:
        _check_table("scale", transform.scale, q, k.shape[2])
        _check_table("shift", transform.shift, q, k.shape[2])


def _check_table(name: str, table: Tensor | None, q: Tensor, n_key: int) -> None:
    """Raise ValueError with one line when a table of the transform does not fit q or the number of keys."""
    if table is None:
        return
    n_head = q.shape[1]
    if table.ndim != 2 or table.shape[0] not in (1, n_head):
        raise ValueError(f"{name} has shape {tuple(table.shape)}, must be (1, N) or (H={n_head}, N)")
    if table.shape[1] < n_key:
        raise ValueError(f"{name} ends at distance {table.shape[1] - 1}; {n_key} keys need a table of N >= {n_key}")
    if table.dtype != torch.float32 and not table.dtype == q.dtype == torch.float64:
        raise ValueError(f"{name} is {table.dtype}, must be torch.float32 whatever the activations are")
    if table.device != q.device:
        raise ValueError(f"{name} is on {table.device}, q is on {q.device}; move the table first")
