"""What a run is made of, saved and restored as one thing."""

from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from model.gpt import GPT, GPTConfig
from training.optimizer import build_optimizers
from training.run_config import explicit


@dataclass
class TrainState:
    """The model, its optimizers, and the number of updates made; the data of the next one follows from `step`.

    `nonfinite` counts the steps so far whose loss or gradient was infinite or not a number, and `config` is the run's
    own, wandb id included, as plain values.
    """

    model: GPT
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    nonfinite: dict[str, int] = field(default_factory=lambda: {"loss": 0, "gradient": 0})
    config: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's tensors: plain numbers, lists and tensors. Every process of a run calls it."""
        return {
            "step": self.step,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "nonfinite": self.nonfinite,
            "rng": rng_state(),
            "config": self.config,
        }

    def load_state_dict(self, model: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Restores all but the config; random numbers go on where they were."""
        self.model.load_state_dict(model)
        for optimizer, saved in zip(self.optimizers, rest["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.nonfinite = rest["step"], dict(rest["nonfinite"])
        set_rng_state(rest["rng"])


def rng_state() -> dict[str, Tensor | None]:
    """Where torch's random numbers are, on the CPU and on this process's GPU; a run draws from no others."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None}


def set_rng_state(state: dict[str, Tensor | None]) -> None:
    """Goes on where `rng_state` was taken, on a GPU only where there was and is one."""
    cpu, cuda = state["cpu"], state["cuda"]
    assert cpu is not None
    torch.set_rng_state(cpu)
    if cuda is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(cuda)


def build_model(config: Any, device: torch.device | str = "cpu") -> GPT:
    """The model of a training config; the initial weights are drawn on the CPU, so a seed means the same everywhere."""
    torch.manual_seed(config.seed)
    model = GPT(
        GPTConfig(
            n_layer=config.model.n_layer,
            n_head=config.model.n_head,
            width=config.model.width,
            vocab_size=config.model.vocab_size,
            train_length=config.train.length,
            position=config.position,
            attention=config.attention,
            activation_checkpointing=config.train.get("activation_checkpointing", False),  # runs older than the key
        )
    )
    return model.to(device)


def build_state(config: Any, device: torch.device | str = "cpu") -> TrainState:
    """A run at step 0."""
    model = build_model(config, device)
    plain = OmegaConf.to_container(explicit(config))
    assert isinstance(plain, dict)
    return TrainState(model, build_optimizers(model, config.optimizer), config={str(k): v for k, v in plain.items()})
