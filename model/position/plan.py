"""What a position scheme gives to attention: data, never a kernel."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.attend import Transform


@dataclass(frozen=True)
class Geometry:
    """What the slots may depend on besides their own keys.

    `reference_length` is the training length that a scheme's constants are stated for. At another training length
    every constant that is a length (a segment, or a rotary base, which sets the longest period) is multiplied by
    `length_factor`, so a small model is a scaled copy of the large one. None takes the constants as they are.
    """

    head_dim: int
    n_head: int
    train_length: int
    n_layer: int = 1
    reference_length: int | None = None

    def __post_init__(self) -> None:
        if self.reference_length is not None and self.reference_length < 1:
            raise ValueError(f"position.reference_length={self.reference_length} must be at least 1 token, or null")

    @property
    def length_factor(self) -> float:
        return 1.0 if self.reference_length is None else self.train_length / self.reference_length

    def per_head(self, key: str, value: float | Sequence[float]) -> Float64[Tensor, "h"]:
        """A number for all heads (h = 1) or a list with one for each (h = n_head), in fp64.

        Raises ValueError, naming `key`, for anything else.
        """
        values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        if any(isinstance(number, bool) or not isinstance(number, int | float) for number in values):
            raise ValueError(f"{key}={value} must be a number, or a list of {self.n_head} numbers, one for each head")
        if isinstance(value, Sequence) and len(values) != self.n_head:
            raise ValueError(f"{key}={value} has {len(values)} numbers for {self.n_head} heads; give one for each head")
        numbers = torch.tensor(values, dtype=torch.float64)
        if not numbers.isfinite().all():
            raise ValueError(f"{key}={value} must be finite")
        return numbers


@dataclass(frozen=True)
class Plan:
    """The tables of one forward pass, all fp32; rows are the query positions i = start .. length - 1.

        L[h,i,j] = scale[h,t] * s[l,h,i] * temperature * <R_i q_i, R_j k_j> / sqrt(d) + shift[h,t],    t = i - j >= 0

    Attributes:
        angular_frequency: radians per token of each pair of dimensions, fp64; None without a rotation.
        cos, sin: of the angles i * angular_frequency; None without a rotation.
        temperature: factor on all logits (YaRN's, else 1).
        query_scale: s, a factor per layer, head and query position; None is 1.
        transform: scale and shift by distance t = 0 .. length - 1; None is scale 1 and shift 0.
    """

    length: int
    angular_frequency: Float[Tensor, "pairs"] | None = None
    cos: Float[Tensor, "T pairs"] | None = None
    sin: Float[Tensor, "T pairs"] | None = None
    temperature: float = 1.0
    query_scale: Float[Tensor, "L H T"] | None = None
    transform: Transform | None = field(default=None)

    def rotate(self, x: Float[Tensor, "B H T d"]) -> Float[Tensor, "B H T d"]:
        """R x: turns the pair of dimensions (c, c + d/2) by its angle, in fp32; returns the dtype of x."""
        if self.cos is None or self.sin is None:
            return x
        rotated = _Rotation.apply(x, self.cos, self.sin)
        assert isinstance(rotated, Tensor)
        return rotated

    def at_layer(self, layer: int) -> "Plan":
        """The plan that one layer sees: of the query scales only its own, so that all layers run the same code."""
        if self.query_scale is None:
            return self
        return replace(self, query_scale=self.query_scale[layer : layer + 1])

    def query(self, q: Float[Tensor, "B H T d"], layer: int = 0) -> Float[Tensor, "B H T d"]:
        """s * temperature * R q of one layer: everything of the equation that depends on the query alone."""
        q = self.rotate(q)
        if self.query_scale is not None:
            return (q * (self.query_scale[layer] * self.temperature)[..., None]).to(q.dtype)
        return q if self.temperature == 1.0 else q * self.temperature


class _Rotation(torch.autograd.Function):
    """Turns the pairs of dimensions (c, c + d/2) by their angles; the gradient is turned back.

    Written out because it passes over the memory a third as often as the same in autograd's operations.
    """

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Float[Tensor, "B H T d"], cos: Float[Tensor, "T pairs"], sin: Float[Tensor, "T pairs"]) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), in fp32; returns the dtype of x."""
    pairs = x.float().unflatten(-1, (2, -1))
    turned = pairs * cos[:, None]
    turned[..., 0, :].addcmul_(pairs[..., 1, :], sin, value=-1)
    turned[..., 1, :].addcmul_(pairs[..., 0, :], sin)
    return turned.flatten(-2).to(x.dtype)
