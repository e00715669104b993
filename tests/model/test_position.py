"""Position schemes: published points, the theory, precision, composition, refusals, plans for parts of a sequence."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from model.gpt import GPT
from model.position import Plan, PositionScheme, build_position
from model.position.scheme import SLOTS

KINDS = [(rotary, scale, logits) for rotary, scale, logits in product(*(list(kinds) for kinds in SLOTS.values()))]


def build(
    rotary: Any = "none", query_scale: Any = "none", logits: Any = "none", *, top: Any = None, **geometry: int
) -> PositionScheme:
    """A scheme from kinds, or dicts with the keys of a kind; `top` holds the keys above the slots."""
    slots = {"rotary": rotary, "query_scale": query_scale, "logits": logits}
    config = {slot: {"kind": given} if isinstance(given, str) else given for slot, given in slots.items()}
    return build_position(config | (top or {}), **{"head_dim": 128, "n_head": 6, "train_length": 4096, **geometry})


def frequency(position: PositionScheme, length: int) -> Tensor:
    found = position.plan(length).angular_frequency
    assert found is not None
    return found


def tables(position: PositionScheme, length: int) -> tuple[Tensor, Tensor]:
    """a and m of a scheme that has both."""
    transform = position.plan(length).transform
    assert transform is not None
    assert transform.scale is not None
    assert transform.shift is not None
    return transform.scale, transform.shift


# Published points


def test_scale_invariant_table_holds_the_published_point():
    scale, shift = tables(build(logits="scale_invariant"), 65536)
    assert scale[0, 65535].item() == pytest.approx(4.30997, abs=5e-6)
    assert shift[0, 65535].item() == pytest.approx(-17.57581, abs=5e-6)


def test_scale_invariant_attention_leaves_the_token_itself_alone():
    scale, shift = tables(build(logits="scale_invariant"), 1)
    torch.testing.assert_close((scale, shift), (torch.ones(1, 1), torch.zeros(1, 1)))


@pytest.mark.parametrize("tau", [0.01, 1, 100.0])
def test_tau_is_the_distance_where_the_weight_has_fallen_to_a_quarter(tau: float):
    _, shift = tables(build(logits={"kind": "scale_invariant", "tau": tau}), 101)
    t = max(1, round(tau))
    assert shift[0, t].exp().item() == pytest.approx((t / tau + 1) ** -2, rel=1e-6)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (2.0, 3.0), (0.5, 0.0), (3.0, 3.0 * math.log(3.0))])
def test_general_alpha_and_beta_give_equation_16(alpha: float, beta: float):
    scale, shift = tables(build(logits={"kind": "scale_invariant", "tau": 2.0, "alpha": alpha, "beta": beta}), 4096)
    t = np.arange(4096)
    square = np.maximum(2 * (np.log(t / 2 + 1) - np.log(alpha) + beta / alpha), 0)
    np.testing.assert_allclose(scale[0], np.sqrt(square), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(shift[0], beta / alpha - square, rtol=1e-6, atol=1e-6)


def test_boundary_form_is_the_general_form_at_alpha_and_beta_root_e():
    root_e = math.exp(0.5)
    general = tables(build(logits={"kind": "scale_invariant", "alpha": root_e, "beta": root_e}), 4096)
    torch.testing.assert_close(general, tables(build(logits="scale_invariant"), 4096), rtol=0, atol=0)


def test_p_rope_turns_half_of_the_pairs_from_1_down_to_1_over_1024():
    f = frequency(build("p_rope"), 65536)
    assert f.shape == (64,)
    assert f[0] == 1
    assert f[31].item() == pytest.approx(1 / 1024, rel=1e-12)
    torch.testing.assert_close(f[1:32] / f[:31], torch.full((31,), 1024 ** (-1 / 31), dtype=f.dtype))
    assert torch.equal(f[32:], torch.zeros(32, dtype=f.dtype))


def test_p_sets_the_share_of_turning_pairs():
    assert frequency(build({"kind": "p_rope", "p": 0.25}), 8).count_nonzero() == 16
    assert frequency(build({"kind": "p_rope", "p": 1.0}), 8).count_nonzero() == 64


def test_rope_frequencies_fall_from_1_by_the_base():
    f = frequency(build("rope"), 65536)
    assert f[0] == 1
    assert f[32].item() == pytest.approx(0.01, rel=1e-12)
    torch.testing.assert_close(f[1:] / f[:-1], torch.full((63,), 10000 ** (-1 / 64), dtype=f.dtype))


def test_ntk_base_at_16_times_the_training_length():
    f = frequency(build("ntk"), 65536)
    assert f[1].item() ** -64 == pytest.approx(167198.74, abs=0.01)
    assert f[0] == 1


def test_ntk_stretches_the_lowest_frequency_by_the_length_ratio():
    position = build("ntk")
    assert (frequency(position, 4096)[-1] / frequency(position, 65536)[-1]).item() == pytest.approx(16, rel=1e-12)


@pytest.mark.parametrize("kind", ["ntk", "yarn"])
@pytest.mark.parametrize("length", [1, 2, 4095, 4096])
def test_ntk_and_yarn_are_rope_within_the_training_length(kind: str, length: int):
    plan, rope = build(kind).plan(length), build("rope").plan(length)
    for name in ("angular_frequency", "cos", "sin"):
        assert torch.equal(getattr(plan, name), getattr(rope, name))
    assert plan.temperature == 1.0


@pytest.mark.parametrize("kind", ["ntk", "yarn"])
def test_ntk_and_yarn_differ_from_rope_one_token_beyond_the_training_length(kind: str):
    assert not torch.equal(frequency(build(kind), 4097), frequency(build("rope"), 4097))


def test_yarn_keeps_fast_pairs_and_divides_slow_ones_by_the_length_ratio():
    stretch = frequency(build("rope"), 65536) / frequency(build("yarn"), 65536)
    assert torch.equal(stretch[:21], torch.ones(21, dtype=stretch.dtype))  # c(32) = 20.9
    torch.testing.assert_close(stretch[46:], torch.full((18,), 16.0, dtype=stretch.dtype))  # c(1) = 45.03
    assert (stretch[20:47].diff() > 0).all()


def test_yarn_multiplies_the_logits_of_a_layer_by_its_factor_once(
    small_gpt: Callable[..., GPT], monkeypatch: pytest.MonkeyPatch
):
    """<q, k> / sqrt(d) of what a layer hands to `attend`, with and without the plan, 16 times beyond training."""
    gpt, seen = small_gpt({"rotary": {"kind": "yarn"}}, n_layer=1, train_length=16), []

    def spy(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        seen.append((q, k))
        return v

    monkeypatch.setattr("model.attention.attend", spy)
    layer, plan = gpt.blocks.get_submodule("0.attention"), gpt.position.plan(256)
    x = torch.randn(1, 256, 32)
    layer(x, plan)
    layer(x, Plan(256))
    (q, k), raw = seen
    assert plan.cos is not None
    assert plan.sin is not None
    turn = torch.complex(plan.cos, plan.sin)
    turned_q, turned_k = (torch.complex(*x.chunk(2, dim=-1)) * turn for x in raw)
    expected = 1.63139 * (turned_q @ turned_k.mH).real / 4
    torch.testing.assert_close(q @ k.mT / 4, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [5, 16])
def test_yarn_gpt_is_the_rope_gpt_within_the_training_length(length: int, small_gpt: Callable[..., GPT]):
    tokens = torch.randint(31, (2, length))
    yarn, rope = (small_gpt({"rotary": {"kind": kind}}, train_length=16) for kind in ("yarn", "rope"))
    assert torch.equal(yarn(tokens), rope(tokens))


@pytest.mark.parametrize(
    ("n_head", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
        (12, [*(2**-h for h in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes(n_head: int, slopes: list[float]):
    transform = build(logits="alibi", n_head=n_head).plan(3).transform
    assert transform is not None
    assert transform.scale is None
    assert transform.shift is not None
    torch.testing.assert_close(transform.shift, -torch.tensor(slopes)[:, None] * torch.arange(3))


def test_logn_starts_at_0_4_times_log_of_the_keys_seen():
    s = build(query_scale="logn", n_layer=2).plan(65536).query_scale
    assert s is not None
    assert s.shape == (2, 6, 65536)
    assert s[0, 0, 0] == 0
    assert s[1, 5, 65535].item() == pytest.approx(0.4 * math.log(65536), rel=1e-6)


def test_logn_can_count_the_sequence_length_instead():
    s = build(query_scale={"kind": "logn", "count": "length"}).plan(100, start=3).query_scale
    torch.testing.assert_close(s, torch.full((1, 6, 97), 0.4 * math.log(100)))


def test_logn_scale_is_learned_per_layer_and_head():
    position = build(query_scale="logn", n_layer=3)
    s = position.plan(9).query_scale
    assert s is not None
    s[1, 2, 8].backward()
    gradient = position.get_parameter("query_scale.factor").grad
    assert gradient is not None
    assert gradient[1, 2].item() == pytest.approx(math.log(9), rel=1e-6)
    assert gradient.count_nonzero() == 1


def test_logn_scale_can_be_fixed():
    assert not any(p.requires_grad for p in build(query_scale={"kind": "logn", "learned": False}).parameters())


# Values per head, and learned ones


@pytest.mark.parametrize("length", [1, 300])
def test_constants_given_per_head_are_those_heads_own(length: int):
    lists = {"tau": [1, 10.0], "alpha": [1.0, 2.0], "beta": [1.0, 3.0]}
    both = tables(build(logits=OmegaConf.create({"kind": "scale_invariant", **lists}), n_head=2), length)
    for head in range(2):
        keys = {key: values[head] for key, values in lists.items()}
        alone = tables(build(logits={"kind": "scale_invariant", **keys}), length)
        torch.testing.assert_close([table[head] for table in both], [table[0] for table in alone])


def test_logn_and_alibi_take_values_per_head():
    plan = build(
        query_scale={"kind": "logn", "start": [0.1, 0.2]}, logits={"kind": "alibi", "slopes": [1, 2]}, n_head=2
    )
    plan = plan.plan(5)
    assert plan.query_scale is not None
    assert plan.transform is not None
    torch.testing.assert_close(plan.query_scale[0], torch.tensor([[0.1], [0.2]]) * torch.arange(1, 6).log())
    torch.testing.assert_close(plan.transform.shift, -torch.tensor([[1.0], [2.0]]) * torch.arange(5))


def test_learned_tau_starts_as_the_fixed_one_per_head_and_stays_positive():
    position = build(logits={"kind": "scale_invariant", "learned": True})
    fixed = tables(build(logits="scale_invariant"), 1000)
    torch.testing.assert_close(tables(position, 1000), tuple(table.expand(6, -1) for table in fixed))
    log_tau = position.get_parameter("logits.log_tau")
    assert log_tau.shape == (6,)
    torch.nn.init.constant_(log_tau, -20)
    assert all(table.isfinite().all() for table in tables(position, 1000))


def test_gradient_of_the_loss_in_learned_tau_is_its_slope(small_gpt: Callable[..., GPT]):
    position = {"logits": {"kind": "scale_invariant", "tau": 3.0, "learned": True}}
    gpt = small_gpt(position, train_length=16).double()
    log_tau = gpt.position.get_parameter("logits.log_tau")
    tokens = torch.randint(31, (2, 24))

    def loss() -> Tensor:
        return gpt(tokens[:, :-1], tokens[:, 1:])

    (gradient,) = torch.autograd.grad(loss(), log_tau)
    for head, expected in enumerate(gradient):
        ends = []
        for step in (0.02, -0.02):
            with torch.no_grad():
                log_tau[head] += step
                ends.append(loss())
                log_tau[head] -= step
        torch.testing.assert_close((ends[0] - ends[1]) / 0.04, expected.float(), rtol=5e-3, atol=1e-5)


# Scaled copies


@pytest.mark.parametrize(("kind", "pair", "base"), [("p_rope", 31, 64), ("rope", 32, 625**0.5)])
def test_a_scaled_copy_shrinks_the_base_with_the_training_length(kind: str, pair: int, base: float):
    copy = build(kind, train_length=256, top={"reference_length": 4096})
    assert frequency(copy, 256)[pair].item() == pytest.approx(1 / base, rel=1e-12)


def test_reference_length_changes_nothing_at_that_training_length():
    position = build("p_rope", train_length=4096, top={"reference_length": 4096})
    assert torch.equal(frequency(position, 8), frequency(build("p_rope"), 8))


# Theory

ALPHA_BETA = [None, (1.0, 1.0), (2.0, 3.0)]


def invariant(alpha_beta: tuple[float, float] | None, tau: float = 10.0) -> tuple[PositionScheme, float, float]:
    alpha, beta = alpha_beta or (math.exp(0.5), math.exp(0.5))
    keys = {} if alpha_beta is None else {"alpha": alpha, "beta": beta}
    return build(logits={"kind": "scale_invariant", "tau": tau, **keys}), alpha, beta


@pytest.mark.parametrize("t", [0, 1, 10, 50])
@pytest.mark.parametrize("alpha_beta", ALPHA_BETA)
def test_sampled_gaussian_logits_have_the_promised_expectations(alpha_beta: tuple[float, float] | None, t: int):
    position, alpha, beta = invariant(alpha_beta)
    scale, shift = tables(position, t + 1)
    strata = (torch.arange(2_000_000) + torch.rand(2_000_000, dtype=torch.float64)) / 2_000_000
    logits = scale[0, t] * torch.special.ndtri(strata) + shift[0, t]
    assert logits.exp().mean().item() == pytest.approx(alpha / (t / 10 + 1), rel=0.01)
    assert (logits * logits.exp()).mean().item() == pytest.approx(beta / (t / 10 + 1), rel=0.04)


@pytest.mark.parametrize("alpha_beta", ALPHA_BETA)
def test_expectations_hold_at_every_distance(alpha_beta: tuple[float, float] | None):
    """By Gauss-Hermite quadrature, because exp of a wide Gaussian has too heavy a tail to sample."""
    position, alpha, beta = invariant(alpha_beta)
    scale, shift = (table[0, ::97, None].double() for table in tables(position, 65536))
    node, weight = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(80))
    logits, weight = scale * node + shift, weight / math.sqrt(2 * math.pi)
    weakening = torch.arange(0, 65536, 97) / 10.0 + 1
    torch.testing.assert_close(logits.exp() @ weight, (alpha / weakening).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close((logits * logits.exp()) @ weight, (beta / weakening).double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("tau", [1.0, 10.0])
@pytest.mark.parametrize("alpha_beta", ALPHA_BETA)
def test_attention_and_negentropy_of_a_range_approach_the_lemmas(alpha_beta: tuple[float, float] | None, tau: float):
    position, alpha, beta = invariant(alpha_beta, tau)
    a, m = (table[0].double() for table in tables(position, 60_000))
    attention = (m + a**2 / 2).exp()  # E[exp L] of a Gaussian logit
    negentropy = attention * (m + a**2)  # E[L exp L]
    for terms, limit in ((attention, alpha * tau * math.log(10)), (negentropy, beta * tau * math.log(10))):
        sums = torch.stack([terms[t : 10 * t].sum() for t in (6, 60, 600, 6000)])
        error = (sums / limit - 1).abs()
        assert (error.diff() < 0).all()
        assert error[-1] < 2e-3


def test_attention_stays_spread_over_scales_where_plain_logits_move_to_far_ones():
    """Total attention in each decade of distance, averaged over IID Gaussian scores (figure 1's setting)."""
    score = torch.randn(400, 10_000)
    a, m = tables(build(logits="scale_invariant"), 10_000)
    plain, invariant = (torch.softmax(logits, dim=1).mean(0) for logits in (score, a * score + m))
    decades = [slice(10, 100), slice(100, 1000), slice(1000, 10_000)]
    assert min(invariant[decade].sum() for decade in decades) > 0.15
    assert plain[decades[0]].sum() < 0.02


# Precision


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 module", "bf16 autocast"])
def test_tables_are_exact_to_fp32_whatever_the_activations_are(autocast: bool):
    """Neighbouring distances differ at 65536 tokens, where bf16 holds only 1281 integers and 8 bits of a logarithm."""
    position = build("rope", {"kind": "logn", "start": 1.0}, "alibi")
    sharp = build(logits="scale_invariant")
    if not autocast:
        position, sharp = position.bfloat16(), sharp.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plan, (scale, shift) = position.plan(65536), tables(sharp, 65536)
    assert plan.transform is not None
    assert plan.transform.shift is not None
    assert plan.cos is not None
    assert plan.sin is not None
    assert plan.query_scale is not None
    for table in (plan.cos, plan.sin, plan.query_scale, plan.transform.shift, scale, shift):
        assert table.dtype == torch.float32
    assert (scale.diff() > 0).all()
    assert (shift.diff() < 0).all()
    assert (plan.transform.shift.diff() < 0).all()
    assert (plan.query_scale.diff() > 0).all()
    i = np.arange(65000, 65536)
    np.testing.assert_allclose(plan.cos.numpy()[i, 0], np.cos(i), rtol=0, atol=1e-6)
    np.testing.assert_allclose(plan.sin.numpy()[i, 0], np.sin(i), rtol=0, atol=1e-6)
    np.testing.assert_allclose(plan.query_scale[0, 0].detach().numpy()[i], np.log(i + 1), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_vectors_are_turned_by_exact_angles(dtype: torch.dtype):
    plan = build("rope").plan(65536)
    x = torch.randn(1, 1, 65536, 128).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        turned = plan.rotate(x)
    assert turned.dtype == dtype
    pairs = torch.complex(*x[0, 0, -100:].double().chunk(2, dim=-1))
    angle = torch.arange(65436, 65536, dtype=torch.float64)[:, None] * 10000 ** (-torch.arange(64) / 64.0).double()
    expected = pairs * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat([expected.real, expected.imag], dim=-1)
    torch.testing.assert_close(turned[0, 0, -100:].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("logits", ["alibi", "scale_invariant"])
def test_the_layers_of_a_bf16_forward_pass_get_the_fp32_plan(logits: str, small_gpt: Callable[..., GPT]):
    position = {"rotary": {"kind": "rope"}, "query_scale": {"kind": "logn"}, "logits": {"kind": logits}}
    gpt, seen = small_gpt({**position, "allow_two_temperatures": True}), []
    for block in gpt.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    with torch.autocast("cpu", torch.bfloat16):
        gpt(torch.randint(31, (1, 40)))
    whole = gpt.position.plan(40)
    for plan, expected in zip(seen, map(whole.at_layer, range(2)), strict=True):
        for name in ("cos", "sin", "query_scale", "transform.scale", "transform.shift"):
            got, wanted = (getattr(p.transform if "." in name else p, name.split(".")[-1]) for p in (plan, expected))
            if wanted is not None:
                assert got.dtype == torch.float32
                assert torch.equal(got, wanted)


# Composition


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_any_combination_of_kinds_trains_a_gpt(kinds: tuple[str, str, str], small_gpt: Callable[..., GPT]):
    slots = {slot: {"kind": kind} for slot, kind in zip(SLOTS, kinds, strict=True)}
    gpt = small_gpt({**slots, "allow_two_temperatures": True})
    tokens = torch.randint(31, (2, 40))
    loss = gpt(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert loss.isfinite()
    for name, parameter in gpt.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_two_length_temperatures_are_refused_unless_asked_for():
    with pytest.raises(ValueError, match="allow_two_temperatures=true"):
        build("rope", "logn", "scale_invariant")
    plan = build("rope", "logn", "scale_invariant", top={"allow_two_temperatures": True}).plan(4)
    assert plan.query_scale is not None
    assert plan.transform is not None


def test_a_slot_left_out_is_none():
    assert build_position({}, head_dim=3, n_head=1, train_length=4).plan(4) == Plan(4)


# Refusals


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"rotary": "ropee"}, r"position\.rotary\.kind=ropee is unknown; choose one of: none, rope, p_rope, ntk, yarn"),
        ({"query_scale": "log"}, r"position\.query_scale\.kind=log is unknown; .*logn"),
        ({"logits": "t5"}, r"position\.logits\.kind=t5 is unknown; .*scale_invariant"),
        ({"rotary": {"kind": "rope", "bas": 3}}, r"position\.rotary\.bas=3 means nothing to kind=rope; .*base"),
        ({"logits": {"kind": "alibi", "tau": 3}}, r"position\.logits\.tau=3 means nothing to kind=alibi"),
        ({"logits": {"kind": "scale_invariant", "geometry": 3}}, r"position\.logits\.geometry=3 means nothing"),
        ({"logits": {"kind": "scale_invariant", "tau": 0}}, r"position\.logits\.tau=0 must be above 0"),
        ({"logits": {"kind": "scale_invariant", "tau": -1.5}}, r"position\.logits\.tau=-1\.5 must be above 0"),
        ({"logits": {"kind": "scale_invariant", "tau": math.nan}}, r"position\.logits\.tau=nan"),
        ({"logits": {"kind": "scale_invariant", "tau": math.inf}}, r"position\.logits\.tau=inf"),
        ({"logits": {"kind": "scale_invariant", "alpha": 1.0}}, r"position\.logits\.alpha=1\.0 and .*beta=None"),
        ({"logits": {"kind": "scale_invariant", "alpha": 0, "beta": 1}}, r"position\.logits\.alpha=0 must be above 0"),
        (
            {"logits": {"kind": "scale_invariant", "alpha": 3.0, "beta": 3.2}},
            r"position\.logits\.beta=3\.2 must be at least alpha log\(alpha\) = 3\.29584",
        ),
        ({"query_scale": {"kind": "logn", "count": "heads"}}, r"position\.query_scale\.count=heads .*keys or length"),
        ({"rotary": {"kind": "rope", "base": 0}}, r"position\.rotary\.base=0 must be above 0"),
        ({"rotary": {"kind": "p_rope", "p": 0.33}}, r"position\.rotary\.p=0\.33 "),
        ({"rotary": {"kind": "p_rope", "p": 1.5}}, r"position\.rotary\.p=1\.5 "),
        ({"rotary": {"kind": "p_rope", "p": 0.0}}, r"position\.rotary\.p=0\.0 "),
        ({"rotary": {"kind": "yarn", "slow_turns": 40}}, r"position\.rotary\.fast_turns=32\.0 .*slow_turns=40"),
        ({"rotary": {"kind": "yarn", "base": 1}}, r"position\.rotary\.base=1 must be above 1"),
        ({"logits": {"kind": "scale_invariant", "tau": [1, 2]}}, r"position\.logits\.tau=\[1, 2\] has 2 .*6 heads"),
        ({"logits": {"kind": "scale_invariant", "tau": "ten"}}, r"position\.logits\.tau=ten must be a number"),
        ({"logits": {"kind": "scale_invariant", "tau": [*[10] * 5, 0]}}, r"position\.logits\.tau=.* must be above 0"),
        ({"query_scale": {"kind": "logn", "start": [0.4]}}, r"position\.query_scale\.start=\[0\.4\] has 1 numbers"),
        ({"top": {"reference_length": 0}}, r"position\.reference_length=0 must be at least 1"),
    ],
)
def test_what_means_nothing_is_refused_in_one_line_with_its_key(slots: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as refusal:
        build(**slots)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["rope", "p_rope", "ntk", "yarn"])
