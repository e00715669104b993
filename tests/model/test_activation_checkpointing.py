"""Activation checkpointing: the same loss and gradients from less memory, also compiled and under DDP."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from configs.command import compose
from model.gpt import GPT
from tests.tiny_run import tiny_config
from training.state import build_model

POSITIONS = ["rope", "alibi", "logn_p_rope", "scale_invariant_p_rope", "infini_p_rope"]


def loss_and_gradients(model: GPT, checkpointing: bool) -> tuple[Tensor, list[Tensor], int]:
    """The loss, the gradients of all parameters, and how many elements were kept for the backward pass."""
    model.config = replace(model.config, activation_checkpointing=checkpointing)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    tokens = torch.randint(31, (3, 25), generator=torch.Generator().manual_seed(1))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    held = sum(kept.values())
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters()))), held


@pytest.mark.parametrize("position", POSITIONS)
def test_loss_and_gradients_are_the_same_bit_for_bit(small_gpt: Callable[..., GPT], position: str):
    model = small_gpt(compose("train", [f"position={position}"]).position)
    plain, checkpointed = loss_and_gradients(model, False), loss_and_gradients(model, True)
    torch.testing.assert_close(checkpointed[:2], plain[:2], rtol=0, atol=0)


def test_little_more_than_the_input_of_each_block_is_kept(small_gpt: Callable[..., GPT]):
    deep, deeper = (small_gpt(n_layer=n_layer) for n_layer in (2, 3))
    more = loss_and_gradients(deeper, True)[2] - loss_and_gradients(deep, True)[2]
    assert more == 3 * 24 * 32  # B T C
    assert loss_and_gradients(deeper, False)[2] - loss_and_gradients(deep, False)[2] > 10 * more


def test_an_evaluation_forward_computes_each_block_once(small_gpt: Callable[..., GPT]):
    model = small_gpt(activation_checkpointing=True)
    calls: list[torch.nn.Module] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, inputs: calls.append(block))
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.int64))
    assert calls == list(model.blocks)
    model(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64)).backward()
    assert len(calls) == 3 * len(model.blocks)


def test_the_config_turns_it_on(tmp_path):
    assert not build_model(tiny_config(tmp_path)).config.activation_checkpointing
    assert build_model(tiny_config(tmp_path, "train.activation_checkpointing=true")).config.activation_checkpointing


# In a process of its own: the shape checks of the other tests' import hook would be compiled too.
COMPILED_DDP = """
import sys
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.nn.parallel import DistributedDataParallel
from model.gpt import GPT, GPTConfig

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
position = OmegaConf.load(f"configs/position/{sys.argv[1]}.yaml")
tokens = torch.randint(31, (2, 65))
results = []
for checkpointing in (False, True):
    torch.manual_seed(0)
    config = GPTConfig(2, 2, 32, 31, train_length=64, position=position, activation_checkpointing=checkpointing)
    model = GPT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    if checkpointing:
        for block in model.blocks:
            block.compile(backend="aot_eager")
        forward = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    else:
        forward = model
    loss = forward(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    results.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
torch.testing.assert_close(*results)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("position", ["logn_p_rope", "scale_invariant_p_rope"])
def test_compiled_blocks_under_ddp_agree(position: str):
    command = [sys.executable, "-c", COMPILED_DDP, position]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
