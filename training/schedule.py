"""The factor on every learning rate, as a function of the step."""

import math


def learning_rate_factor(
    step: int, steps: int, kind: str, cooldown_fraction: float | None = None, warmup_fraction: float | None = None
) -> float:
    """The factor of update number `step` (0-based) of `steps`.

    "constant_then_linear": 1, then (steps - step) / cooldown over the last cooldown = round(cooldown_fraction steps)
    updates (the paper's 162m: 1 for step < 3270, else (4578 - step) / 1308). "cosine": (1 + cos(pi step / steps)) / 2.
    Over the first warmup = round(warmup_fraction steps) updates either is multiplied by (step + 1) / warmup.

    Raises ValueError for another kind.
    """
    warmup = round((warmup_fraction or 0) * steps)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if kind == "constant_then_linear":
        cooldown = round((cooldown_fraction or 0) * steps)
        return rise * (min(1.0, (steps - step) / cooldown) if cooldown else 1.0)
    if kind == "cosine":
        return rise * (1 + math.cos(math.pi * step / steps)) / 2
    raise ValueError(f"schedule.kind={kind} is unknown; choose constant_then_linear or cosine")
