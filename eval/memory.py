"""How much memory decoding will take, estimated before it takes it, and how much there is."""

import re
from pathlib import Path

import torch

from model.gpt import GPT

GIB = 1 << 30
# Numbers a token and unit of width that a block's forward pass holds at its peak: the residual stream and its norm,
# q, k, v, and three steps of the MLP at four times the width.
ACTIVATIONS = 18


def cache_bytes(model: GPT, rows: int, length: int, precision: str) -> int:
    """Bytes of the keys and values of `rows` sequences in all layers (of Infini-attention, those of one segment)."""
    tokens = sum(layer.capacity for layer in model.new_cache(rows, length).layers)
    return 2 * rows * tokens * model.config.width * (2 if precision == "bf16" else 4)


def decoding_bytes(model: GPT, rows: int, length: int, tokens_at_once: int, precision: str) -> int:
    """`cache_bytes`, the activations of one forward pass, and the position tables of the length."""
    config = model.config
    fed = max(rows, min(tokens_at_once, rows * length))
    activations = 4 * ACTIVATIONS * config.width * fed + 4 * config.vocab_size * rows
    tables = length * (16 * config.geometry.head_dim + 24 * config.n_head)  # cos, sin, scale and shift, made in fp64
    return cache_bytes(model, rows, length, precision) + activations + tables


def check_memory(model: GPT, rows: int, length: int, tokens_at_once: int, precision: str, remedy: str) -> None:
    """Raises ValueError, with `remedy`, when decoding at this length needs more than the model's device has left."""
    device = model.output.weight.device
    needed, there = decoding_bytes(model, rows, length, tokens_at_once, precision), available_bytes(device)
    if there is not None and needed > there:
        cached = cache_bytes(model, rows, length, precision)
        raise ValueError(
            f"{rows} x {length} tokens need about {needed / GIB:.1f} GiB ({cached / GIB:.1f} GiB of them keys and "
            f"values), but {device} has {there / GIB:.1f} GiB left; {remedy}"
        )


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a CUDA device, or of the system within this process's limits; None where nothing tells."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    known = [free for free in (_system_bytes(), _cgroup_bytes()) if free is not None]
    return min(known, default=None)


def _system_bytes() -> int | None:
    path = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", path.read_text()) if path.is_file() else None
    return 1024 * int(found.group(1)) if found else None


def _cgroup_bytes() -> int | None:
    """What a container's or a batch system's limit leaves (Linux, cgroup 2)."""
    most, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if not (most.is_file() and used.is_file()) or not most.read_text().strip().isdigit():
        return None
    return int(most.read_text()) - int(used.read_text())
