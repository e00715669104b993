"""The logits slot: L = scale[h,t] * S + shift[h,t], functions of the distance t = i - j in tokens.

Each kind is a module: `forward(t)` gives the two tables for distances t >= 0 (fp64), per head or shared by all heads;
None stands for scale 1 or shift 0. A kind may also have a `formula()`, the same in closed form (None if it has none),
which the backend flex_closed_form needs. To add one: write the class, name it in KINDS, and say `logits: {kind: NAME}`
in a file of configs/position/.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from model.attend import Formula
from model.position.plan import Geometry

PerHead = float | Sequence[float]
Tables = tuple[Float64[Tensor, "h N"] | None, Float64[Tensor, "h N"] | None]


class ScaleInvariant(nn.Module):
    """Scale-invariant attention (arXiv:2505.17083, eq. 16): L = a_t S + m_t.

        a_t = sqrt(2 [log(t/tau + 1) - log(alpha) + beta/alpha]),    m_t = -a_t^2 + beta/alpha

    With Gaussian scores S ~ N(0, 1) then E[exp L] = alpha/(t/tau + 1) and E[L exp L] = beta/(t/tau + 1), so any range
    of distances [t, t Delta) holds the same total attention, alpha tau ln(Delta), whatever its scale. alpha = beta =
    e^0.5, taken when neither is given, leaves the token itself alone: a_0 = 1, m_0 = 0.

    Args:
        tau: the distance in tokens where the scaling sets in; a number, or a list with one for each head.
        alpha, beta: the constants of the two conditions, each a number or a list; both or neither.
        learned: whether tau is trained, as exp(log_tau), one for each head and shared by the layers.

    Raises ValueError unless tau > 0, alpha > 0 and beta >= alpha log(alpha).
    """

    def __init__(
        self,
        geometry: Geometry,
        tau: PerHead = 10.0,
        alpha: PerHead | None = None,
        beta: PerHead | None = None,
        learned: bool = False,
    ):
        super().__init__()
        if alpha is None and beta is None:
            alpha = beta = math.exp(0.5)
        if alpha is None or beta is None:
            raise ValueError(
                f"position.logits.alpha={alpha} and position.logits.beta={beta} go together; give both, or neither "
                "for alpha = beta = e^0.5"
            )
        self.alpha = geometry.per_head("position.logits.alpha", alpha)
        self.beta = geometry.per_head("position.logits.beta", beta)
        start = geometry.per_head("position.logits.tau", tau)
        if not (start > 0).all():
            raise ValueError(f"position.logits.tau={tau} must be above 0 (a distance in tokens; the paper's is 10)")
        if not (self.alpha > 0).all():
            raise ValueError(f"position.logits.alpha={alpha} must be above 0")
        least = self.alpha * self.alpha.log()
        if not (self.beta >= least).all():
            raise ValueError(
                f"position.logits.beta={beta} must be at least alpha log(alpha) = {least.max():.6g}, or a_0^2 would be "
                "negative"
            )
        if learned:
            self.log_tau = nn.Parameter(start.log().expand(geometry.n_head).float())
        else:
            self.log_tau = start.log()

    def forward(self, t: Float64[Tensor, "N"]) -> Tables:
        device = self.log_tau.device
        return _affine_map(t.to(device), *(parameter.to(device)[:, None] for parameter in self._parameters64()))

    def formula(self) -> Formula | None:
        if self.log_tau.requires_grad:
            return None
        return Formula(_affine_map, tuple(parameter.float() for parameter in self._parameters64()))

    def _parameters64(self) -> tuple[Float64[Tensor, "_"], ...]:
        """tau, beta/alpha - log(alpha), beta/alpha."""
        ratio = self.beta / self.alpha
        return self.log_tau.double().exp(), ratio - self.alpha.log(), ratio


def _affine_map(t: Tensor, tau: Tensor, half_square_at_0: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """a_t and m_t of eq. 16."""
    square = 2 * (torch.log1p(t / tau) + half_square_at_0)
    square = square.clamp_min(0)  # beta = alpha log(alpha) gives a_0^2 = 0 up to rounding
    return square.sqrt(), ratio - square


class ALiBi(nn.Module):
    """Attention with linear biases (arXiv:2108.12409): L = S - slope_h t.

    For H heads, H a power of two, slope_h = 2^(-8h/H), h = 1 .. H; else the slopes of the closest lower power of two
    followed by every other slope of twice that. `slopes` replaces them: a number, or a list with one for each head.
    """

    def __init__(self, geometry: Geometry, slopes: PerHead | None = None):
        super().__init__()
        chosen = alibi_slopes(geometry.n_head) if slopes is None else slopes
        self.slopes = geometry.per_head("position.logits.slopes", chosen)

    def forward(self, t: Float64[Tensor, "N"]) -> Tables:
        return _minus_slope(t, self.slopes[:, None])

    def formula(self) -> Formula:
        return Formula(_minus_slope, (self.slopes.float(),))


def _minus_slope(t: Tensor, slope: Tensor) -> tuple[None, Tensor]:
    return None, -slope * t


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
