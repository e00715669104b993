"""Every scheme against oracles written here in float64 numpy, from the paper's equations and not from the code."""

import dataclasses
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf

from model.gpt import GPT
from model.position import Plan, PositionScheme, build_position

Array = NDArray[np.float64]

CONFIGS = Path(__file__).parents[2] / "configs" / "position"
SLOTS = ("rotary", "query_scale", "logits")
SCHEMES = {  # the kinds of the slots that the paper's schemes consist of
    "nope": ("none", "none", "none"),
    "rope": ("rope", "none", "none"),
    "p_rope": ("p_rope", "none", "none"),
    "rope_ntk": ("ntk", "none", "none"),
    "yarn": ("yarn", "none", "none"),
    "logn_rope": ("rope", "logn", "none"),
    "logn_p_rope": ("p_rope", "logn", "none"),
    "logn_ntk": ("ntk", "logn", "none"),
    "alibi": ("none", "none", "alibi"),
    "scale_invariant_p_rope": ("p_rope", "none", "scale_invariant"),
    "scale_invariant_rope": ("rope", "none", "scale_invariant"),
    "scale_invariant_nope": ("none", "none", "scale_invariant"),
}
LENGTHS = (1, 2, 127, 128, 129, 4096, 65536)
N_HEADS = (1, 6, 8, 12)
HEAD_DIMS = (64, 128)
TRAIN_LENGTH = 4096
ROTARY = ("none", "rope", "p_rope", "ntk", "yarn")
QUERY_SCALE = ("none", "logn")
LOGITS = ("none", "alibi", "scale_invariant")


