"""config.yaml of a run directory: written once, and compared when the run is started again."""

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from model.attention import CORES
from model.position.scheme import SLOTS, fill_defaults
from training.log import METRICS, read_metrics_lines

# What may change when a run is resumed, because it does not change the results (but for rounding).
FREE = (
    *("run_dir", "device", "precision", "compile", "attention", "wandb", "dry_run", "estimate"),
    *("train.micro_batch_tokens", "train.activation_checkpointing"),
    *("train.checkpoint_every", "train.keep_checkpoints"),
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


def read_config(run_dir: Path) -> DictConfig:
    """The config that a run was started with.

    Raises FileNotFoundError when the folder is not a run directory, ValueError when its config.yaml is damaged.
    """
    path = run_dir / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"run_dir={run_dir} holds no {CONFIG}; give the folder of a run that train.py made")
    try:
        config = OmegaConf.load(path)
        OmegaConf.resolve(config)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}); start in another run_dir") from error
    if not isinstance(config, DictConfig) or not {"model", "position", "train", "data"} <= set(config):
        raise ValueError(f"{path} is not the config of a training run; start in another run_dir")
    return config


def check_run_dir(run_dir: Path, config: Any) -> None:
    """Raises ValueError when run_dir holds anything but nothing, or this very run.

    Names the first key that differs from the run's config.yaml, a strange file, or a damaged line of its metrics.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"run_dir={run_dir} is a file; choose a folder")
    if not (run_dir / CONFIG).exists():
        # child.log is a sweep's, and a first start may have been cut while it wrote its config
        strangers = [path.name for path in run_dir.glob("*") if path.name not in ("child.log", CONFIG + ".partial")]
        if strangers:
            raise ValueError(f"run_dir={run_dir} holds {min(strangers)} but no {CONFIG}; choose another run_dir")
        return
    read_metrics_lines(run_dir / METRICS)
    if difference := first_difference(read_config(run_dir), explicit(config)):
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
