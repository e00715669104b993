"""What a position scheme does to the logits, as data: a scale and a shift per distance."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Formula:
    """Scale and shift as a function of the distance, for a kernel that would rather compute them than look them up.

        scale[h,t], shift[h,t] = function(t, *(parameter[h] for parameter in parameters))

    `function` is made of elementwise torch operations on tensors of any shape. A parameter has one value a head, or one
    for all heads, in fp32.
    """

    function: Callable[..., tuple[Tensor | None, Tensor | None]]
    parameters: tuple[Float[Tensor, "#h"], ...]


@dataclass(frozen=True)
class Transform:
    """Tables of an affine map of the attention logits by distance.

        logits[h,i,j] = scale[h,t] * <q_i, k_j> / sqrt(d) + shift[h,t],    t = i - j >= 0

    Column t of a table is its value at a distance of t tokens, in fp32 whatever the activations are (fp64 is taken
    with fp64 activations). h is the number of heads, or 1 for a table that all heads share; N is at least the number
    of keys. None is no scaling (1), or no shift (0). `formula` gives the same values in closed form, where a scheme has
    one and nothing in it is learned.
    """

    scale: Float[Tensor, "#h N"] | None = None
    shift: Float[Tensor, "#h N"] | None = None
    formula: Formula | None = None
