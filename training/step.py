"""One update of the weights, from the sequences that belong to this process."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.compiler.config
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT
from training.distributed import Process
from training.optimizer import set_learning_rates
from training.state import TrainState


class StepResult(NamedTuple):
    """What a step measured, the same on every process.

    Attributes:
        loss: mean over the targets of all processes, in nats.
        grad_norm: the 2-norm of the gradient of the mean loss, over all parameters.
    """

    loss: float
    grad_norm: float

    @property
    def nonfinite(self) -> list[str]:
        """Which of "loss" and "gradient" is infinite or not a number."""
        named = {"loss": self.loss, "gradient": self.grad_norm}
        return [name for name, value in named.items() if not math.isfinite(value)]


def micro_batch_rows(rows: int, length: int, micro_batch_tokens: int) -> int:
    """Sequences in a forward pass: the largest divisor of `rows` with at most `micro_batch_tokens`, at least 1."""
    most = max(1, micro_batch_tokens // length)
    return max(divisor for divisor in range(1, min(rows, most) + 1) if rows % divisor == 0)


def compile_blocks(model: GPT, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compiles the model block by block, in place: one compilation of a shape serves all layers.

    For each shape of a batch anew, as kernels for any shape are slower; training and each validation length have one.
    """
    torch.compiler.config.recompile_limit = 64  # past its own of 8, dynamo would go on uncompiled
    for block in model.blocks:
        block.compile(dynamic=False, backend=backend)


def wrap(model: nn.Module, process: Process) -> nn.Module:
    """The model as the training step calls it: gradients are averaged over the processes."""
    if process.world_size == 1:
        return model
    # No buffer ever changes, so none needs to be sent around at each step.
    return DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)


def train_step(
    state: TrainState,
    forward: nn.Module,
    tokens: Int[Tensor, "rows T"],
    targets: Int[Tensor, "rows T"],
    micro_rows: int,
    factor: float,
    process: Process,
) -> StepResult:
    """Accumulates the gradient of the mean loss over all targets of all processes, and updates the weights once.

    The losses are summed over targets and divided once, so the split into processes and micro-batches does not matter
    but for rounding. A loss or gradient that is not finite, on whatever process, changes no weight and no optimizer on
    any of them; the step is counted all the same, also in `state.nonfinite`.

    Args:
        forward: `wrap(state.model, process)`, possibly compiled.
        tokens, targets: this process's sequences of the step; a target of -100 does not count.
        factor: of the schedule, on every learning rate.
    """
    total = torch.zeros((), device=process.device)
    counted = process.sum(_to((targets >= 0).sum(), process))
    share = process.world_size / counted  # DDP averages over processes
    pieces = list(zip(tokens.split(micro_rows), targets.split(micro_rows), strict=True))
    for index, (inputs, wanted) in enumerate(pieces):
        with _gradients_stay_here(forward, index < len(pieces) - 1):
            with process.autocast():
                loss = forward(_to(inputs, process), _to(wanted, process), reduction="sum")
            (loss * share).backward()
        total += loss.detach()
    result = _result(state, total / counted, process)
    state.step += 1
    for name in result.nonfinite:
        state.nonfinite[name] += 1
    set_learning_rates(state.optimizers, factor)
    for optimizer in state.optimizers:
        if not result.nonfinite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return result


def _result(state: TrainState, loss: Tensor, process: Process) -> StepResult:
    """One sum over the processes, and the only wait for the device in a step."""
    gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    losses, norms = process.sum(torch.stack([loss, norm])).tolist()
    return StepResult(losses, norms / process.world_size)  # every process has the norm of the averaged gradient


def _gradients_stay_here(forward: nn.Module, stay: bool) -> Any:
    """Only the last micro-batch's backward pass sends gradients around."""
    return forward.no_sync() if stay and isinstance(forward, DistributedDataParallel) else nullcontext()


def _to(x: Tensor, process: Process) -> Tensor:
    return x.to(process.device, non_blocking=True)
