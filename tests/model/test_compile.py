"""torch.compile of the blocks, as train.py does it on CUDA: one compilation serves all layers of every scheme."""

import subprocess
import sys

import pytest

# In a process of its own: the shape checks of the other tests' import hook would be compiled too.
COUNT = """
import sys
import torch
from torch._dynamo.utils import counters
from omegaconf import OmegaConf
from model.gpt import GPT, GPTConfig

position = OmegaConf.load(f"configs/position/{sys.argv[1]}.yaml")
model = GPT(GPTConfig(n_layer=int(sys.argv[2]), n_head=2, width=32, vocab_size=31, train_length=64, position=position))
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
tokens = torch.randint(31, (2, 65))
plain = model(tokens[:, :-1], tokens[:, 1:])
for block in model.blocks:
    block.compile(backend="eager")
compiled = model(tokens[:, :-1], tokens[:, 1:])
compiled.backward()
torch.testing.assert_close(compiled, plain)
print(counters["stats"]["unique_graphs"])
"""


@pytest.mark.parametrize("position", ["rope", "logn_p_rope", "scale_invariant_p_rope", "infini_p_rope"])
def test_twelve_layers_need_no_more_compilations_than_three(position: str) -> None:
    # 8 is dynamo's limit for one piece of code, past which it would go on uncompiled
    assert compilations(position, 3) == compilations(position, 12) < 8


def compilations(position: str, n_layer: int) -> int:
    command = [sys.executable, "-c", COUNT, position, str(n_layer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)