def test_an_odd_head_dimension_is_refused_with_a_rotation(kind: str):
    with pytest.raises(ValueError, match=r"head dimension 33 is odd.*model\.width and model\.n_head"):
        build(kind, head_dim=33)


def test_an_odd_head_dimension_is_fine_without_a_rotation():
    assert build(logits="scale_invariant", head_dim=33).plan(2).cos is None


def test_p_rope_refuses_a_head_dimension_without_whole_quarters():
    with pytest.raises(ValueError, match=r"position\.rotary\.p=0\.5 of the 35 pairs"):
        build("p_rope", head_dim=70)


def test_ntk_refuses_a_head_of_one_pair():
    with pytest.raises(ValueError, match=r"head dimension 2 is too small for position\.rotary\.kind=ntk"):
        build("ntk", head_dim=2)


# Plans of parts of a sequence


@pytest.mark.parametrize("count", ["keys", "length"])
@pytest.mark.parametrize("rotary", list(SLOTS["rotary"]))
def test_a_piece_fed_alone_gets_its_rows_of_the_whole_sequence(rotary: str, count: str):
    """Cached decoding: queries 5 .. 6 of a sequence that will be 40 tokens, beyond the training length of 16."""
    position = build(rotary, {"kind": "logn", "count": count}, "alibi", train_length=16, head_dim=16)
    whole, piece = position.plan(40), position.plan(7, start=5, inference_length=40)
    assert whole.query_scale is not None
    assert piece.query_scale is not None
    assert torch.equal(piece.query_scale, whole.query_scale[..., 5:7])
    assert piece.temperature == whole.temperature
    if whole.cos is not None and whole.sin is not None:
        assert piece.cos is not None
        assert piece.sin is not None
        assert torch.equal(piece.cos, whole.cos[5:7])
        assert torch.equal(piece.sin, whole.sin[5:7])


