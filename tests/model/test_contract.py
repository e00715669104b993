"""What every scheme must do. The tests run over all files of configs/position, so a new one is picked up by itself."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from model.attend import attend
from model.gpt import GPT, GPTConfig
from model.position import PositionScheme, build_position

FILES = {path.stem: OmegaConf.load(path) for path in sorted(Path(__file__).parents[2].glob("configs/position/*.yaml"))}
# A scaled copy at 16 tokens, so that what a scheme ties to its training length is crossed soon (segments too).
TRAIN_LENGTH, REFERENCE_LENGTH = 16, 2048
SCHEMES: dict[str, Any] = {
    name: OmegaConf.merge(config, {"reference_length": REFERENCE_LENGTH}) for name, config in FILES.items()
}

every_scheme = pytest.mark.parametrize("name", SCHEMES)


def scheme(name: str) -> PositionScheme:
    return build_position(SCHEMES[name], head_dim=16, n_head=2, train_length=TRAIN_LENGTH, n_layer=2)


def tokens_and_targets(length: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    ids = torch.randint(31, (rows, length + 1))
    return ids[:, :-1], ids[:, 1:]


def test_the_schemes_of_the_paper_have_a_file_each_with_their_name():
    rotary = {"nope", "rope", "p_rope", "rope_ntk", "yarn", "logn_rope", "logn_p_rope", "logn_ntk"}
    scale_invariant = {f"scale_invariant_{rotary}" for rotary in ("p_rope", "rope", "nope")}
    assert rotary | scale_invariant | {"alibi", "infini_rope", "infini_p_rope"} <= FILES.keys()
    assert {name: config.name for name, config in FILES.items()} == {name: name for name in FILES}


@pytest.mark.parametrize("length", [40, 140])
@every_scheme
def test_a_token_sees_itself_and_all_before_it_and_none_after(name: str, length: int, small_gpt: Callable[..., GPT]):
    gpt, embedded = small_gpt(SCHEMES[name]), []
    gpt.embedding.register_forward_hook(lambda module, args, out: embedded.append(out))
    logits = gpt(torch.randint(31, (1, length)))
    for i in {0, 15, 16, 17, length - 13, length - 12, length - 1}:  # about the training length and the first 128 rows
        (gradient,) = torch.autograd.grad(logits[0, i].square().sum(), embedded[0], retain_graph=True)
        reached = gradient[0].any(dim=-1)
        assert reached[: i + 1].all()
        assert not reached[i + 1 :].any()


@pytest.mark.parametrize("backend", ["blockwise", pytest.param("native", marks=pytest.mark.compiler), "auto"])
@pytest.mark.parametrize("length", [1, 16, 140])
@every_scheme
def test_backends_agree_in_loss_and_all_gradients(name: str, length: int, backend: str, small_gpt: Callable[..., GPT]):
    tokens, targets = tokens_and_targets(length, rows=2)
    results = {}
    for attention in ("dense", backend):
        gpt = small_gpt(SCHEMES[name], attention=attention)
        loss = gpt(tokens, targets)
        loss.backward()
        results[attention] = {"loss": loss.detach()} | {key: p.grad for key, p in gpt.named_parameters()}
    torch.testing.assert_close(results[backend], results["dense"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name].query_scale.kind == "none"])
def test_logits_depend_on_the_distance_alone_without_a_query_scale(name: str):
    """Equal vectors at all positions: <R_i q, R_j k> is the same wherever i - j is."""
    plan = scheme(name).plan(100)
    q, k = torch.randn(2, 1, 2, 1, 16).expand(2, 1, 2, 100, 16)
    logits = plan.query(q, layer=0) @ plan.rotate(k).mT
    for t in (0, 1, 17, 63):
        diagonal = logits.diagonal(-t, dim1=-2, dim2=-1)
        torch.testing.assert_close(diagonal, diagonal[..., :1].expand_as(diagonal), rtol=1e-5, atol=1e-4)


@every_scheme
def test_loss_and_gradients_are_finite_at_16_times_the_training_length(name: str, small_gpt: Callable[..., GPT]):
    gpt = small_gpt(SCHEMES[name])
    loss = gpt(*tokens_and_targets(16 * TRAIN_LENGTH))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gpt.parameters())


@every_scheme
def test_plans_within_the_training_length_are_prefixes_of_one_another(name: str):
    position = scheme(name)
    whole = position.plan(TRAIN_LENGTH)
    for length in (1, 2, TRAIN_LENGTH - 1):
        part = position.plan(length)
        assert part.temperature == whole.temperature
        for key in ("cos", "sin"):
            a, b = getattr(part, key), getattr(whole, key)
            assert (a is b is None) or torch.equal(a, b[:length])
        for a, b in (
            (part.query_scale, whole.query_scale),
            (part.transform and part.transform.scale, whole.transform and whole.transform.scale),
            (part.transform and part.transform.shift, whole.transform and whole.transform.shift),
        ):
            assert (a is b is None) or (a is not None and b is not None and torch.equal(a, b[..., :length]))


@pytest.mark.parametrize(("length", "start"), [(12, 11), (40, 25), (140, 3)])
@every_scheme
def test_queries_at_an_offset_attend_to_cached_keys_as_in_the_whole_sequence(name: str, length: int, start: int):
    position = scheme(name)
    q, k, v = torch.randn(3, 2, 2, length, 16)
    whole, part = position.plan(length), position.plan(length, start=start)
    keys = whole.rotate(k)
    for layer in range(2):
        expected = attend(whole.query(q, layer), keys, v, whole.transform)[:, :, start:]
        got = attend(part.query(q[:, :, start:], layer), keys, v, part.transform)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@every_scheme
def test_no_table_is_in_the_state_dict(name: str, small_gpt: Callable[..., GPT]):
    gpt = small_gpt(SCHEMES[name])
    gpt(torch.randint(31, (1, 41)))
    assert gpt.state_dict().keys() == dict(gpt.named_parameters()).keys()
    assert all(41 not in value.shape for value in gpt.state_dict().values())


@every_scheme
def test_a_saved_model_restores_to_the_same_function(name: str, small_gpt: Callable[..., GPT]):
    saved, restored = small_gpt(SCHEMES[name]), small_gpt(SCHEMES[name], seed=1)
    tokens = torch.randint(31, (1, 40))
    assert not torch.equal(saved(tokens), restored(tokens))
    restored.load_state_dict(saved.state_dict())
    assert torch.equal(saved(tokens), restored(tokens))


@every_scheme
def test_a_seed_gives_every_scheme_the_same_weights(name: str):
    def weights(position: Any) -> dict[str, Tensor]:
        torch.manual_seed(7)
        return GPT(GPTConfig(n_layer=2, n_head=2, width=32, vocab_size=31, position=position)).state_dict()

    plain, own = weights({}), weights(SCHEMES[name])
    for key, value in plain.items():
        assert torch.equal(own[key], value), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@every_scheme
def test_the_output_follows_the_dtype_of_the_weights(name: str, dtype: torch.dtype, small_gpt: Callable[..., GPT]):
    gpt = small_gpt(SCHEMES[name])
    tokens = torch.randint(31, (1, 40))
    expected = gpt(tokens)
    got = gpt.to(dtype)(tokens)
    assert got.dtype == dtype
    coarse = dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=0.15 if coarse else 1e-4)


@every_scheme
def test_the_plan_follows_the_device_of_the_model(name: str):
    position = scheme(name)
    position.plan(40)  # a table made for the CPU must not be served elsewhere
    plan = position.to("meta").plan(40)
    transform = plan.transform
    tables = [plan.cos, plan.sin, plan.query_scale, transform and transform.scale, transform and transform.shift]
    assert all(table.is_meta for table in tables if table is not None)


@every_scheme
def test_bf16_autocast_stays_close_to_fp32_far_beyond_the_training_length(name: str, small_gpt: Callable[..., GPT]):
    gpt = small_gpt(SCHEMES[name])
    tokens, targets = tokens_and_targets(512)
    with torch.no_grad():
        exact = gpt(tokens, targets)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = gpt(tokens, targets)
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=0.005)


@every_scheme
def test_the_first_loss_is_the_log_of_the_vocabulary(name: str):
    gpt = GPT(GPTConfig(n_layer=2, n_head=2, width=32, vocab_size=31, train_length=16, position=SCHEMES[name]))
    assert gpt(*tokens_and_targets(24)).item() == pytest.approx(math.log(31), rel=1e-6)
