"""Causal self-attention of one layer: projections, QK-norm, and a core that follows the position plan."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.attend import attend
from model.cache import KeysAndValues, LayerCache, split_rows
from model.infini import InfiniAttention
from model.position import Plan
from model.position.plan import Geometry
from model.position.scheme import build_kind

EPS = torch.finfo(torch.float32).eps  # of the norm


def rms_norm(x: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
    """x / sqrt(mean(x^2) + eps) over the last dimension, without a learned gain; in fp32, returns the dtype of x."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():  # where torch has one kernel for it, or makes one
        return F.rms_norm(x.float(), (x.shape[-1],), eps=EPS).to(x.dtype)
    normed = _RMSNorm.apply(x.float())
    assert isinstance(normed, Tensor)
    return normed.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """Written out, it passes over the memory half as often as in autograd's operations, and keeps y instead of x.

    With r = 1 / sqrt(mean(x^2) + eps) and y = r x, the gradient is dx = r (dy - y mean(y dy)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        r = mean_square.add_(EPS).rsqrt_()
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (y, r) = grad_outputs, ctx.saved_tensors
        return torch.addcmul(grad, y, (y * grad).mean(-1, keepdim=True), value=-1).mul_(r)


class DotProduct(nn.Module):
    """The usual core: softmax(L) v, with L as the position plan says."""

    def __init__(self, geometry: Geometry):
        super().__init__()

    def forward(
        self,
        q: Float[Tensor, "B H T d"],
        k: Float[Tensor, "B H T d"],
        v: Float[Tensor, "B H T d"],
        plan: Plan,
        backend: str = "auto",
    ) -> Float[Tensor, "B H T d"]:
        return attend(plan.query(q), plan.rotate(k), v, plan.transform, backend)

    def new_cache(self, rows: int, capacity: int) -> KeysAndValues:
        return KeysAndValues(rows, capacity)

    def extend(
        self,
        q: Float[Tensor, "B H T d"],
        k: Float[Tensor, "B H T d"],
        v: Float[Tensor, "B H T d"],
        plan: Plan,
        cache: KeysAndValues,
    ) -> Float[Tensor, "B H T d"]:
        """The same for the tokens that follow those of the cache."""
        keys, values = cache.append(plan.rotate(k), v)
        return attend(plan.query(q), keys, values, plan.transform)


CORES = {"none": DotProduct, "infini": InfiniAttention}


class CausalSelfAttention(nn.Module):
    """Attention of every head as the position scheme says (arXiv:2505.17083, section 3), between two projections.

    q, k and v are separate matrices, because Muon orthogonalises each by itself.
    """

    def __init__(self, width: int, geometry: Geometry, core: Mapping[str, Any], backend: str = "auto"):
        super().__init__()
        self.n_head, self.backend = geometry.n_head, backend
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.core = build_kind("core", CORES, core, geometry)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Float[Tensor, "B T C"], plan: Plan) -> Float[Tensor, "B T C"]:
        q, k, v = self._project(x)
        return self._join(self.core(q, k, v, plan, self.backend))

    def extend(
        self, x: Float[Tensor, "B T C"], plans: Sequence[Plan], caches: Sequence[LayerCache]
    ) -> Float[Tensor, "B T C"]:
        """Attention of tokens that follow those of the caches, which take the rows of x in order.

        `attend` picks the backend: the one that a run was trained with need not take fewer queries than keys.
        """
        pieces = zip(*(split_rows(y, caches) for y in self._project(x)), plans, caches, strict=True)
        return self._join(torch.cat([self.core.extend(*piece) for piece in pieces]))

    def _project(self, x: Float[Tensor, "B T C"]) -> tuple[Tensor, Tensor, Tensor]:
        q = rms_norm(self._heads(self.query(x)))
        k = rms_norm(self._heads(self.key(x)))
        return q, k, self._heads(self.value(x))

    def _join(self, y: Float[Tensor, "B H T d"]) -> Float[Tensor, "B T C"]:
        return self.out(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B H T d"]:
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
