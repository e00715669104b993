"""The GPT: its sizes, its initial values, and where its norms, activations and rotation stand."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from numpy.typing import NDArray
from omegaconf import OmegaConf
from torch import nn

from model.attention import rms_norm
from model.gpt import GPT, MLP, GPTConfig
from model.position import Plan, build_position
from training.optimizer import orthogonalise

MODELS = Path(__file__).parents[2] / "configs" / "model"
Array = NDArray[np.float64]


def from_config(name: str) -> GPT:
    """The model of configs/model/NAME.yaml, as shapes alone."""
    config: Any = OmegaConf.load(MODELS / f"{name}.yaml")
    with torch.device("meta"):
        return GPT(
            GPTConfig(n_layer=config.n_layer, n_head=config.n_head, width=config.width, vocab_size=config.vocab_size)
        )


@pytest.mark.parametrize(("name", "count"), [("162m", 162_201_600), ("304m", 304_349_184)])
def test_parameter_count_and_head_dimension_are_the_published_ones(name: str, count: int):
    gpt = from_config(name)
    assert sum(parameter.numel() for parameter in gpt.parameters()) == count
    assert gpt.config.geometry.head_dim == 128


def test_the_default_config_is_162m():
    assert from_config("162m").config == GPTConfig()


def test_initial_loss_over_the_padded_gpt2_vocabulary_is_10_8258():
    gpt = GPT(GPTConfig(n_layer=1, n_head=2, width=16, vocab_size=50304, train_length=16))
    ids = torch.randint(50304, (2, 17))
    assert gpt(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(10.8258, abs=5e-5)


def test_parameters_are_separate_matrices_without_biases_or_gains(small_gpt: Callable[..., GPT]):
    shapes = {name: tuple(p.shape) for name, p in small_gpt(n_layer=1, width=32, vocab_size=31).named_parameters()}
    block = {f"blocks.0.attention.{name}.weight": (32, 32) for name in ("query", "key", "value", "out")}
    mlp = {"blocks.0.mlp.up.weight": (128, 32), "blocks.0.mlp.down.weight": (32, 128)}
    assert shapes == {"embedding.weight": (31, 32), "output.weight": (31, 32), **block, **mlp}


def test_initial_values_are_those_of_the_recipe():
    gpt = GPT(GPTConfig(n_layer=2, n_head=2, width=64, vocab_size=512))
    weights = gpt.state_dict()
    assert weights["embedding.weight"].std().item() == pytest.approx(1, abs=0.02)
    for name, weight in weights.items():
        if name.endswith(("out.weight", "down.weight")) or name == "output.weight":
            assert not weight.any(), name
        elif name.startswith("blocks"):
            bound = weight.shape[1] ** -0.5
            assert 0.98 * bound < weight.abs().max() <= bound, name
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name


def test_width_must_divide_into_heads():
    with pytest.raises(ValueError, match=r"model\.width=100 is not divisible by model\.n_head=6"):
        GPTConfig(width=100, n_head=6)


def numpy_gpt(weights: dict[str, Array], ids: NDArray[np.int64], n_head: int) -> Array:
    """Logits (T, V) of a GPT with RoPE, written from the description of the recipe, in float64."""

    def norm(x: Array) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.finfo(np.float32).eps)

    def heads(x: Array) -> Array:
        return x.reshape(len(x), n_head, -1).transpose(1, 0, 2)

    def rotated(x: Array) -> Array:
        half = x.shape[-1] // 2
        angle = np.multiply.outer(np.arange(x.shape[1]), 10000.0 ** (-np.arange(half) / half))
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], -1)

    x = norm(weights["embedding.weight"][ids])
    for layer in range(sum(name.endswith("query.weight") for name in weights)):
        own = {name.split(".")[-2]: w for name, w in weights.items() if name.startswith(f"blocks.{layer}.")}
        h = norm(x)
        q, k = (rotated(norm(heads(h @ own[name].T))) for name in ("query", "key"))
        score = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
        p = np.where(np.tri(len(x), dtype=bool), np.exp(score), 0)
        y = p / p.sum(-1, keepdims=True) @ heads(h @ own["value"].T)
        x = x + y.transpose(1, 0, 2).reshape(x.shape) @ own["out"].T
        x = x + np.maximum(norm(x) @ own["up"].T, 0) ** 2 @ own["down"].T
    return norm(x) @ weights["output.weight"].T


def test_the_forward_pass_is_the_recipe_written_in_numpy(small_gpt: Callable[..., GPT]):
    gpt = small_gpt({"rotary": {"kind": "rope"}}, n_head=4, n_layer=3, width=64)
    ids = torch.randint(31, (2, 40))
    weights = {name: weight.double().numpy() for name, weight in gpt.state_dict().items()}
    with torch.no_grad():
        logits = gpt(ids)
    for row in range(2):
        np.testing.assert_allclose(logits[row], numpy_gpt(weights, ids[row].numpy(), 4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("matrix", ["embedding", "blocks.1.attention.query", "blocks.0.attention.key"])
def test_norms_take_out_the_size_of_embeddings_queries_and_keys(matrix: str, small_gpt: Callable[..., GPT]):
    gpt, ids = small_gpt({"rotary": {"kind": "rope"}}), torch.randint(31, (1, 20))
    before = gpt(ids)
    with torch.no_grad():
        gpt.get_parameter(f"{matrix}.weight").mul_(3)
    torch.testing.assert_close(gpt(ids), before, rtol=1e-4, atol=1e-4)


def test_attention_mlp_and_output_layer_read_unit_rms(small_gpt: Callable[..., GPT]):
    gpt = small_gpt()
    read: list[torch.Tensor] = []
    for name in ("blocks.0.attention", "blocks.0.mlp", "blocks.1.attention", "blocks.1.mlp", "output"):
        gpt.get_submodule(name).register_forward_pre_hook(lambda module, args: read.append(args[0]))
    gpt(torch.randint(31, (2, 20)))
    assert len(read) == 5
    for x in read:
        torch.testing.assert_close(x.square().mean(-1), torch.ones(2, 20), rtol=1e-4, atol=0)


def test_rms_norm_is_exact_in_low_precision():
    x = torch.randn(4, 512).mul(300).half()  # the squares overflow fp16
    normed = rms_norm(x)
    assert normed.dtype == torch.float16
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(normed.double(), exact, rtol=1e-3, atol=1e-6)


def test_the_mlp_squares_a_relu():
    mlp = MLP(2)
    with torch.no_grad():
        mlp.up.weight.copy_(torch.cat([torch.eye(2), -torch.eye(2), torch.zeros(4, 2)]))
        mlp.down.weight.copy_(torch.cat([torch.eye(2), 10 * torch.eye(2), torch.zeros(2, 4)], dim=1))
    torch.testing.assert_close(mlp(torch.tensor([[[3.0, -2.0]]])), torch.tensor([[[9.0, 40.0]]]))


def test_the_gradients_of_norm_and_mlp_are_those_of_their_definitions():
    x, upstream = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    up, down = torch.randn(32, 8), torch.randn(8, 32)
    mlp = MLP(8)
    mlp.load_state_dict({"up.weight": up, "down.weight": down})

    def plain_norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    def gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(function(*inputs), inputs, upstream.to(inputs[0].dtype)))

    ours = [*gradients(rms_norm, x.requires_grad_()), *gradients(lambda x, *_: mlp(x), x, *mlp.parameters())]
    x, up, down = (y.detach().double().requires_grad_() for y in (x, up, down))
    plain = [
        *gradients(plain_norm, x),
        *gradients(lambda x, up, down: (x @ up.T).relu().square() @ down.T, x, up, down),
    ]
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def test_rotation_pairs_a_dimension_with_the_one_half_a_head_on():
    plan = build_position({"rotary": {"kind": "rope"}}, head_dim=8, n_head=1, train_length=16).plan(4)
    turned = plan.rotate(torch.eye(8)[:, None, None, :].expand(8, 1, 4, 8))[:, 0]  # unit vector, position, dimension
    for c in range(4):
        angle = torch.arange(4) * 10000 ** (-c / 4)
        torch.testing.assert_close(turned[c, :, c], angle.cos())
        torch.testing.assert_close(turned[c, :, c + 4], angle.sin())
        torch.testing.assert_close(turned[c + 4, :, c], -angle.sin())
        assert turned[c].count_nonzero(dim=-1).max() <= 2


def test_reductions_of_the_loss_agree_with_the_logits(small_gpt: Callable[..., GPT]):
    gpt, ids = small_gpt(), torch.randint(31, (2, 21))
    tokens, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[0, :5] = -100
    each = nn.functional.cross_entropy(gpt(tokens).flatten(0, 1), targets.flatten(), reduction="none").view(2, 20)
    torch.testing.assert_close(gpt(tokens, targets, reduction="none"), each)
    torch.testing.assert_close(gpt(tokens, targets, reduction="sum"), each.sum())
    torch.testing.assert_close(gpt(tokens, targets), each.sum() / 35)


def test_the_residual_stream_and_the_loss_are_fp32_under_bf16_autocast(small_gpt: Callable[..., GPT]):
    gpt, seen, ids = small_gpt(), [], torch.randint(31, (1, 20))
    for block in gpt.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = gpt(ids, ids)
    assert seen == [(torch.float32, torch.float32)] * 2
    assert loss.dtype == torch.float32


PINNED_LOSS = {
    "alibi": 2.65981,
    "infini_p_rope": 2.79988,
    "infini_rope": 2.79924,
    "logn_ntk": 2.68148,
    "logn_p_rope": 2.68521,
    "logn_rope": 2.66555,
    "nope": 2.66067,
    "p_rope": 2.66753,
    "rope": 2.65925,
    "rope_ntk": 2.66322,
    "scale_invariant_nope": 2.57452,
    "scale_invariant_p_rope": 2.57994,
    "scale_invariant_rope": 2.54699,
    "yarn": 2.61613,
}


@pytest.mark.parametrize("name", PINNED_LOSS)
def test_loss_after_five_steps_is_the_pinned_one(name: str, small_gpt: Callable[..., GPT]):
    """At twice the training length. A refactor must not move these; what moves them has changed the mathematics."""
    config = OmegaConf.load(MODELS.parent / "position" / f"{name}.yaml")
    gpt = small_gpt(OmegaConf.merge(config, {"reference_length": 2048}), train_length=16)
    assert five_steps(gpt) == pytest.approx(PINNED_LOSS[name], abs=3e-5)


def five_steps(gpt: GPT) -> float:
    """Plain gradient descent on one batch."""
    ids = torch.randint(31, (4, 33), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.3)
    for _ in range(5):
        optimizer.zero_grad()
        gpt(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
    return gpt(ids[:, :-1], ids[:, 1:]).item()


def test_annotated_shapes_are_checked_while_the_tests_run():
    with pytest.raises(TypeCheckError):
        Plan(4, cos=torch.ones(4, 3), sin=torch.ones(4, 2))
    with pytest.raises(TypeCheckError):
        rms_norm(torch.ones(3, dtype=torch.int64))
    with pytest.raises(TypeCheckError):
        GPT(GPTConfig(n_layer=1, n_head=1, width=4, vocab_size=5))(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeCheckError):
        orthogonalise(torch.ones(3, 3))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_the_mlp_has_the_gradients_of_its_definition(autocast: bool):
    mlp, x = MLP(16), torch.randn(2, 5, 16, requires_grad=True)
    nn.init.normal_(mlp.down.weight)
    upstream = torch.randn(2, 5, 16)
    wanted = (x, mlp.up.weight, mlp.down.weight)
    exact = torch.relu(x @ mlp.up.weight.T) ** 2 @ mlp.down.weight.T
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = mlp(x)
    for got, expected in zip(
        (y, *torch.autograd.grad(y.float(), wanted, upstream)),
        (exact, *torch.autograd.grad(exact, wanted, upstream)),
        strict=True,
    ):
        assert (got - expected).norm() < (0.02 if autocast else 1e-6) * expected.norm()


def test_the_mlp_keeps_one_wide_tensor_for_the_backward_pass():
    kept: list[torch.Size] = []
    mlp = MLP(16)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        mlp(torch.randn(2, 5, 16))
    assert [shape.numel() for shape in kept if shape[-1] == 64 and shape[:-1].numel() == 10] == [2 * 5 * 64]
