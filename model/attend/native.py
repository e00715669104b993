"""Attention with scale and shift by distance in one compiled pass over blocks, for fp32 on a CPU.

The kernel is native.cpp beside this file; native_build.py compiles it.
"""

import ctypes
import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from model.attend.layout import heads_inside
from model.attend.native_build import load_kernel
from model.attend.transform import Transform


@torch.compiler.disable  # a call through ctypes is none that dynamo could follow
def native(
    q: Float[Tensor, "B H Tq d"],
    k: Float[Tensor, "B H Tk d"],
    v: Float[Tensor, "B H Tk d"],
    transform: Transform | None = None,
) -> Float[Tensor, "B H Tq d"]:
    """Causal attention with a transform, exact, in O(Tk) memory and one pass over the logits.

        out[h,i] = sum_j softmax_{j<=i}(scale[h,t] <q_i, k_j> / sqrt(d) + shift[h,t]) v_j,    t = i - j

    Row r of q stands at position i = Tk - Tq + r. Differentiable once, in q, k, v and both tables. Everything is fp32;
    half precision is converted before and after. Bit for bit the same on any number of threads. Returns the dtype of q.
    Raises ValueError where `unavailable` has a reason.
    """
    if reason := unavailable(q):
        raise ValueError(f"attention=native can't serve this: {reason}; use auto or blockwise")
    n_key = k.shape[2]
    transform = transform or Transform()
    scale = torch.ones(1, n_key, dtype=torch.float32) if transform.scale is None else transform.scale[:, :n_key]
    shift = torch.zeros(1, n_key, dtype=torch.float32) if transform.shift is None else transform.shift[:, :n_key]
    q32, k32, v32 = (x.float() for x in (q, k, v))
    return _Native.apply(q32, k32, v32, scale, shift).to(q.dtype)  # pyright: ignore[reportAttributeAccessIssue]


def unavailable(q: Tensor) -> str | None:
    """Why the kernel can't serve such queries here, None if it can. Compiles it if need be."""
    if q.device.type != "cpu":
        return f"it is made for a CPU, and q is on {q.device}"
    if q.dtype == torch.float64:
        return "it computes in fp32, and q is float64"
    return _missing()


@torch.compiler.assume_constant_result  # dynamo would follow the compiler's call into the system
def _missing() -> str | None:
    kernel = load_kernel()
    return kernel if isinstance(kernel, str) else None


class _Native(torch.autograd.Function):
    """The two calls; saves the output and the rows' log-sums, and makes the weights again."""

    @staticmethod
    def forward(ctx, q, k, v, scale, shift):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, log_sum = heads_inside(q), q.new_empty(q.shape[:3])
        call = _Call(q, k, scale, shift)
        call.run("attend_forward", q, k, v, out, log_sum.data_ptr())
        ctx.save_for_backward(q, k, v, scale, shift, out, log_sum)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, scale, shift, out, log_sum = ctx.saved_tensors
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        d_q, d_k, d_v = (heads_inside(x) for x in (q, k, v))
        call = _Call(q, k, scale, shift)
        d_tables = [call.zeros_like_table() if need else None for need in ctx.needs_input_grad[3:]]
        addresses = [None if table is None else table.data_ptr() for table in d_tables]
        call.run("attend_backward", q, k, v, out, log_sum.data_ptr(), d_out, d_q, d_k, d_v, *addresses)
        d_scale, d_shift = map(call.table_gradient, d_tables, (scale, shift))
        return d_q, d_k, d_v, None if d_scale is None else d_scale * q.shape[3] ** -0.5, d_shift


def workspace_bytes(length: int, head_dim: int, pairs: int, threads: int) -> int:
    """About what the kernel takes for itself: packed keys and values forward, five to six copies of a head backward.

    `pairs` are the heads of all sequences together; each thread works on one in the backward pass.
    """
    head = 4 * length * head_dim
    group = min(pairs, max(threads, (4 << 22) // (2 * head)))
    return max(2 * head * group, 5 * head * min(pairs, threads))


class _Call:
    """Sizes and tables of one attention, as the kernel takes them: the tables backwards, with the mask behind them."""

    def __init__(self, q: Tensor, k: Tensor, scale: Tensor, shift: Tensor) -> None:
        kernel = load_kernel()
        assert not isinstance(kernel, str), kernel
        self._kernel, self._mask = kernel, kernel.attend_mask()
        self._sizes = _Sizes(*q.shape[:3], *k.shape[2:])
        # kept here, because the kernel gets their addresses only
        self._scale = pad((scale * q.shape[3] ** -0.5).flip(1), (0, self._mask), value=0.0)
        self._shift = pad(shift.flip(1), (0, self._mask), value=-math.inf)
        by_head = [0 if table.shape[0] == 1 else table.stride(0) for table in (self._scale, self._shift)]
        self._tables = _Tables(self._scale.data_ptr(), self._shift.data_ptr(), *by_head)

    def run(self, name: str, *arguments: Tensor | int | None) -> None:
        """Calls a function of the kernel: tensors as their address and strides, the rest as it is."""
        words = [_described(x) if isinstance(x, Tensor) else ctypes.c_void_p(x) for x in arguments]
        threads = ctypes.c_int64(torch.get_num_threads())
        getattr(self._kernel, name)(ctypes.byref(self._sizes), ctypes.byref(self._tables), *words, threads)

    def zeros_like_table(self) -> Float[Tensor, "BH M"]:
        return self._scale.new_zeros(self._sizes.B * self._sizes.H, self._sizes.Tk + self._mask)

    def table_gradient(self, backwards: Float[Tensor, "BH M"] | None, table: Float[Tensor, "#H N"]) -> Tensor | None:
        """What the kernel wrote for each head of each batch element, summed up in the shape of the table."""
        if backwards is None:
            return None
        heads = backwards[:, : self._sizes.Tk].flip(1).unflatten(0, (self._sizes.B, self._sizes.H)).sum(0)
        return heads.sum(0, keepdim=True) if table.shape[0] == 1 else heads


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("B", "H", "Tq", "Tk", "d")]


class _Strided(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("by_batch", "by_head", "by_time"))]


class _Tables(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scale", "shift")),
        *((name, ctypes.c_int64) for name in ("scale_by_head", "shift_by_head")),
    ]


def _described(x: Float[Tensor, "B H T d"]) -> object:
    return ctypes.byref(_Strided(x.data_ptr(), *x.stride()[:3]))
