"""Causal self-attention of one layer: projections, QK-norm, the position plan, and `attend`."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from model.attend import attend
from model.position import Plan


def rms_norm(x: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
    """x / sqrt(mean(x^2) + eps) over the last dimension, without a learned gain; in fp32, returns the dtype of x."""
    return F.rms_norm(x.float(), (x.shape[-1],), eps=torch.finfo(torch.float32).eps).to(x.dtype)


class CausalSelfAttention(nn.Module):
    """softmax(L) v of every head, with L as the position scheme's plan says (arXiv:2505.17083, section 3).

    q, k and v are separate matrices, because Muon orthogonalises each by itself.
    """

    def __init__(self, width: int, n_head: int, layer: int, backend: str = "auto"):
        super().__init__()
        self.n_head, self.layer, self.backend = n_head, layer, backend
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Float[Tensor, "B T C"], plan: Plan) -> Float[Tensor, "B T C"]:
        q = plan.query(rms_norm(self._heads(self.query(x))), self.layer)
        k = plan.rotate(rms_norm(self._heads(self.key(x))))
        v = self._heads(self.value(x))
        y = attend(q, k, v, plan.transform, self.backend)
        return self.out(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B H T d"]:
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
