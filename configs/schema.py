"""The types of the configs of the commands, and the checks that hold between the keys of `configs/train.yaml`.

OmegaConf checks the types when the config is composed; `check` refuses, before any work starts, what can't be run.
"""

import math
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
    shuffle_seed: int | None = None


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
    warmup_fraction: float | None = None


@dataclass
class Train:
    length: int = MISSING
    tokens_per_step: int = MISSING
    steps: int = MISSING
    micro_batch_tokens: int = MISSING
    activation_checkpointing: bool = MISSING
    checkpoint_every: int = MISSING
    keep_checkpoints: int = MISSING
    nonfinite: str = MISSING
    log_every: int = MISSING


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
    id: str | None = None


@dataclass
class Estimate:
    devices: int | None = None
    peak_tflops: float = MISSING
    utilisation: float = MISSING


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
    profile: bool = MISSING
    dry_run: bool = MISSING
    estimate: Estimate = field(default_factory=Estimate)


@dataclass
class EvaluateConfig:
    run_dir: str = MISSING
    lengths: list[int] | None = None
    tokens: int | None = None
    data_dir: str | None = None
    step: int | str | None = None
    micro_batch_tokens: int = MISSING
    plot: bool = MISSING
    device: str = MISSING
    precision: str = MISSING


@dataclass
class AttentionConfig:
    run_dir: str = MISSING
    length: int | None = None
    sequences: int = MISSING
    queries: int = MISSING
    pairs: int = MISSING
    seed: int = MISSING
    text: str | None = None
    tokenizer: str | None = None
    data_dir: str | None = None
    step: int | str | None = None
    plot: bool = MISSING
    device: str = MISSING
    precision: str = MISSING


@dataclass
class GenerateConfig:
    run_dir: str = MISSING
    prompt: str = MISSING
    prompts_file: str | None = None
    start_of_document: bool = MISSING
    max_new_tokens: int = MISSING
    temperature: float = MISSING
    top_k: int | None = None
    top_p: float | None = None
    seed: int = MISSING
    stop: list[str] = MISSING
    inference_length: int | None = None
    prefill_tokens: int = MISSING
    tokenizer: str | None = None
    step: int | None = None
    device: str = MISSING
    precision: str = MISSING


@dataclass
class Needle:
    template: str = MISSING
    needles: int = MISSING
    digits: int = MISSING
    cue: str = MISSING


@dataclass
class NeedleTrain:
    length: int | None = None
    first_length: int | None = None
    first_fraction: float = MISSING
    rows: int = MISSING
    steps: int = MISSING
    warmup_fraction: float = MISSING
    cooldown_fraction: float = MISSING
    checkpoint_every: int = MISSING
    validate_every: int = MISSING
    validation_samples: int = MISSING


@dataclass
class NeedleConfig:
    run_dir: str = MISSING
    finetune: bool = MISSING
    out_dir: str | None = None
    step: int | None = None
    seed: int = MISSING
    data_dir: str | None = None
    tokenizer: str | None = None
    scale: str = MISSING
    lengths: list[int] = MISSING
    samples: int = MISSING
    needle: Needle = field(default_factory=Needle)
    train: NeedleTrain = field(default_factory=NeedleTrain)
    scales: dict[str, Any] = MISSING
    micro_batch_tokens: int = MISSING
    device: str = MISSING
    precision: str = MISSING
    compile: str = MISSING
    wandb: Wandb = field(default_factory=Wandb)


@dataclass
class ShowPositionConfig:
    position: Position = field(default_factory=Position)
    length: int = MISSING
    train_length: int = MISSING
    head_dim: int = MISSING
    n_head: int = MISSING
    head: int = MISSING
    t: list[int] | None = None
    i: list[int] | None = None
    plot: bool = MISSING
    out: str | None = None


@dataclass
class Launcher:
    """All but `kind` is for jobs."""

    kind: str = MISSING
    nodes: int = 1
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "24:00:00"
    cpus_per_task: int | None = None
    sbatch: dict[str, Any] = field(default_factory=dict)
    save_seconds: int = 120
    requeues: int = 100
    job_dir: str | None = None


@dataclass
class ReproduceConfig:
    experiment: dict[str, Any] = MISSING
    name: str | None = None
    scale: str | None = None
    fast: bool = MISSING
    overrides: list[str] = MISSING
    only: list[Any] = MISSING
    launcher: Launcher = field(default_factory=Launcher)
    gpus_per_run: int = MISSING
    runs_at_once: Any = MISSING
    order: str = MISSING
    retry_failed: int = MISSING


@dataclass
class SweepConfig(ReproduceConfig):
    plan: bool = MISSING
    status: bool = MISSING
    wait: bool = MISSING


@dataclass
class BenchConfig:
    directions: list[str] = MISSING
    lengths: list[int] = MISSING
    batch: int = MISSING
    dtype: str = MISSING
    repeats: int = MISSING
    device: str = MISSING
    threads: int | None = None
    out: str = MISSING


@dataclass
class BenchAttentionConfig(BenchConfig):
    positions: list[str] = MISSING
    backends: list[str] = MISSING
    head_dims: list[int] = MISSING
    n_head: int = MISSING
    train_length: int = MISSING


@dataclass
class BenchModelConfig(BenchConfig):
    model: str = MISSING
    positions: list[str] = MISSING
    reference: str = MISSING
    train_length: int = MISSING
    peak_tflops: float | None = None


