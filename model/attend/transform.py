"""What a position scheme does to the logits, as data: a scale and a shift per distance."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Transform:
    """Tables of an affine map of the attention logits by distance.

        logits[h,i,j] = scale[h,t] * <q_i, k_j> / sqrt(d) + shift[h,t],    t = i - j >= 0

    Column t of a table is its value at a distance of t tokens, in fp32 whatever the activations are (fp64 is taken
    with fp64 activations). h is the number of heads, or 1 for a table that all heads share; N is at least the number
    of keys. None is no scaling (1), or no shift (0).
    """

    scale: Float[Tensor, "#h N"] | None = None
    shift: Float[Tensor, "#h N"] | None = None
