"""GPT-2 as the NanoGPT speedrun trains it: RMSNorm, QK-norm, squared ReLU, untied embeddings, no biases or dropout.

The only thing that differs between the compared models is the position scheme.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from model.attend import check_backend
from model.attention import CausalSelfAttention, rms_norm
from model.cache import Cache, LayerCache
from model.cross_entropy import linear_cross_entropy
from model.position import Plan, build_position
from model.position.plan import Geometry


@dataclass
class GPTConfig:
    """The sizes, the position scheme (as in configs/position/) and the length it is trained at. Defaults: 162m.

    With `activation_checkpointing` a training step keeps of each block only its input, and computes the block again in
    the backward pass: the same loss and gradients, less memory, a third more time.

    Raises ValueError when width is not divisible by n_head.
    """

    n_layer: int = 12
    n_head: int = 6
    width: int = 768
    vocab_size: int = 50304
    train_length: int = 4096
    position: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "auto"
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.width % self.n_head:
            raise ValueError(f"model.width={self.width} is not divisible by model.n_head={self.n_head}")

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            head_dim=self.width // self.n_head,
            n_head=self.n_head,
            train_length=self.train_length,
            n_layer=self.n_layer,
            reference_length=self.position.get("reference_length"),
        )


class _MLP(torch.autograd.Function):
    """relu(x W_up)^2 W_down; keeps relu(x W_up) for the backward pass and makes its square again, which is as wide."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        positive = F.linear(x, up).relu_()
        ctx.save_for_backward(x.to(positive.dtype), positive, up, down)  # autocast's dtype, where it is on
        return F.linear(positive.square(), down)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grad_outputs
        x, positive, up, down = ctx.saved_tensors
        d_down = grad.flatten(0, -2).mT @ positive.square().flatten(0, -2)
        inner = ((2 * grad) @ down.to(grad.dtype)).mul_(positive)
        d_up = inner.flatten(0, -2).mT @ x.flatten(0, -2)
        return inner @ up.to(grad.dtype), d_up.to(up.dtype), d_down.to(down.dtype)


class MLP(nn.Module):
    """relu(x W_up)^2 W_down, four times as wide inside."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        return _MLP.apply(x, self.up.weight, self.down.weight)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        core = config.position.get("core") or {}
        self.attention = CausalSelfAttention(config.width, config.geometry, core, config.attention)
        self.mlp = MLP(config.width)

    def forward(self, x: Float[Tensor, "B T C"], plan: Plan) -> Float[Tensor, "B T C"]:
        x = x + self.attention(rms_norm(x), plan)
        return x + self.mlp(rms_norm(x))

    def extend(
        self, x: Float[Tensor, "B T C"], plans: Sequence[Plan], caches: Sequence[LayerCache]
    ) -> Float[Tensor, "B T C"]:
        x = x + self.attention.extend(rms_norm(x), plans, caches)
        return x + self.mlp(rms_norm(x))


class GPT(nn.Module):
    """A decoder-only language model; `GPT(config)(tokens)` gives logits, with targets the loss.

    Initial values are those of the public recipe: token embedding N(0, 1), projections into a block uniform within
    +-1/sqrt(fan_in), projections out of a block and the output layer 0. So the first loss is ln(vocab_size).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.output = nn.Linear(config.width, config.vocab_size, bias=False)
        self.position = build_position(
            config.position,
            head_dim=config.geometry.head_dim,
            n_head=config.n_head,
            train_length=config.train_length,
            n_layer=config.n_layer,
        )
        check_backend(config.attention, self.position.plan(1).transform)
        nn.init.zeros_(self.output.weight)

    def forward(
        self, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"] | None = None, reduction: str = "mean"
    ) -> Float[Tensor, "B T V"] | Float[Tensor, ""] | Float[Tensor, "B T"]:
        """Logits (B, T, vocab_size), or with targets the cross-entropy in nats.

        Args:
            tokens: ids in [0, vocab_size).
            targets: the next ids; -100 does not count.
            reduction: "mean" over the counted tokens, "sum" or "none" (one loss a token).
        """
        x = self.hidden(tokens)
        if targets is None:
            return self.output(x)
        loss = linear_cross_entropy(x.flatten(0, 1), self.output.weight, targets.flatten(), reduction)
        return loss.view_as(targets) if reduction == "none" else loss

    def hidden(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T C"]:
        """What the output layer reads: the normalised residual stream after the last block."""
        plan = self.position.plan(tokens.shape[1])
        x = rms_norm(self.embedding(tokens))
        for layer, block in enumerate(self.blocks):
            x = self._run(block, x, plan.at_layer(layer))
        return rms_norm(x)

    def _run(self, block: nn.Module, x: Float[Tensor, "B T C"], plan: Plan) -> Float[Tensor, "B T C"]:
        if self.config.activation_checkpointing and torch.is_grad_enabled():
            # a block draws no random numbers, so none need to be drawn again
            return checkpoint(block, x, plan, use_reentrant=False, preserve_rng_state=False)
        return block(x, plan)

    def new_cache(self, rows: int, inference_length: int) -> Cache:
        """An empty cache for `rows` sequences of equal length that grow to `inference_length` tokens at most."""
        cores = [block.attention.core for block in self.blocks if isinstance(block, Block)]
        return Cache([core.new_cache(rows, inference_length) for core in cores], rows, inference_length)

    @torch.no_grad()
    def extend(self, tokens: Int[Tensor, "B T"], caches: Sequence[Cache]) -> Float[Tensor, "B V"]:
        """Logits of what follows the last of the tokens, which themselves follow what the caches hold.

        Equal to `forward` on the whole sequences, but for rounding, at the caches' inference length. The caches take
        the rows in order; their lengths may differ, and everything but attention runs on all rows together.

        Raises ValueError when a sequence would grow beyond its cache's inference length.
        """
        count = tokens.shape[1]
        plans = [self.position.plan(cache.length + count, cache.length, cache.inference_length) for cache in caches]
        x = rms_norm(self.embedding(tokens))
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x = block.extend(x, [plan.at_layer(layer) for plan in plans], [cache.layers[layer] for cache in caches])
        for cache in caches:
            cache.length += count
        return self.output(rms_norm(x[:, -1]))