@dataclass
class BenchTokenizeConfig:
    workers: list[int] = MISSING
    copies: int = MISSING
    document_characters: int = MISSING
    repeats: int = MISSING
    out: str = MISSING


@dataclass
class BenchDataConfig:
    dir: str | None = None
    tokens: int = MISSING
    tokens_per_step: int = MISSING
    lengths: list[int] = MISSING
    repeats: int = MISSING
    threads: int | None = None
    out: str = MISSING


@dataclass
class InspectDataConfig:
    path: str = MISSING
    tokenizer: str | None = None
    sha256: bool = MISSING
    samples: int = MISSING
    sample_tokens: int = MISSING
    seed: int = MISSING
    plot: bool = MISSING
    out: str | None = None


@dataclass
class BenchCase:
    model: str = MISSING
    length: int = MISSING
    batch: int = MISSING
    micro_batch: int | None = None


@dataclass
class BenchTrainConfig:
    cases: list[BenchCase] = MISSING
    positions: list[str] = MISSING
    peers: list[str] = MISSING
    compile: list[str] = MISSING
    dtypes: list[str] = MISSING
    repeats: int = MISSING
    device: str = MISSING
    threads: int | None = None
    peak_tflops: float | None = None
    out: str = MISSING


@dataclass
class ReportConfig:
    run_dirs: list[str] = MISSING
    out: str = MISSING
    title: str | None = None
    pictures: bool = MISSING


SCHEMAS: dict[str, type] = {
    "sweep": SweepConfig,
    "reproduce": ReproduceConfig,
    "bench_attention": BenchAttentionConfig,
    "bench_model": BenchModelConfig,
    "bench_tokenize": BenchTokenizeConfig,
    "bench_data": BenchDataConfig,
    "inspect_data": InspectDataConfig,
    "bench_train": BenchTrainConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "attention": AttentionConfig,
    "generate": GenerateConfig,
    "needle": NeedleConfig,
    "report": ReportConfig,
    "show_position": ShowPositionConfig,
}

CHOICES = {
    "schedule.kind": ("constant_then_linear", "cosine"),
    "precision": ("auto", "fp32", "bf16"),
    "device": ("auto", "cpu", "cuda"),
    "compile": ("auto", "True", "False"),  # what YAML's true and false become
    "wandb.mode": ("disabled", "offline", "online"),
    "train.nonfinite": ("stop", "skip"),
}
POSITIVE = (
    *(f"model.{key}" for key in ("n_layer", "n_head", "width", "vocab_size")),
    *(f"train.{key}" for key in ("length", "tokens_per_step", "steps", "micro_batch_tokens")),
    *(f"train.{key}" for key in ("checkpoint_every", "keep_checkpoints", "log_every")),
    *("validation.tokens", "validation.every", "optimizer.newton_schulz_steps"),
)


def check_choices(config: Any) -> None:
    """Raises ValueError for a word that is none of a key's."""
    for key, choices in CHOICES.items():
        value = OmegaConf.select(config, key, default=choices[0])  # evaluate has only some of these keys
        if value not in choices:
            raise ValueError(f"{key}={value} is unknown; choose one of: {', '.join(choices)}")


def check(config: Any) -> None:
    """Raises ValueError, naming key, value and remedy, for values that no run can have.

    What depends on the data, the position scheme or the number of processes is checked where those are built.
    """
    for key in POSITIVE:
        if (value := OmegaConf.select(config, key)) < 1:
            raise ValueError(f"{key}={value} must be at least 1")
    check_choices(config)
    if config.seed < 0:
        raise ValueError(f"seed={config.seed} must be at least 0")
    if len(set(config.validation.lengths)) < len(config.validation.lengths):
        raise ValueError(f"validation.lengths={config.validation.lengths} holds a length twice; name each once")
    if not config.validation.lengths or min(config.validation.lengths) < 1:
        raise ValueError(
            f"validation.lengths={config.validation.lengths} must hold at least one length, such as [4096]"
        )
    cooldown = config.schedule.cooldown_fraction
    if config.schedule.kind == "constant_then_linear" and not (cooldown is not None and 0 <= cooldown <= 1):
        raise ValueError(f"schedule.cooldown_fraction={cooldown} must lie in [0, 1]")
    if not 0 <= (config.schedule.warmup_fraction or 0) <= 1:
        raise ValueError(f"schedule.warmup_fraction={config.schedule.warmup_fraction} must lie in [0, 1]")
    _check_model(config.model)
    _check_optimizer(config.optimizer)


def _check_model(model: Any) -> None:
    if model.width % model.n_head:
        divisors = [heads for heads in range(1, model.width + 1) if model.width % heads == 0]
        near = min(divisors, key=lambda heads: abs(heads - model.n_head))
        raise ValueError(
            f"model.width={model.width} is not divisible by model.n_head={model.n_head}; try model.n_head={near}"
        )


def _check_optimizer(optimizer: Any) -> None:
    for key in ("muon_lr", "embedding_lr", "output_lr", "position_lr", "eps"):
        if not 0 <= optimizer[key] < math.inf:
            raise ValueError(f"optimizer.{key}={optimizer[key]} must be a finite number, at least 0")
    rates = {"muon_momentum": [optimizer.muon_momentum], "betas": optimizer.betas}
    for key, values in rates.items():
        if not all(0 <= value < 1 for value in values):
            raise ValueError(f"optimizer.{key}={optimizer[key]} must be at least 0 and below 1")
    if len(optimizer.betas) != 2:
        raise ValueError(f"optimizer.betas={optimizer.betas} must be two numbers, such as [0.9, 0.95]")
