"""torch.compile of the blocks, as train.py does it on CUDA: one compilation of a shape serves all layers."""

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
from training.step import compile_blocks

shapes = set()

def record(graph, inputs):
    shapes.update(size for x in inputs if isinstance(x, torch.Tensor) for size in x.shape)
    return graph.forward

position = OmegaConf.load(f"configs/position/{sys.argv[1]}.yaml")
model = GPT(GPTConfig(n_layer=int(sys.argv[2]), n_head=2, width=32, vocab_size=31, train_length=64, position=position))
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
tokens = torch.randint(31, (2, 65))
plain = model(tokens[:, :-1], tokens[:, 1:])
compile_blocks(model, backend=record)
compiled = model(tokens[:, :-1], tokens[:, 1:])
compiled.backward()
torch.testing.assert_close(compiled, plain)
print(counters["stats"]["unique_graphs"])
if len(model.blocks) > 3:
    sys.exit()
for length in (32, 48, 64):  # as a validation does, after which dynamo would go over to shapes that vary
    with torch.no_grad():
        model(tokens[:, :length], tokens[:, 1 : length + 1])
for rows in range(3, 9):  # with those before, more than dynamo's limit of 8
    x = tokens[:1].expand(rows, -1)
    model(x[:, :-1], x[:, 1:]).backward()
assert all(isinstance(size, int) for size in shapes), shapes
assert {2, 8, 32, 48, 64} <= shapes, shapes
"""


@pytest.mark.parametrize(
    "position",
    [
        "scale_invariant_p_rope",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("rope", "logn_p_rope", "infini_p_rope")),
    ],
)
def test_twelve_layers_need_no_more_compilations_than_three(position: str) -> None:
    assert compilations(position, 3) == compilations(position, 12) < 12  # so not one a layer


def compilations(position: str, n_layer: int) -> int:
    command = [sys.executable, "-c", COUNT, position, str(n_layer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)
