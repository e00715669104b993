"""What a run will take, from its config alone: parameters, tokens, floating-point operations, memory, hours.

The memory is counted tensor by tensor from what model/ and training/ keep, run eagerly: what torch.compile fuses takes
less, and what an allocator can't reuse comes on top (as do the libraries, and on a GPU the CUDA context).
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from model.attend.native import workspace_bytes
from model.attend.native_build import load_kernel
from model.cross_entropy import CHUNK_ELEMENTS
from model.gpt import GPT
from model.precision import fast_bf16, has_bf16_unit
from training.distributed import world_size
from training.flops import flops_per_token
from training.state import build_model
from training.step import micro_batch_rows

FP32 = 4  # bytes
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by part. Not all parts are there at once: `peak` is the worst of three moments of a step."""

    weights: int
    gradients: int
    gradients_stay: bool  # there from the start: accumulated, or in DDP's buckets; else they come as activations go
    optimizer_states: int
    batch: int
    activations: int  # what the forward pass keeps for the backward pass
    logits: int  # a chunk of them, with the gradients of the loss
    block_backward: int  # inside the block whose gradients are being made, beyond what was kept; attention's included
    update: int  # Muon's temporaries

    @property
    def moments(self) -> dict[str, int]:
        always = self.weights + self.optimizer_states + self.batch
        before = always + (self.gradients if self.gradients_stay else 0)
        return {
            "the loss": before + self.activations + self.logits,
            "the backward pass": before + self.activations + self.block_backward,
            "the update": always + self.gradients + self.update,
        }

    @property
    def peak(self) -> int:
        return max(self.moments.values())


