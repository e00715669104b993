"""config.yaml of a run directory: written once, and compared when the run is started again."""

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from model.attention import CORES
from model.position.scheme import SLOTS, fill_defaults

# What may change when a run is resumed, because it does not change the results (but for rounding).
FREE = (
    *("run_dir", "device", "precision", "compile", "attention", "wandb", "data.dir"),
    *("train.micro_batch_tokens", "train.checkpoint_every", "train.keep_checkpoints"),
)
CONFIG = "config.yaml"


def explicit(config: Any) -> DictConfig:
    """The config with every key of every position slot, the defaults of its kind filled in."""
    config = OmegaConf.create(OmegaConf.to_container(config, resolve=True))  # pyright: ignore[reportArgumentType]
    for slot, kinds in {**SLOTS, "core": CORES}.items():
        config.position[slot] = fill_defaults(slot, kinds, config.position.get(slot))
    return config


def write_config(run_dir: Path, config: Any) -> None:
    """Writes config.yaml, all at once."""
    run_dir.mkdir(parents=True, exist_ok=True)
    partial = run_dir / (CONFIG + ".partial")
    OmegaConf.save(explicit(config), partial)
    os.replace(partial, run_dir / CONFIG)


def check_same_run(run_dir: Path, config: Any) -> None:
    """Raises ValueError, naming the first key that differs, when `config` is not the run that run_dir holds."""
    if not (run_dir / CONFIG).exists():
        raise ValueError(f"run_dir={run_dir} has checkpoints but no {CONFIG}; start in another run_dir")
    if difference := first_difference(OmegaConf.load(run_dir / CONFIG), explicit(config)):
        key, was, now = difference
        raise ValueError(
            f"{key}={now}, but run_dir={run_dir} was started with {key}={was}; go on with that, or start in another "
            "run_dir"
        )


def first_difference(was: Any, now: Any) -> tuple[str, Any, Any] | None:
    """(key, value, value) of the first key whose values differ and matter to the results; None if there is none."""
    a, b = _flat(was), _flat(now)
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key) and not any(key == free or key.startswith(free + ".") for free in FREE):
            return key, a.get(key), b.get(key)
    return None


def _flat(config: Any) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict):
            for name, child in node.items():
                walk(child, f"{prefix}{name}.")
        else:
            flat[prefix[:-1]] = node

    walk(OmegaConf.to_container(config, resolve=True), "")
    return flat
