"""Time and memory of the attention backends, in interleaved rounds against SDPA's plain causal attention."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eval.timing import DTYPES, choose_device, compare, machine
from model.attend import BACKENDS, Transform, attend


@dataclass(frozen=True)
class Case:
    """One problem that every backend solves: q, k and v of (batch, n_head, length, head_dim)."""

    direction: str
    length: int
    head_dim: int
    n_head: int
    batch: int
    dtype: str

    def inputs(self, device: torch.device) -> list[Tensor]:
        """q, k and v as a model gives them: the heads lie inside time in memory."""
        shape = self.batch, self.length, self.n_head, self.head_dim
        grad = self.direction == "forward_backward"
        tensors = (torch.randn(shape, device=device, dtype=DTYPES[self.dtype]).transpose(1, 2) for _ in range(3))
        return [x.requires_grad_(grad) for x in tensors]


def bench_attention(config: Any) -> dict[str, Any]:
    """Measure every backend on every case of the config; `{"machine": {...}, "rows": [...]}`.

    A row's `seconds` is the median over the rounds, `ratio_to_sdpa` the median of the ratios within a round, and
    `peak_bytes` what one pass adds to the memory in use before it (None where the system cannot tell). Raises
    ValueError, before any measurement, for a key of the config that cannot be served.
    """
    device = _checked(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    cases = [
        Case(direction, length, head_dim, config.n_head, config.batch, config.dtype)
        for length, head_dim, direction in product(config.lengths, config.head_dims, config.directions)
    ]
    rows = []
    for case in tqdm(cases, desc="cases"):
        rows += _measure(case, list(config.backends), config.tau, config.repeats, device)
    return {"machine": machine(device), "rows": rows}


def _measure(case: Case, backends: list[str], tau: float, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    tensors = case.inputs(device)
    passes = {name: _pass(name, tensors, tau) for name in backends}
    rows = []
    for name, measured in compare(passes, "sdpa", repeats, device).items():
        ratio = measured.pop("ratio")
        rows.append(
            {
                "name": f"{name} {case.direction} T={case.length} d={case.head_dim}",
                "backend": name,
                **asdict(case),
                **measured,
                "tokens_per_second": case.batch * case.length / measured["seconds"],
                "ratio_to_sdpa": ratio,
            }
        )
    return rows


def _pass(backend: str, tensors: list[Tensor], tau: float) -> Callable[[], object]:
    """A forward, or forward and backward, pass: scale-invariant (eq. 16 at its boundary) except for SDPA."""
    q, k, v = tensors
    t = torch.arange(q.shape[2], device=q.device, dtype=torch.float32)
    square = (2 * torch.log1p(t / tau) + 1)[None]
    transform = None if backend == "sdpa" else Transform(scale=square.sqrt(), shift=1 - square)
    ones = torch.ones_like(q)

    def run() -> object:
        out = attend(q, k, v, transform, backend)
        return torch.autograd.grad(out, tensors, ones) if q.requires_grad else out

    return run


def _checked(config: Any) -> torch.device:
    """The device to measure on, or one line about the first key that cannot be served."""
    known = {"backends": BACKENDS, "directions": ("forward", "forward_backward")}
    for key, values in known.items():
        if unknown := [name for name in config[key] if name not in values]:
            raise ValueError(f"{key}={list(config[key])}: {unknown[0]!r} is unknown; use {', '.join(values)}")
    if "sdpa" not in config.backends:
        raise ValueError(f"backends={list(config.backends)} must hold 'sdpa', which the others are compared with")
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype={config.dtype} is unknown; use {', '.join(DTYPES)}")
    for key in ("lengths", "head_dims", "n_head", "batch", "repeats", "threads", "tau"):
        values = config[key] if key in ("lengths", "head_dims") else [config[key]]
        if (key != "threads" or config.threads is not None) and any(value <= 0 for value in values):
            raise ValueError(f"{key}={config[key]} must be positive")
    return choose_device(config.device)
