"""How the output of attention lies in memory."""

from jaxtyping import Float
from torch import Tensor


def heads_inside(like: Float[Tensor, "B H T d"]) -> Float[Tensor, "B H T d"]:
    """Empty tensor that lies in memory as (B, T, H, d), so that joining the heads later is free."""
    B, H, T, d = like.shape
    return like.new_empty(B, T, H, d).transpose(1, 2)
