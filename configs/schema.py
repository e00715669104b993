"""The types of `configs/train.yaml`, and the checks that hold between its keys.

OmegaConf checks the types when the config is composed; `check` refuses, before any work starts, what can't be run.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, OmegaConf


@dataclass
class Model:
    name: str = MISSING
    n_layer: int = MISSING
    n_head: int = MISSING
    width: int = MISSING
    vocab_size: int = MISSING


@dataclass
class Position:
    """Three slots and the core, each `{kind: ..., and the keys of that kind}`; see model/."""

    name: str = MISSING
    rotary: dict[str, Any] = field(default_factory=dict)
    query_scale: dict[str, Any] = field(default_factory=dict)
    logits: dict[str, Any] = field(default_factory=dict)
    core: dict[str, Any] = field(default_factory=dict)
    reference_length: int | None = None
    allow_two_temperatures: bool = False


@dataclass
class Data:
    name: str = MISSING
    dir: str = MISSING
    repeat: bool = False


@dataclass
class Optimizer:
    muon_lr: float = MISSING
    muon_momentum: float = MISSING
    newton_schulz_steps: int = MISSING
    embedding_lr: float = MISSING
    output_lr: float = MISSING
    position_lr: float = MISSING
    betas: list[float] = MISSING
    eps: float = MISSING


@dataclass
class Schedule:
    kind: str = MISSING
    cooldown_fraction: float | None = None


@dataclass
class Train:
    length: int = MISSING
    tokens_per_step: int = MISSING
    steps: int = MISSING
    micro_batch_tokens: int = MISSING
    checkpoint_every: int = MISSING
    keep_checkpoints: int = MISSING


@dataclass
class Validation:
    lengths: list[int] = MISSING
    tokens: int = MISSING
    every: int = MISSING


@dataclass
class Wandb:
    mode: str = MISSING
    project: str = MISSING
    group: str | None = None


@dataclass
class TrainConfig:
    model: Model = field(default_factory=Model)
    position: Position = field(default_factory=Position)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    train: Train = field(default_factory=Train)
    validation: Validation = field(default_factory=Validation)
    wandb: Wandb = field(default_factory=Wandb)
    seed: int = MISSING
    run_dir: str = MISSING
    device: str = MISSING
    precision: str = MISSING
    attention: str = MISSING
    compile: str = MISSING


SCHEMAS: dict[str, type] = {"train": TrainConfig}

CHOICES = {
    "schedule.kind": ("constant_then_linear", "cosine"),
    "precision": ("auto", "fp32", "bf16"),
    "device": ("auto", "cpu", "cuda"),
    "compile": ("auto", "true", "false"),
    "wandb.mode": ("disabled", "offline", "online"),
}
POSITIVE = (
    *(f"model.{key}" for key in ("n_layer", "n_head", "width", "vocab_size")),
    *(f"train.{key}" for key in ("length", "tokens_per_step", "steps", "micro_batch_tokens")),
    *(f"train.{key}" for key in ("checkpoint_every", "keep_checkpoints")),
    *("validation.tokens", "validation.every", "optimizer.newton_schulz_steps"),
)


def check(config: Any) -> None:
    """Raises ValueError, naming key, value and remedy, for values that no run can have.

    What depends on the data, the position scheme or the number of processes is checked where those are built.
    """
    for key in POSITIVE:
        if (value := OmegaConf.select(config, key)) < 1:
            raise ValueError(f"{key}={value} must be at least 1")
    for key, choices in CHOICES.items():
        if (value := OmegaConf.select(config, key)).lower() not in choices:
            raise ValueError(f"{key}={value} is unknown; choose one of: {', '.join(choices)}")
    if not config.validation.lengths or min(config.validation.lengths) < 1:
        raise ValueError(
            f"validation.lengths={config.validation.lengths} must hold at least one length, such as [4096]"
        )
    cooldown = config.schedule.cooldown_fraction
    if config.schedule.kind == "constant_then_linear" and not (cooldown is not None and 0 <= cooldown <= 1):
        raise ValueError(f"schedule.cooldown_fraction={cooldown} must lie in [0, 1]")
    _check_model(config.model)


def _check_model(model: Any) -> None:
    if model.width % model.n_head:
        divisors = [heads for heads in range(1, model.width + 1) if model.width % heads == 0]
        near = min(divisors, key=lambda heads: abs(heads - model.n_head))
        raise ValueError(
            f"model.width={model.width} is not divisible by model.n_head={model.n_head}; try model.n_head={near}"
        )
