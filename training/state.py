"""What a run is made of, saved and restored as one thing."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.gpt import GPT, GPTConfig
from training.optimizer import build_optimizers


@dataclass
class TrainState:
    """The model, its optimizers, and the number of updates made; the data of the next one follows from `step`."""

    model: GPT
    optimizers: list[torch.optim.Optimizer]
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's tensors: plain numbers, lists and tensors. Called on every process at once."""
        return {"step": self.step, "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, model: dict[str, Tensor], rest: dict[str, Any]) -> None:
        self.model.load_state_dict(model)
        for optimizer, saved in zip(self.optimizers, rest["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = rest["step"]


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
    return TrainState(model, build_optimizers(model, config.optimizer))
