"""The logits slot: L = scale[h,t] * S + shift[h,t], functions of the distance t = i - j in tokens.

Each kind is a module: `forward(t)` gives the two tables for distances t >= 0 (fp64), per head or shared by all heads;
None stands for scale 1 or shift 0. To add one: write the class, name it in KINDS, and say `logits: {kind: NAME}` in a
file of configs/position/.
"""

import math

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from model.position.plan import Geometry

Tables = tuple[Float64[Tensor, "h N"] | None, Float64[Tensor, "h N"] | None]


class ScaleInvariant(nn.Module):
    """Scale-invariant attention (arXiv:2505.17083, eq. 16): L = a_t S + m_t.

        a_t = sqrt(2 [log(t/tau + 1) - log(alpha) + beta/alpha]),    m_t = -a_t^2 + beta/alpha

    With Gaussian scores S ~ N(0, 1) then E[exp L] = alpha/(t/tau + 1) and E[L exp L] = beta/(t/tau + 1), so any range
    of distances [t, t Delta) holds the same total attention, alpha tau ln(Delta), whatever its scale. alpha = beta =
    e^0.5, taken when neither is given, leaves the token itself alone: a_0 = 1, m_0 = 0.

    Args:
        tau: the distance in tokens where the scaling sets in.
        alpha, beta: the constants of the two conditions; both or neither.

    Raises ValueError unless tau > 0, alpha > 0 and beta >= alpha log(alpha).
    """

    def __init__(self, geometry: Geometry, tau: float = 10.0, alpha: float | None = None, beta: float | None = None):
        super().__init__()
        if (alpha is None) != (beta is None):
            raise ValueError(
                f"position.logits.alpha={alpha} and position.logits.beta={beta} go together; give both, or neither "
                "for alpha = beta = e^0.5"
            )
        if alpha is None or beta is None:
            alpha = beta = math.exp(0.5)
        if not (tau > 0 and math.isfinite(tau)):
            raise ValueError(f"position.logits.tau={tau} must be above 0 (a distance in tokens; the paper's is 10)")
        if not alpha > 0:
            raise ValueError(f"position.logits.alpha={alpha} must be above 0")
        if not beta >= alpha * math.log(alpha):
            raise ValueError(
                f"position.logits.beta={beta} must be at least alpha log(alpha) = {alpha * math.log(alpha):.6g}, "
                "or a_0^2 would be negative"
            )
        self.tau, self.alpha, self.beta = tau, alpha, beta

    def forward(self, t: Float64[Tensor, "N"]) -> Tables:
        ratio = self.beta / self.alpha
        square = 2 * (torch.log1p(t / self.tau) - math.log(self.alpha) + ratio)
        square = square.clamp_min(0)  # beta = alpha log(alpha) gives a_0^2 = 0 up to rounding
        return square.sqrt()[None], (ratio - square)[None]


class ALiBi(nn.Module):
    """Attention with linear biases (arXiv:2108.12409): L = S - slope_h t.

    For H heads, H a power of two, slope_h = 2^(-8h/H), h = 1 .. H; else the slopes of the closest lower power of two
    followed by every other slope of twice that.
    """

    def __init__(self, geometry: Geometry):
        super().__init__()
        self.slopes = alibi_slopes(geometry.n_head)

    def forward(self, t: Float64[Tensor, "N"]) -> Tables:
        return None, -torch.tensor(self.slopes, dtype=t.dtype, device=t.device)[:, None] * t


def alibi_slopes(n_head: int) -> list[float]:
    """The slope of each head, in nats per token."""
    power = 2 ** math.floor(math.log2(n_head))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return slopes + between[: n_head - power]


class NoTransform(nn.Module):
    """L = S."""

    def __init__(self, geometry: Geometry):
        super().__init__()

    def forward(self, t: Float64[Tensor, "N"]) -> Tables:
        return None, None


KINDS = {"none": NoTransform, "alibi": ALiBi, "scale_invariant": ScaleInvariant}