def oracle_frequency(kind: str, d: int, length: int, train_length: int) -> Array:
    """Radians per token of the d/2 pairs."""
    c = np.arange(d // 2)
    f = 10000.0 ** (-2 * c / d)
    stretch = length / train_length
    match kind:
        case "none":
            return np.zeros(d // 2)
        case "rope":
            return f
        case "p_rope":
            return np.where(c < d // 4, 1024.0 ** (-c / (d / 4 - 1)), 0.0)
        case "ntk" if stretch > 1:
            return (10000 * stretch ** (d / (d - 2))) ** (-2 * c / d)
        case "yarn" if stretch > 1:
            first, last = (
                d * math.log(train_length / (2 * math.pi * turns)) / (2 * math.log(1e4)) for turns in (32, 1)
            )
            low, high = max(math.floor(first), 0), min(math.ceil(last), d - 1)
            interpolated = np.clip((c - low) / max(high - low, 1e-3), 0, 1)
            return f * (1 - interpolated) + f / stretch * interpolated
    return oracle_frequency("rope", d, length, train_length)


def oracle_temperature(kind: str, length: int, train_length: int) -> float:
    """YaRN's factor on the logits."""
    beyond = kind == "yarn" and length > train_length
    return (0.1 * math.log(length / train_length) + 1) ** 2 if beyond else 1.0


def oracle_slopes(n_head: int) -> Array:
    """ALiBi's, in the form of its paper."""
    if n_head & (n_head - 1) == 0:
        return 2.0 ** (-8 * np.arange(1, n_head + 1) / n_head)
    power = 1 << (n_head.bit_length() - 1)
    return np.concatenate([oracle_slopes(power), oracle_slopes(2 * power)[0::2][: n_head - power]])


def oracle_scale_shift(kind: str, t: Array, n_head: int) -> tuple[Array, Array]:
    """(H, *t) each."""
    if kind == "alibi":
        return np.ones((n_head, *t.shape)), -np.multiply.outer(oracle_slopes(n_head), t)
    if kind == "scale_invariant":
        tau = 10.0
        a = np.sqrt(2 * np.log(t / tau + 1) + 1)
        return np.broadcast_to(a, (n_head, *t.shape)), np.broadcast_to(-2 * np.log(t / tau + 1), (n_head, *t.shape))
    return np.ones((n_head, *t.shape)), np.zeros((n_head, *t.shape))


def oracle_rotate(x: Array, positions: Array, frequency: Array) -> Array:
    """Turns the pairs (c, c + d/2), as complex numbers, of x (..., T, d)."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.multiply.outer(positions, frequency))
    return np.concatenate([turned.real, turned.imag], axis=-1)


def oracle_logits(
    kinds: dict[str, str], q: Array, k: Array, i: Array, j: Array, factor: Array, length: int, train_length: int
) -> Array:
    """L (H, i, j) from q (H, i, d), k (H, j, d) and LogN's factor (H); what lies at j > i means nothing."""
    n_head, _, d = q.shape
    f = oracle_frequency(kinds["rotary"], d, length, train_length)
    score = oracle_rotate(q, i, f) @ oracle_rotate(k, j, f).swapaxes(1, 2) / math.sqrt(d)
    score *= oracle_temperature(kinds["rotary"], length, train_length)
    if kinds["query_scale"] == "logn":
        score *= (factor[:, None] * np.log(i + 1))[:, :, None]
    scale, shift = oracle_scale_shift(kinds["logits"], np.maximum(i[:, None] - j, 0), n_head)
    return scale * score + shift


def load(name: str) -> Any:
    """The scheme's file in configs/position/."""
    return OmegaConf.load(CONFIGS / f"{name}.yaml")


def kinds_of(name: str) -> dict[str, str]:
    return dict(zip(SLOTS, SCHEMES[name], strict=True))


def sampled_positions(length: int, most: int = 28) -> Array:
    """Both ends, the places around powers of two, and some at random."""
    chosen = {0, 1, 2, 3, length // 2, length - 2, length - 1, *(n + s for n in (128, 4096) for s in (-1, 0, 1))}
    chosen |= set(np.random.default_rng(length).integers(0, length, most - len(chosen)).tolist())
    return np.array(sorted(p for p in chosen if 0 <= p < length), dtype=np.float64)


def rows(plan: Plan, positions: Array) -> Plan:
    """The plan of some query positions alone."""
    index = torch.from_numpy(positions).long()
    return dataclasses.replace(
        plan,
        cos=None if plan.cos is None else plan.cos[index],
        sin=None if plan.sin is None else plan.sin[index],
        query_scale=None if plan.query_scale is None else plan.query_scale[..., index],
    )


def scheme(rotary: str = "none", query_scale: str = "none", logits: str = "none", **geometry: int) -> PositionScheme:
    config = {"rotary": {"kind": rotary}, "query_scale": {"kind": query_scale}, "logits": {"kind": logits}}
    sizes = {"head_dim": 64, "n_head": 1, "train_length": TRAIN_LENGTH, **geometry}
    return build_position({**config, "allow_two_temperatures": True}, **sizes)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", ROTARY[1:])
def test_frequencies_and_rotation_tables_match_the_oracle(kind: str, head_dim: int):
    position = scheme(rotary=kind, head_dim=head_dim)
    for length in LENGTHS:
        plan, i = position.plan(length), sampled_positions(length).astype(int)
        frequency = oracle_frequency(kind, head_dim, length, TRAIN_LENGTH)
        assert plan.angular_frequency is not None
        assert plan.cos is not None
        assert plan.sin is not None
        np.testing.assert_allclose(plan.angular_frequency, frequency, rtol=1e-6, atol=0)
        assert plan.cos.shape == plan.sin.shape == (length, head_dim // 2)
        angle = np.multiply.outer(i, frequency)
        np.testing.assert_allclose(plan.cos.numpy()[i], np.cos(angle), rtol=0, atol=1e-6)
        np.testing.assert_allclose(plan.sin.numpy()[i], np.sin(angle), rtol=0, atol=1e-6)
        assert plan.temperature == pytest.approx(oracle_temperature(kind, length, TRAIN_LENGTH), rel=1e-12)


@pytest.mark.parametrize("n_head", N_HEADS)
@pytest.mark.parametrize("kind", LOGITS[1:])
def test_scale_and_shift_tables_match_the_oracle_at_every_distance(kind: str, n_head: int):
    position = scheme(logits=kind, n_head=n_head)
    for length in LENGTHS:
        transform = position.plan(length).transform
        assert transform is not None
        scale, shift = oracle_scale_shift(kind, np.arange(length, dtype=np.float64), n_head)
        for table, expected, neutral in ((transform.scale, scale, 1.0), (transform.shift, shift, 0.0)):
            given = np.full((1, length), neutral) if table is None else table.numpy()
            assert given.shape in ((1, length), (n_head, length))
            np.testing.assert_allclose(np.broadcast_to(given, expected.shape), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n_head", N_HEADS)
def test_query_scale_is_s_log_of_the_keys_seen(n_head: int):
    position = scheme(query_scale="logn", n_head=n_head, n_layer=3)
    for length in LENGTHS:
        s = position.plan(length).query_scale
        assert s is not None
        expected = np.broadcast_to(0.4 * np.log(np.arange(length) + 1.0), (3, n_head, length))
        np.testing.assert_allclose(s.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("n_head", N_HEADS)
@pytest.mark.parametrize("name", SCHEMES)
def test_logits_match_the_oracle_in_fp32(name: str, n_head: int, head_dim: int):
    position = build_position(load(name), head_dim=head_dim, n_head=n_head, train_length=TRAIN_LENGTH)
    for length in LENGTHS if n_head == 6 else LENGTHS[:-1]:
        check_logits(position.plan(length), kinds_of(name), sampled_positions(length), n_head, head_dim, length)


@pytest.mark.parametrize("kinds", list(product(ROTARY, QUERY_SCALE, LOGITS)), ids="-".join)
def test_logits_of_any_combination_match_the_oracle_beyond_the_training_length(kinds: tuple[str, str, str]):
    length = 4 * TRAIN_LENGTH
    plan = scheme(*kinds, n_head=6).plan(length)
    check_logits(plan, dict(zip(SLOTS, kinds, strict=True)), sampled_positions(length), 6, 64, length)


def check_logits(plan: Plan, kinds: dict[str, str], i: Array, n_head: int, head_dim: int, length: int) -> None:
    """L at all pairs of sampled positions, assembled in fp32 from the plan as attention does it."""
    q, k = torch.randn(2, 1, n_head, len(i), head_dim)
    sampled = rows(plan, i)
    with torch.no_grad():
        logits = (sampled.query(q, layer=0) @ sampled.rotate(k).mT / math.sqrt(head_dim))[0]
    t = torch.from_numpy(i[:, None] - i).long().clamp(min=0)
    if plan.transform is not None and plan.transform.scale is not None:
        logits = logits * plan.transform.scale[:, t]
    if plan.transform is not None and plan.transform.shift is not None:
        logits = logits + plan.transform.shift[:, t]
    factor = np.full(n_head, 0.4)
    expected = oracle_logits(kinds, q[0].double().numpy(), k[0].double().numpy(), i, i, factor, length, TRAIN_LENGTH)
    seen = np.broadcast_to(i[:, None] >= i, expected.shape)
    np.testing.assert_allclose(logits.numpy()[seen], expected[seen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [16, 256])
@pytest.mark.parametrize("name", SCHEMES)
def test_attention_layers_of_a_gpt_compute_the_equation(name: str, length: int, small_gpt: Callable[..., GPT]):
    """From the layer's input on, in both layers: projections, QK-norm, all three slots, softmax and values."""
    gpt, seen = small_gpt(load(name), train_length=16), []
    for block in gpt.blocks.children():
        block.get_submodule("attention").register_forward_hook(
            lambda layer, args, out: seen.append((layer, args[0], out))
        )
    with torch.no_grad():
        gpt(torch.randint(31, (1, length)))
    assert len(seen) == 2
    for number, (layer, x, out) in enumerate(seen):
        factor = (
            gpt.position.get_parameter("query_scale.factor")[number].detach().double().numpy()
            if kinds_of(name)["query_scale"] == "logn"
            else np.ones(2)
        )
        weights = [w.weight.detach().double().numpy() for w in (layer.query, layer.key, layer.value, layer.out)]
        expected = oracle_attention(x[0].double().numpy(), weights, kinds_of(name), factor)
        np.testing.assert_allclose(out[0], expected, rtol=1e-4, atol=2e-5)


def oracle_attention(x: Array, weights: list[Array], kinds: dict[str, str], factor: Array) -> Array:
    """The output (T, C) of one layer with two heads, trained at 16 tokens, for its input (T, C)."""
    query, key, value, out = weights
    heads = lambda y: y.reshape(len(y), 2, -1).transpose(1, 0, 2)  # noqa: E731
    norm = lambda y: y / np.sqrt((y**2).mean(-1, keepdims=True) + np.finfo(np.float32).eps)  # noqa: E731
    q, k, v = norm(heads(x @ query.T)), norm(heads(x @ key.T)), heads(x @ value.T)
    i = np.arange(len(x), dtype=np.float64)
    logits = oracle_logits(kinds, q, k, i, i, factor, length=len(x), train_length=16)
    p = np.where(i[:, None] >= i, np.exp(logits - logits.max()), 0)
    return ((p / p.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(x.shape) @ out.T
