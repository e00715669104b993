"""A run directory: its config.yaml, compared when the run is started again, and who may write to it."""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from model.attention import CORES
from model.position.scheme import SLOTS, fill_defaults
from training.distributed import Process
from training.log import LOG, METRICS, read_metrics_lines

# What may change when a run is resumed, because it does not change the results (but for rounding).
FREE = (
    *("run_dir", "device", "precision", "compile", "attention", "wandb", "profile", "dry_run", "estimate"),
    *("train.micro_batch_tokens", "train.activation_checkpointing"),
    *("train.checkpoint_every", "train.keep_checkpoints", "train.log_every"),
    "train.nonfinite",  # so that a run that met one can go on without it
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
        # the first three are a sweep's, and a first start may have been cut before it had written its config
        ours = ("child.log", "failure.json", "job.json", LOG, CONFIG + ".partial")
        strangers = [path.name for path in run_dir.glob("*") if path.name not in ours]
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


@contextmanager
def locked(run_dir: Path, process: Process) -> Iterator[None]:
    """Makes run_dir and keeps other runs out of it, until the end or the death of this one's main process.

    Raises ValueError when another one is at work there.
    """
    with ExitStack() as stack:
        process.on_main(lambda: _lock(run_dir, stack))
        yield


def _lock(run_dir: Path, stack: ExitStack) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    file = stack.enter_context((run_dir / LOG).open("a"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"run_dir={run_dir} is being trained by another process; wait for it, end it, or choose another run_dir"
        ) from error
    except OSError:
        pass  # some network file systems know no locks


def wandb_id(run_dir: Path, config: Any) -> str | None:
    """The id under which wandb knows the run: the config's, else the one it was started with, else a new one.

    None while wandb is disabled and the run has no id.
    """
    started = read_config(run_dir) if (run_dir / CONFIG).exists() else config
    known = config.wandb.id or started.wandb.get("id")
    return known or (None if config.wandb.mode == "disabled" else secrets.token_hex(8))


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
