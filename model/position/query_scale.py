"""The query-scale slot: a factor s on the logits per layer, head and query position, possibly learned.

Each kind is a module: `forward(start, length, inference_length)` gives s for the query positions start .. length - 1.
To add one: write the class, name it in KINDS, and say `query_scale: {kind: NAME}` in a file of configs/position/.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from model.position.plan import Geometry


class LogN(nn.Module):
    """s[l,h,i] = a[l,h] log(n), with n = i + 1 the number of keys that query i sees.

    `a` starts at `start` and is learned, one per layer and head, unless `learned` is false. With count="length", n is
    the sequence length instead, the same for all queries. `start` is a number, or a list with one for each head.

    Raises ValueError for a `count` other than "keys" or "length".
    """

    def __init__(
        self, geometry: Geometry, start: float | Sequence[float] = 0.4, learned: bool = True, count: str = "keys"
    ):
        super().__init__()
        if count not in ("keys", "length"):
            raise ValueError(f"position.query_scale.count={count} is unknown; choose keys or length")
        self.count = count
        by_head = geometry.per_head("position.query_scale.start", start).float()
        self.factor = nn.Parameter(by_head.expand(geometry.n_layer, geometry.n_head).clone(), learned)

    def forward(self, start: int, length: int, inference_length: int) -> Float[Tensor, "L H T"]:
        if self.count == "keys":
            n = torch.arange(start + 1, length + 1, dtype=torch.float64, device=self.factor.device)
        else:
            n = torch.full((length - start,), inference_length, dtype=torch.float64, device=self.factor.device)
        return self.factor[..., None] * n.log().float()


class NoQueryScale(nn.Module):
    """s = 1."""

    def __init__(self, geometry: Geometry):
        super().__init__()

    def forward(self, start: int, length: int, inference_length: int) -> None:
        return None


KINDS = {"none": NoQueryScale, "logn": LogN}
