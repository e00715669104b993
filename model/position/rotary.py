"""The rotary slot: an angular frequency per pair of dimensions, possibly depending on the inference length.

Each kind derives from NoRotation and has one method, or two: `angular_frequency(length)` gives d/2 numbers in radians
per token, constants, from the longest sequence that the model will see in this pass; `temperature(length)` is a factor
on all logits. To add one: write the class, name it in KINDS, and say `rotary: {kind: NAME}` in a file of
configs/position/.
"""

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from model.position.plan import Geometry


class NoRotation:
    """R is the identity; also what every rotary kind derives from."""

    def __init__(self, geometry: Geometry):
        pass

    def angular_frequency(self, length: int) -> Float64[Tensor, "pairs"] | None:
        """Radians per token of each pair of dimensions at this inference length; None turns nothing."""
        return None

    def temperature(self, length: int) -> float:
        """Factor on all logits at this inference length."""
        return 1.0


class RoPE(NoRotation):
    """Rotary embedding (arXiv:2104.09864): pair c of d/2 turns by f_c = base^(-2c/d) radians per token.

    Raises ValueError for an odd head dimension or a base that is not above 0.
    """

    def __init__(self, geometry: Geometry, base: float = 10000.0):
        if geometry.head_dim % 2:
            raise ValueError(
                f"head dimension {geometry.head_dim} is odd, and position.rotary turns pairs of dimensions; "
                "choose model.width and model.n_head with an even model.width / model.n_head"
            )
        if not base > 0:
            raise ValueError(f"position.rotary.base={base} must be above 0")
        self.head_dim = geometry.head_dim
        self.train_length = geometry.train_length
        self.base = base * geometry.length_factor

    def angular_frequency(self, length: int) -> Float64[Tensor, "pairs"]:
        return self._frequency(self.base)

    def _frequency(self, base: float) -> Float64[Tensor, "pairs"]:
        pair = torch.arange(self.head_dim // 2, dtype=torch.float64)
        return base ** (-2 * pair / self.head_dim)


class PRoPE(RoPE):
    """RoPE without its low frequencies (p-RoPE, arXiv:2410.06205): only the first `p` of the pairs turn.

    With n = p d/2 turning pairs, f_c = base^(-c/(n-1)) for c < n, both end points included, and 0 for the rest: at
    d = 128, p = 0.5, base = 1024 that is 32 frequencies from 1 down to 1/1024 radians per token, and 32 zeros.

    Raises ValueError when p d/2 is not a whole number of at least 2.
    """

    def __init__(self, geometry: Geometry, base: float = 1024.0, p: float = 0.5):
        super().__init__(geometry, base)
        self.turning = round(p * self.head_dim / 2)
        if self.turning != p * self.head_dim / 2 or not 2 <= self.turning <= self.head_dim // 2:
            raise ValueError(
                f"position.rotary.p={p} of the {self.head_dim // 2} pairs of a head must be a whole number of at least "
                "2; use another p, or a head dimension (model.width / model.n_head) that is a multiple of 4"
            )

    def angular_frequency(self, length: int) -> Float64[Tensor, "pairs"]:
        pair = torch.arange(self.turning, dtype=torch.float64)
        frequency = self.base ** (-pair / (self.turning - 1))
        return torch.cat([frequency, torch.zeros(self.head_dim // 2 - self.turning, dtype=torch.float64)])


class NTK(RoPE):
    """NTK-aware scaling: beyond the training length, RoPE with base * (length / train_length)^(d / (d - 2)).

    The lowest frequency then makes over `length` the turn that it made over `train_length`; the highest stays 1.
    Raises ValueError for a head dimension under 4.
    """

    def __init__(self, geometry: Geometry, base: float = 10000.0):
        super().__init__(geometry, base)
        if self.head_dim < 4:
            raise ValueError(f"head dimension {self.head_dim} is too small for position.rotary.kind=ntk; it needs 4")

    def angular_frequency(self, length: int) -> Float64[Tensor, "pairs"]:
        stretch = max(1.0, length / self.train_length)
        return self._frequency(self.base * stretch ** (self.head_dim / (self.head_dim - 2)))


class YaRN(RoPE):
    """YaRN (arXiv:2309.00071): beyond the training length, RoPE whose low frequencies are divided by s.

    With s = length / train_length > 1, pair c's frequency becomes f_c ((1 - r_c) + r_c / s), where r_c rises
    linearly in c from 0 at floor(c(fast_turns)) to 1 at ceil(c(slow_turns)), and
    c(n) = d ln(train_length / (2 pi n)) / (2 ln base) is the pair that turns n times over the training length. q and
    k are each multiplied by temperature_slope ln(s) + 1, that is the logits by its square. Up to the training length
    it is exactly RoPE.
    """

    def __init__(
        self,
        geometry: Geometry,
        base: float = 10000.0,
        fast_turns: float = 32.0,
        slow_turns: float = 1.0,
        temperature_slope: float = 0.1,
    ):
        super().__init__(geometry, base)
        if not fast_turns > slow_turns > 0:
            raise ValueError(
                f"position.rotary.fast_turns={fast_turns} must be above position.rotary.slow_turns={slow_turns}, "
                "and both above 0"
            )
        if not self.base > 1:
            raise ValueError(f"position.rotary.base={base} must be above 1 for kind=yarn, also after scaling by length")
        self.fast_turns, self.slow_turns, self.temperature_slope = fast_turns, slow_turns, temperature_slope

    def angular_frequency(self, length: int) -> Float64[Tensor, "pairs"]:
        frequency = self._frequency(self.base)
        stretch = length / self.train_length
        if stretch <= 1:
            return frequency
        start = max(math.floor(self._pair_turning(self.fast_turns)), 0)
        end = min(math.ceil(self._pair_turning(self.slow_turns)), self.head_dim - 1)
        pair = torch.arange(self.head_dim // 2, dtype=torch.float64)
        # A ramp of no width would divide by zero; a thousandth of a pair makes it a step.
        ramp = ((pair - start) / max(end - start, 0.001)).clamp(0, 1)
        return frequency * ((1 - ramp) + ramp / stretch)

    def temperature(self, length: int) -> float:
        stretch = max(1.0, length / self.train_length)
        return (self.temperature_slope * math.log(stretch) + 1) ** 2

    def _pair_turning(self, turns: float) -> float:
        return self.head_dim * math.log(self.train_length / (2 * math.pi * turns)) / (2 * math.log(self.base))


KINDS = {"none": NoRotation, "rope": RoPE, "p_rope": PRoPE, "ntk": NTK, "yarn": YaRN}