def test_tables_kept_for_earlier_lengths_do_not_leak_into_others():
    position = build("ntk", logits="scale_invariant", train_length=8)
    for length in (4, 64, 5, 32, 9, 10, 11, 4, 64):
        fresh = build("ntk", logits="scale_invariant", train_length=8)
        assert torch.equal(frequency(position, length), frequency(fresh, length))
        assert tables(position, length)[0].shape == (1, length)


@pytest.mark.parametrize("rotary", ["rope", "ntk"])
def test_decoding_many_lengths_in_turn_makes_each_table_once(rotary: str, monkeypatch: pytest.MonkeyPatch):
    position, made = build(rotary, logits="scale_invariant", train_length=8), []
    real = position._stored
    monkeypatch.setattr(position, "_stored", lambda tables: made.append(1) or real(tables))
    for step in range(5):
        for prompt in range(300, 312):  # the longest comes last, so the first round may make a table again
            position.plan(prompt + step, prompt + step - 1, inference_length=prompt + 20)
    assert len(made) == (2 if rotary == "rope" else 13)  # 384 rows at once; NTK has frequencies for each length


def test_frequencies_that_want_a_gradient_are_refused(monkeypatch: pytest.MonkeyPatch):
    position = build("rope")
    learned = torch.ones(4, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(position.rotary, "angular_frequency", lambda length: learned)
    with pytest.raises(ValueError, match=r"position\.rotary: frequencies can't be learned"):
        position.plan(4)


def test_slots_of_ones_own_need_not_know_the_device(monkeypatch: pytest.MonkeyPatch):
    position = build("rope")

    class Learned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.ones(1))

        def forward(self, t: torch.Tensor):
            return None, -self.slope[:, None] * t

    position.logits = Learned()
    monkeypatch.setattr(position.query_scale, "forward", lambda start, length, _: torch.ones(1, 2, length - start))
    plan = position.to("meta").plan(4)
    assert plan.query_scale is not None
    assert plan.query_scale.is_meta
    assert plan.transform is not None
    assert plan.transform.shift is not None
    assert plan.transform.shift.is_meta


def test_a_plan_made_in_inference_mode_serves_training_afterwards(small_gpt: Callable[..., GPT]):
    gpt = small_gpt({"rotary": {"kind": "rope"}, "logits": {"kind": "scale_invariant"}})
    tokens = torch.randint(31, (1, 8))
    with torch.inference_mode():
        gpt(tokens)
    gpt(tokens, tokens).backward()
    assert gpt.embedding.weight.grad is not None
