"""Time and memory of attention: backend x position scheme x length, in interleaved rounds against plain SDPA.

What is timed is all that a scheme does to q, k and v of one layer: rotation, query scale, and attention itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eval.timing import DTYPES, choose_device, compare
from model.attend import BACKENDS, attend
from model.attend.flex import unsupported
from model.attend.native import unavailable as unavailable_natively
from model.position import Plan, build_position
from training.environment import machine
from training.flops import peak_flops

REFERENCE = "plain sdpa"


@dataclass(frozen=True)
class Case:
    """One problem that every candidate solves: q, k and v of (batch, n_head, length, head_dim)."""

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

    @property
    def flops(self) -> float:
        """Of the two matrix products over the causal half of T x T; the backward pass has five such products."""
        forward = 2 * self.batch * self.n_head * self.length**2 * self.head_dim
        return forward * (3.5 if self.direction == "forward_backward" else 1)


def bench_attention(config: Any, positions: Mapping[str, Any]) -> dict[str, Any]:
    """Measure every backend of the config under every scheme of `positions` that it can serve, on every case.

    Returns {"machine": {...}, "rows": [...]}. A row's `seconds` is the median over the rounds, `ratio_to_sdpa` the
    median of its ratios within a round to SDPA without any scheme, `peak_bytes` what one pass adds to the memory in use
    before it (None where the system can't tell), and `utilisation` its floating-point operations per second as a share
    of what the card can do (None on a CPU). Raises ValueError, before any measurement, for a key that can't be served.
    """
    device = _checked(config, positions)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    cases = [
        Case(direction, length, head_dim, config.n_head, config.batch, config.dtype)
        for length, head_dim, direction in product(config.lengths, config.head_dims, config.directions)
    ]
    rows = []
    for case in tqdm(cases, desc="cases"):
        rows += _measure(case, config, positions, device)
    return {"machine": machine(device), "rows": rows}


def _measure(case: Case, config: Any, positions: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    tensors = case.inputs(device)
    passes: dict[tuple[str, str], Callable[[], object]] = {
        (REFERENCE, "sdpa"): _pass(Plan(case.length), "sdpa", tensors)
    }
    for name, scheme in positions.items():
        plan = _plan(scheme, case, config.train_length, device)
        for backend in config.backends:
            if _can_serve(backend, plan, tensors):
                passes[name, backend] = _pass(plan, backend, tensors)
    peak = peak_flops(device)
    rows = []
    for (name, backend), measured in compare(passes, (REFERENCE, "sdpa"), config.repeats, device).items():
        ratio = measured.pop("ratio")
        rows.append(
            {
                "name": f"{name} {backend} {case.direction} T={case.length} d={case.head_dim}",
                "position": name,
                "backend": backend,
                **asdict(case),
                **measured,
                "tokens_per_second": case.batch * case.length / measured["seconds"],
                "ratio_to_sdpa": ratio,
                "utilisation": None if peak is None else case.flops / measured["seconds"] / peak,
            }
        )
    return rows


def _plan(position: Any, case: Case, train_length: int, device: torch.device) -> Plan:
    """The scheme's plan, its learned query scale as a leaf of the graph."""
    scheme = build_position(position, head_dim=case.head_dim, n_head=case.n_head, train_length=train_length).to(device)
    with torch.no_grad():
        plan = scheme.plan(case.length)
    if plan.query_scale is None:
        return plan
    return replace(plan, query_scale=plan.query_scale.requires_grad_(case.direction == "forward_backward"))


def _can_serve(backend: str, plan: Plan, tensors: list[Tensor]) -> bool:
    """An impossible combination has no row."""
    if backend.startswith("flex"):
        q, k, v = tensors
        closed = backend == "flex" or plan.transform is None or plan.transform.formula is not None
        return closed and not unsupported(q, k, v, plan.transform)
    if backend == "native":
        return not unavailable_natively(tensors[0])
    return backend != "sdpa" or plan.transform is None


def _pass(plan: Plan, backend: str, tensors: list[Tensor]) -> Callable[[], object]:
    """A forward, or forward and backward, pass of the scheme through the backend."""
    q, k, v = tensors
    leaves = tensors if plan.query_scale is None else [*tensors, plan.query_scale]
    ones = torch.ones_like(q)

    def run() -> object:
        out = attend(plan.query(q), plan.rotate(k), v, plan.transform, backend)
        return torch.autograd.grad(out, leaves, ones) if q.requires_grad else out

    return run


def _checked(config: Any, positions: Mapping[str, Any]) -> torch.device:
    """The device to measure on, or one line about the first key that cannot be served."""
    known = {"backends": BACKENDS, "directions": ("forward", "forward_backward")}
    for key, values in known.items():
        if unknown := [name for name in config[key] if name not in values]:
            raise ValueError(f"{key}={list(config[key])}: {unknown[0]!r} is unknown; use {', '.join(values)}")
    for name, scheme in positions.items():
        if (kind := scheme.get("core", {}).get("kind", "none")) != "none":
            raise ValueError(
                f"positions={list(config.positions)}: {name} has attention of its own (core.kind={kind}), which is no "
                f"backend; leave it out, or measure it in a whole model: python scripts/bench.py model "
                f"positions=[rope,{name}]"
            )
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype={config.dtype} is unknown; use {', '.join(DTYPES)}")
    for key in ("lengths", "head_dims", "n_head", "batch", "repeats", "threads", "train_length"):
        values = config[key] if key in ("lengths", "head_dims") else [config[key]]
        if (key != "threads" or config.threads is not None) and any(value <= 0 for value in values):
            raise ValueError(f"{key}={config[key]} must be positive")
    return choose_device(config.device)