def estimate_memory(config: Any, model: GPT, device: str, precision: str, devices: int = 1) -> Memory:
    """The memory of a training step of a config of train.py on one of `devices` devices ("cpu" or "cuda").

    Args:
        model: as `build_model` makes it of the config, on any device.
        precision: "fp32" or "bf16" (autocast).

    Raises ValueError when the sequences of a step can't be shared out evenly.
    """
    rows = rows_per_device(config, devices)
    length, width = config.train.length, config.model.width
    micro = micro_batch_rows(rows, length, config.train.micro_batch_tokens)
    tokens, rounded = micro * length, 2 if precision == "bf16" else FP32
    every = sum(parameter.numel() for parameter in model.parameters())
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    inside, output = sum(matrix.numel() for matrix in matrices), model.output.weight.numel()
    block = tokens * _bytes_of_a_block(config, model, device, rounded)
    entering = tokens * width * FP32  # the residual stream: into the first norm, each block and the last norm
    checkpointing = config.train.activation_checkpointing
    kept = entering * (config.model.n_layer + 2) if checkpointing else config.model.n_layer * block + 2 * entering
    copies = inside * rounded if precision == "bf16" else 0  # autocast keeps a bf16 copy of each matrix
    chunk = min(tokens, max(1, CHUNK_ELEMENTS // config.model.vocab_size)) * config.model.vocab_size
    of_the_loss = (
        tokens * width * rounded + output * FP32
    )  # its gradients: of the hidden states and of the output layer
    # a gradient of the MLP is 4 times as wide, beside two of the residual stream's size; attention's turn comes when
    # the MLP's are gone
    work = max(tokens * width * (4 * rounded + 2 * FP32), _attention_workspace(model, config, device, micro, rounded))
    if checkpointing:
        work += block - entering
    return Memory(
        weights=every * FP32,
        gradients=every * FP32,
        gradients_stay=devices > 1 or micro < rows,
        optimizer_states=(inside // devices + 2 * (every - inside)) * FP32,
        batch=2 * 8 * rows * (length + 1),
        activations=kept + copies,
        logits=of_the_loss + tokens * width * rounded + chunk * (FP32 if precision == "fp32" else FP32 + rounded),
        block_backward=of_the_loss + work,
        update=_update_workspace(matrices, 2 if fast_bf16_on(device) else FP32),
    )


def rows_per_device(config: Any, devices: int) -> int:
    """Sequences of a step for each device. Raises ValueError when they do not come out even."""
    length, per_step = config.train.length, config.train.tokens_per_step
    if devices < 1:
        raise ValueError(f"estimate.devices={devices} must be at least 1")
    if per_step % (length * devices):
        raise ValueError(
            f"train.tokens_per_step={per_step} is not a multiple of train.length={length} times {devices} devices; try "
            f"train.tokens_per_step={max(1, round(per_step / (length * devices))) * length * devices}"
        )
    return per_step // (length * devices)


def run_flops(config: Any, model: GPT) -> tuple[float, float]:
    """Floating-point operations of a whole run's training and of all its validations; the model may be on "meta"."""
    train, validation = config.train, config.validation
    training = train.steps * train.tokens_per_step * flops_per_token(model, train.length, backward=True)
    once = sum(validation.tokens * flops_per_token(model, length, backward=False) for length in validation.lengths)
    return training, validations(config) * once


def validations(config: Any) -> int:
    """How often a run validates: also before the first step and after the last."""
    return -(-config.train.steps // config.validation.every) + 1


def describe_run(config: Any) -> str:
    """The dry run: all of the above as text, for CPU and CUDA unless config.device names one of them.

    Raises ValueError as `estimate_memory`, and for estimate.utilisation outside (0, 1].
    """
    devices = config.estimate.devices or world_size()
    rows = rows_per_device(config, devices)
    if not 0 < config.estimate.utilisation <= 1:
        raise ValueError(f"estimate.utilisation={config.estimate.utilisation} must lie in (0, 1]")
    if not config.estimate.peak_tflops > 0:
        raise ValueError(f"estimate.peak_tflops={config.estimate.peak_tflops} must be above 0")
    model, train = build_model(config), config.train
    tokens = train.steps * train.tokens_per_step
    micro = micro_batch_rows(rows, train.length, train.micro_batch_tokens)
    training, validating = run_flops(config, model)
    speed = devices * config.estimate.utilisation * config.estimate.peak_tflops * 1e12
    lines = {
        "model": f"{config.model.name}, {config.position.name}, {train.length:,} tokens a sequence",
        "parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        "steps": f"{train.steps:,} of {train.tokens_per_step:,} tokens",
        "tokens": f"{tokens:,}",
        "devices": f"{devices}, each {rows} sequences a step: {rows // micro} forward passes of {micro}",
        "FLOPs": f"{training:.3g} to train, {validating:.3g} for {validations(config)} validations",
        "hours": f"{(training + validating) / speed / 3600:.2f} at {config.estimate.utilisation:.0%} of "
        f"{config.estimate.peak_tflops:g} TFLOP/s a device",
    }
    places = {"auto": ("cpu", "cuda")}.get(config.device, (config.device,))
    text = "\n".join(f"{name:12}{value}" for name, value in lines.items())
    return "\n\n".join([text, *(_describe_memory(config, model, place, devices) for place in places)])


def _describe_memory(config: Any, model: GPT, device: str, devices: int) -> str:
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if fast_bf16_on(device) else "fp32"
    memory = estimate_memory(config, model, device, precision, devices)
    moment, peak = max(memory.moments.items(), key=lambda pair: pair[1])
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer states": memory.optimizer_states,
        "activations": memory.activations,
        "logits chunk": memory.logits,
        "a block's work": memory.block_backward,
        "update": memory.update,
        "batch": memory.batch,
    }
    lines = [f"  {name:18}{size / GIB:9.3f} GiB" for name, size in parts.items()]
    return "\n".join(
        [
            f"memory of a {device} device in {precision}, an estimate:",
            *lines,
            f"  {'peak':18}{peak / GIB:9.3f} GiB, during {moment} (the parts are not all there at once)",
        ]
    )


def fast_bf16_on(device: str) -> bool:
    """As `fast_bf16`, but without asking a GPU: those that are worth training on are fast at bf16."""
    return device == "cuda" or fast_bf16(torch.device("cpu"))


def _bytes_of_a_block(config: Any, model: GPT, device: str, rounded: int) -> int:
    """What one block keeps of a token: tensors in fp32, tensors in the dtype of products, and statistics."""
    plan = model.position.plan(1)
    precise = 4  # the residual stream at both norms; q and k at theirs
    products = 9 if rounded == FP32 else 11  # a norm's output (autocast: once for each of q, k, v), q, k, v; relu: 4
    products += 1  # attention's output
    if device == "cpu" and rounded == FP32:
        precise -= 2 if plan.cos is not None else 4  # a norm keeps its output, which the next product keeps anyway
    if plan.transform is None and device == "cpu" and not _by_kernel(config, device, rounded):
        products += 1  # SDPA's output with its heads side by side
    if plan.query_scale is not None:
        products += 1  # q before its scale
    if config.position.core and config.position.core.get("kind") == "infini":
        precise += 2 if rounded == FP32 else 3  # sigma(q), sigma(k), and v in fp32
    return config.model.width * (precise * FP32 + products * rounded) + FP32 * (2 + 3 * config.model.n_head)


def _attention_workspace(model: GPT, config: Any, device: str, rows: int, rounded: int) -> int:
    """Of the CPU's kernel; of its strips: two of 128 rows, and six copies of a group of heads of 8192 keys (or one)."""
    if device != "cpu":
        return 0
    n_head, length = config.model.n_head, config.train.length
    if _by_kernel(config, device, rounded):
        return workspace_bytes(length, config.model.width // n_head, rows * n_head, torch.get_num_threads())
    if model.position.plan(1).transform is None:
        return 0
    keys = max(8192, length)
    return FP32 * (2 * 128 * keys + 6 * keys * (config.model.width // config.model.n_head))


def _by_kernel(config: Any, device: str, rounded: int) -> bool:
    """Whether a CPU's attention is that of model/attend/native.py."""
    if config.attention not in ("auto", "native") or isinstance(load_kernel(), str):
        return False
    return config.attention == "native" or rounded == FP32 or not has_bf16_unit(torch.device(device))


def _update_workspace(matrices: list[torch.nn.Parameter], fast: int) -> int:
    """Muon's, of the largest batch of one shape: twice in fp32 and three times inside Newton-Schulz."""
    by_shape: dict[torch.Size, int] = defaultdict(int)
    for matrix in matrices:
        by_shape[matrix.shape] += matrix.numel()
    return max(by_shape.values()) * (2 * FP32 + 3 * fast)
