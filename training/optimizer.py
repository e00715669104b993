"""Muon for the matrices of the blocks, Adam for the rest (paper README, section 5)."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from model.gpt import GPT
from model.precision import fast_bf16

# Coefficients of the quintic iteration: they push every singular value towards 1 fast, without converging exactly.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Float[Tensor, "n rows cols"], steps: int = 5) -> Float[Tensor, "n rows cols"]:
    """U V^T of each matrix U S V^T, roughly: `steps` Newton-Schulz iterations, in bf16 where the device is fast at it.

    X <- a X + (b A + c A^2) X with A = X X^T, from X = G / |G|; singular values end between about 0.7 and 1.2.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(_fast_dtype(matrices.device))
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if tall := x.shape[-2] > x.shape[-1]:  # the smaller of X X^T and X^T X
        x = x.mT
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _fast_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if fast_bf16(device) else torch.float32


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: b <- m b + g;  W <- W - lr sqrt(max(1, rows/cols)) orthogonalise(g + m b).

    Nesterov momentum, no weight decay, for 2-D parameters only. All matrices of one shape are orthogonalised as a
    batch, which is what makes it cheap (torch.optim.Muon takes one matrix at a time).

    Where several processes train together, with the same gradients in each, every process keeps the momentum of its
    own share of the matrices and computes their updates, and one all_gather brings each process those of the others:
    the same result as alone, but for rounding. `state_dict` is whole on each process, and all of them must call it, so
    that a checkpoint does not depend on the number of processes.

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
            shared = [(parameter, owner) for parameter, owner in _owners(group) if parameter.grad is not None]
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter, owner in shared:
                if owner == _rank():
                    by_shape[parameter.shape].append(parameter)
            updates: dict[Tensor, Tensor] = {}
            for parameters in by_shape.values():
                updates |= zip(parameters, self._updates(parameters, group), strict=True)
            if _world_size() > 1:
                updates = _gather(updates, shared)
            for parameter, update in updates.items():
                rows, cols = parameter.shape
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / cols) ** 0.5)

    def _updates(self, parameters: list[Tensor], group: dict[str, Any]) -> Float[Tensor, "n rows cols"]:
        """Adds the gradients of matrices of one shape to their momenta, and orthogonalises what Nesterov looks at."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        momenta = [
            self.state[parameter].setdefault("momentum", torch.zeros_like(parameter)) for parameter in parameters
        ]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, gradients)
        ahead = torch._foreach_add(gradients, momenta, alpha=group["momentum"])
        return orthogonalise(torch.stack(ahead), group["newton_schulz_steps"])

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The whole state, on each process; where there are several, all must call it."""
        state = super().state_dict()
        if _world_size() > 1:
            everyones = [place for group in self.param_groups for place in _owners(group)]
            for index, (parameter, owner) in enumerate(everyones):
                momentum = self.state[parameter].get("momentum", torch.zeros_like(parameter))
                dist.broadcast(momentum, owner)
                state["state"][index] = {"momentum": momentum}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the whole state, whatever number of processes saved it, and keeps this process's share."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter, owner in _owners(group):
                if owner != _rank():
                    self.state.pop(parameter, None)


def share_out(shapes: Sequence[tuple[int, int]], world_size: int) -> list[int]:
    """Which process takes each matrix: the most work first, to the process that has the least so far.

    A Newton-Schulz step on rows x cols, with m the smaller and n the larger of both, goes like m^2 (2 n + m).
    """
    work = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    loads, owners = [0] * world_size, [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: -work[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += work[index]
    return owners


def _owners(group: dict[str, Any]) -> list[tuple[Tensor, int]]:
    """Every parameter of a group, with the process that computes its update."""
    shapes = [tuple(parameter.shape) for parameter in group["params"]]
    return list(zip(group["params"], share_out(shapes, _world_size()), strict=True))


def _gather(updates: dict[Tensor, Tensor], shared: list[tuple[Tensor, int]]) -> dict[Tensor, Tensor]:
    """The updates of all processes, in one collective: each sends its share as one vector, as long as the longest."""
    sizes, places = [0] * _world_size(), []
    for parameter, owner in shared:
        places.append((parameter, owner, slice(sizes[owner], sizes[owner] + parameter.numel())))
        sizes[owner] += parameter.numel()
    device = shared[0][0].device
    mine = torch.zeros(max(sizes), dtype=_fast_dtype(device), device=device)
    for parameter, owner, place in places:
        if owner == _rank():
            mine[place] = updates[parameter].flatten()
    gathered = mine.new_empty(len(sizes) * len(mine))
    dist.all_gather_single(gathered, mine)
    everyones = gathered.chunk(len(sizes))
    return {parameter: everyones[owner][place].view_as(parameter) for parameter, owner, place in places}


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


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
    adam = torch.optim.Adam(groups, betas=tuple(config.betas), eps=config.eps, fused=True)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adam]


def set_learning_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Every group's rate becomes its peak rate times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
