"""Muon for the matrices of the blocks, Adam for the rest (paper README, section 5)."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from model.gpt import GPT

# Coefficients of the quintic iteration: they push every singular value towards 1 fast, without converging exactly.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Float[Tensor, "n rows cols"], steps: int = 5) -> Float[Tensor, "n rows cols"]:
    """U V^T of each matrix U S V^T, roughly: `steps` Newton-Schulz iterations in bf16.

    X <- a X + (b A + c A^2) X with A = X X^T, from X = G / |G|; singular values end between about 0.7 and 1.2.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if tall := x.shape[-2] > x.shape[-1]:  # the smaller of X X^T and X^T X
        x = x.mT
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: b <- m b + g;  W <- W - lr sqrt(max(1, rows/cols)) orthogonalise(g + m b).

    Nesterov momentum, no weight decay, for 2-D parameters only. All matrices of one shape are orthogonalised as a
    batch, which is what makes it cheap (torch.optim.Muon takes one matrix at a time).

    Raises ValueError for a parameter that is not a matrix.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95, newton_schulz_steps: int = 5
    ):
        params = list(params)
        for parameter in params:
            if parameter.ndim != 2:
                raise ValueError(
                    f"Muon takes matrices, not a parameter of shape {tuple(parameter.shape)}; give it to Adam"
                )
        super().__init__(params, {"lr": lr, "momentum": momentum, "newton_schulz_steps": newton_schulz_steps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "Muon takes no closure"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        buffers = [
            self.state[parameter].setdefault("momentum", torch.zeros_like(parameter)) for parameter in parameters
        ]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, gradients)
        updates = orthogonalise(
            torch.stack(torch._foreach_add(gradients, buffers, alpha=group["momentum"])), group["newton_schulz_steps"]
        )
        rows, cols = parameters[0].shape
        step = group["lr"] * max(1.0, rows / cols) ** 0.5
        torch._foreach_add_(parameters, list(updates.to(parameters[0].dtype).unbind()), alpha=-step)


def build_optimizers(model: GPT, config: Any) -> list[torch.optim.Optimizer]:
    """[Muon, Adam] over the groups of the recipe, from the keys of configs/optimizer/.

    Every group holds its own peak rate as "peak_lr". Together they hold each parameter exactly once.
    """
    inside = list(model.blocks.parameters())
    muon = Muon(
        (parameter for parameter in inside if parameter.ndim == 2),
        lr=config.muon_lr,
        momentum=config.muon_momentum,
        newton_schulz_steps=config.newton_schulz_steps,
    )
    groups = [
        {"params": list(model.embedding.parameters()), "lr": config.embedding_lr},
        {"params": list(model.output.parameters()), "lr": config.output_lr},
    ]
    scheme = [*model.position.parameters(), *(parameter for parameter in inside if parameter.ndim != 2)]
    if learned := [parameter for parameter in scheme if parameter.requires_grad]:
        groups.append({"params": learned, "lr": config.position_lr})
    cuda = model.output.weight.is_cuda
    adam = torch.optim.Adam(groups, betas=tuple(config.betas), eps=config.eps, fused=cuda)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adam]


def set_learning_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Every group's rate becomes its peak rate times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
