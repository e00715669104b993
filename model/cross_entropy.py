"""Output layer and cross-entropy together, a chunk of tokens at a time.

The logits of 65,536 tokens over 50,304 ids are 13 GB in fp32; a chunk of them is enough at any time. In training, the
gradients of a chunk are made in the forward pass, where its probabilities are at hand, so nothing is computed twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**25  # logits in a chunk: 128 MiB in fp32
IGNORED = -100  # a target that does not count


def linear_cross_entropy(
    x: Float[Tensor, "N C"], weight: Float[Tensor, "V C"], targets: Int[Tensor, "N"], reduction: str = "mean"
) -> Float[Tensor, ""] | Float[Tensor, "N"]:
    """-log softmax(W x)[target] in nats, fp32, over tokens whose target is not -100.

    The product is taken in autocast's dtype where autocast is on, else in that of `x`; softmax and sum in fp32.

    Args:
        reduction: "mean" over the counted tokens, "sum", or "none" (0 where the target is -100).

    Raises ValueError for another reduction.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown; choose mean, sum or none")
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    x, targets = x.to(dtype), targets.long()
    if not torch.is_grad_enabled():  # to an autograd.Function, requires_grad alone would say that gradients are wanted
        x, weight = x.detach(), weight.detach()
    chunk = max(1, CHUNK_ELEMENTS // weight.shape[0])
    with torch.autocast(device, enabled=False):
        if reduction == "none":
            return _per_token(x, weight, targets, chunk)
        total = _Sum.apply(x, weight, targets, chunk)
    assert isinstance(total, Tensor)
    return total if reduction == "sum" else total / (targets != IGNORED).sum()


def _per_token(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    def losses(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.to(x.dtype).T).float(), targets, ignore_index=IGNORED, reduction="none")

    pieces = zip(x.split(chunk), targets.split(chunk), strict=True)
    return torch.cat([_recomputed(losses, piece, weight, target) for piece, target in pieces])


def _recomputed(function: Any, *arguments: Tensor) -> Tensor:
    return checkpoint(function, *arguments, use_reentrant=False) if torch.is_grad_enabled() else function(*arguments)


class _Sum(torch.autograd.Function):
    """The summed loss; its gradients are ready when the forward pass ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        wants_gradient = any(ctx.needs_input_grad)
        matrix = weight.to(x.dtype)
        dx = torch.empty_like(x) if wants_gradient else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if wants_gradient else None
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in range(0, x.shape[0], chunk):
            rows = slice(start, start + chunk)
            total += _chunk_sum(x[rows], matrix, targets[rows], None if dx is None else dx[rows], dweight)
        ctx.gradients, ctx.weight_dtype = (dx, dweight), weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of linear_cross_entropy were made once and are used up; compute it again")
        (dx, dweight), ctx.gradients = ctx.gradients, None  # nothing holds them any more, so they needn't be copied
        (grad,) = grad_outputs
        return dx.mul_(grad), dweight.mul_(grad).to(ctx.weight_dtype), None, None


def _chunk_sum(x: Tensor, matrix: Tensor, targets: Tensor, dx: Tensor | None, dweight: Tensor | None) -> Tensor:
    """The summed loss of one chunk; writes its gradient into `dx` and adds to `dweight`. Nothing else is left."""
    logits = (x @ matrix.T).float()
    counted = targets != IGNORED
    index = targets.where(counted, 0)[:, None]
    target, highest = logits.gather(1, index)[:, 0], logits.amax(dim=-1)
    probabilities = torch.softmax(logits, dim=-1, out=logits)  # in the place of the logits
    log_z = highest - probabilities.amax(dim=-1).log()  # the highest one, at least 1/V, can't underflow
    if dx is not None and dweight is not None:
        # d loss / d logits = softmax - one-hot, again in the same place
        gradient = probabilities.scatter_add_(1, index, torch.full_like(target, -1)[:, None])
        gradient = gradient.mul_(counted[:, None]).to(x.dtype)
        torch.mm(gradient, matrix, out=dx)
        if gradient.dtype == dweight.dtype:
            dweight.addmm_(gradient.T, x)
        else:
            dweight += gradient.T @ x
    return ((log_z - target) * counted).sum()
