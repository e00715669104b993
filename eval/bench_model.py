"""Time and memory of a whole model under each position scheme, in interleaved rounds against one of them."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from tqdm import tqdm

from eval.timing import choose_device, compare
from model.gpt import GPT
from training.environment import machine
from training.flops import flops_per_token
from training.state import build_model


def bench_model(config: Any, train_configs: Mapping[str, Any]) -> dict[str, Any]:
    """Measures forward, and forward and backward, for every scheme of `train_configs` and every length.

    Returns {"machine": {...}, "rows": [...]}; a row has the scheme's `seconds` for `batch` sequences,
    `tokens_per_second`, `peak_bytes`, its `ratio` to `config.reference`, and `utilisation`: the model's floating-point
    operations (see `flops_per_token`) per second as a share of `config.peak_tflops`, where that is given.

    Raises ValueError, before any measurement, for a key that can't be served.
    """
    device = _checked(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    rows = []
    for length, direction in tqdm(list(product(config.lengths, config.directions)), desc="cases"):
        models = {name: build_model(train_config, device) for name, train_config in train_configs.items()}
        passes = {name: _pass(model, config, length, direction, device) for name, model in models.items()}
        for name, measured in compare(passes, config.reference, config.repeats, device).items():
            tokens = config.batch * length / measured["seconds"]
            flops = tokens * flops_per_token(models[name], length, backward=direction != "forward")
            rows.append(
                {
                    "name": f"{config.model} {name} {direction} T={length}",
                    "position": name,
                    "direction": direction,
                    "length": length,
                    "batch": config.batch,
                    "dtype": config.dtype,
                    **measured,
                    "tokens_per_second": tokens,
                    "utilisation": None if config.peak_tflops is None else flops / (1e12 * config.peak_tflops),
                }
            )
    return {"machine": machine(device), "rows": rows}


def _pass(model: GPT, config: Any, length: int, direction: str, device: torch.device) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (config.batch, length + 1), generator=generator).to(device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def run() -> object:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
            if direction == "forward":
                with torch.no_grad():
                    return model(tokens[:, :-1], tokens[:, 1:])
            loss = model(tokens[:, :-1], tokens[:, 1:])
        return torch.autograd.grad(loss, parameters)

    return run


def _checked(config: Any) -> torch.device:
    if config.reference not in config.positions:
        raise ValueError(f"positions={list(config.positions)} must hold reference={config.reference}")
    if unknown := set(config.directions) - {"forward", "forward_backward"}:
        raise ValueError(
            f"directions={list(config.directions)}: {min(unknown)!r} is unknown; use forward, forward_backward"
        )
    if config.dtype not in ("fp32", "bf16"):
        raise ValueError(f"dtype={config.dtype} is unknown for a model; use fp32 or bf16 (autocast)")
    for key in ("lengths", "batch", "repeats", "train_length"):
        values = config[key] if key == "lengths" else [config[key]]
        if any(not isinstance(value, int) or value < 1 for value in values):
            raise ValueError(f"{key}={config[key]} must be at least 1")
    return choose_device(config.device)
