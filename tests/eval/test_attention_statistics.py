"""Attention statistics of a model against dense attention in fp64, computed here with numpy from q and k alone."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.command import compose
from eval.attention_statistics import (
    Sampling,
    attention_statistics,
    distance_ranges,
    pair_scores,
    query_positions,
    random_pairs,
    score_quantiles,
    watched,
)
from model.attention import CausalSelfAttention
from model.gpt import GPT
from training.distributed import ALONE, Process

ROOT = Path(__file__).resolve().parents[2]
LENGTH, QUERIES = 130, 9
SCHEMES = ["nope", "rope", "yarn", "logn_p_rope", "alibi", "scale_invariant_p_rope"]
Build = Callable[..., GPT]


def tokens(rows: int) -> torch.Tensor:
    return torch.randint(31, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def position(name: str) -> Any:
    return compose("train", [f"position={name}", "data.dir=unused"]).position


def oracle_logits(model: GPT, layer: int, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores S and logits L, (heads, T, T) in fp64, from q and k (heads, T, d) before the rotation."""
    plan = model.position.plan(q.shape[1])
    if plan.angular_frequency is not None:
        angle = np.arange(q.shape[1])[:, None] * plan.angular_frequency.numpy()
        turn = np.exp(1j * angle)
        half = q.shape[-1] // 2
        q, k = ((x[..., :half] + 1j * x[..., half:]) * turn for x in (q, k))
    scores = np.einsum("hid,hjd->hij", q, k.conj()).real / math.sqrt(model.config.geometry.head_dim)
    logits = scores * plan.temperature
    if plan.query_scale is not None:
        logits = logits * plan.query_scale[layer].detach().double().numpy()[:, :, None]
    i, j = np.indices(logits.shape[1:])
    t = np.maximum(i - j, 0)
    if plan.transform is not None and plan.transform.scale is not None:
        logits = logits * plan.transform.scale.double().numpy()[:, t]
    if plan.transform is not None and plan.transform.shift is not None:
        logits = logits + plan.transform.shift.double().numpy()[:, t]
    return scores, logits


def oracle(model: GPT, layer: int, q: np.ndarray, k: np.ndarray, queries: list[int]) -> dict[str, np.ndarray]:
    """Every statistic by its definition, head by head and query by query."""
    scores, logits = oracle_logits(model, layer, q, k)
    ranges = ((0, 1), (1, 10), (10, 100), (100, 1000))
    found: dict[str, list] = {}
    for head in range(q.shape[0]):
        of_head: dict[str, list] = {}
        for i in queries:
            S, L = scores[head, i, : i + 1], logits[head, i, : i + 1]
            p = np.exp(L - L.max()) / np.exp(L - L.max()).sum()
            t = i - np.arange(i + 1)
            inside = [p[(t >= a) & (t < b)] for a, b in ranges]
            for name, value in {
                "entropy": entropy(p),
                "range_mass": [part.sum() if part.size else np.nan for part in inside],
                "range_entropy": [entropy(part / part.sum()) if part.size else np.nan for part in inside],
                "last_100": p[t < 100].sum(),
                "logit_mean": L.mean(),
                "logit_variance": L.var(),
                "score_mean": S.mean(),
                "score_variance": S.var(),
            }.items():
                of_head.setdefault(name, []).append(value)
        for name, values in of_head.items():
            found.setdefault(name, []).append(values)
    return {name: np.array(values) for name, values in found.items()}


def entropy(p: np.ndarray) -> float:
    return float(-(p * np.log(p)).sum())


def queries_and_keys(model: GPT, row: torch.Tensor, process: Process = ALONE) -> list[tuple[np.ndarray, np.ndarray]]:
    """q and k of every layer in fp64, before the rotation, from what enters its attention."""
    found = []

    def keep(module: torch.nn.Module, arguments: tuple) -> None:
        assert isinstance(module, CausalSelfAttention)
        found.append(module._project(arguments[0])[:2])

    hooks = [m.register_forward_pre_hook(keep) for m in model.modules() if isinstance(m, CausalSelfAttention)]
    with torch.no_grad(), process.autocast():
        model.hidden(row[None])
    for hook in hooks:
        hook.remove()
    return [(q[0].double().numpy(), k[0].double().numpy()) for q, k in found]


@pytest.mark.parametrize(("name", "precision"), [*((name, "fp32") for name in SCHEMES), (SCHEMES[-1], "bf16")])
def test_every_statistic_is_that_of_dense_attention(small_gpt: Build, name: str, precision: str):
    """With bf16 activations as well, whose logits are those of the rounded q and k, in fp32."""
    model, process = small_gpt(position(name)), Process(0, 1, torch.device("cpu"), precision)
    rows = tokens(2)
    result = attention_statistics(model, rows, Sampling(QUERIES, 10), process)
    captured = [queries_and_keys(model, row, process) for row in rows]
    assert result["ranges"] == [[0, 1], [1, 10], [10, 100], [100, 1000]]
    for layer, got in enumerate(result["layers"]):
        expected = [oracle(model, layer, *of_row[layer], result["queries"]) for of_row in captured]
        assert got.keys() == expected[0].keys()
        for what, values in got.items():
            mean = np.mean([each[what] for each in expected], axis=0)
            np.testing.assert_allclose(np.array(values), mean, rtol=2e-4, atol=2e-5, err_msg=f"{what}, layer {layer}")


def test_the_transform_moves_the_logits_and_not_the_scores(small_gpt: Build):
    plain, transformed = (
        attention_statistics(small_gpt(position(name)), tokens(1), Sampling(QUERIES, 10), ALONE)["layers"][0]
        for name in ("p_rope", "scale_invariant_p_rope")
    )
    assert plain["logit_mean"] == plain["score_mean"] == transformed["score_mean"]
    assert transformed["logit_mean"][0][-1] < transformed["score_mean"][0][-1] - 1


def test_range_masses_sum_to_one_and_empty_ranges_are_nan(small_gpt: Build):
    result = attention_statistics(small_gpt(position("rope")), tokens(1), Sampling(QUERIES, 10), ALONE)
    for layer in result["layers"]:
        mass = np.array(layer["range_mass"])
        np.testing.assert_allclose(np.nansum(mass, axis=-1), 1, rtol=1e-12)
        for index, i in enumerate(result["queries"]):
            assert np.isnan(mass[:, index]).tolist() == [[start > i for start, _ in result["ranges"]]] * 2


def test_the_model_is_left_as_it_was(small_gpt: Build):
    model, seen = small_gpt(position("rope")), []
    before = model.hidden(tokens(1))
    attention_statistics(model, tokens(1), Sampling(QUERIES, 10), ALONE)
    with (
        pytest.raises(RuntimeError, match="stop"),
        watched(model, lambda *_: (_ for _ in ()).throw(RuntimeError("stop"))),
    ):
        model.hidden(tokens(1))
    assert torch.equal(model.hidden(tokens(1)), before)
    with watched(model, lambda layer, q, k, plan: seen.append(layer)):
        model.hidden(tokens(1))
    assert seen == [0, 1]


def test_infini_attention_is_refused(small_gpt: Build):
    with pytest.raises(ValueError, match=r"position.core.kind=infini: its weights are no softmax over all keys"):
        attention_statistics(small_gpt(position("infini_rope")), tokens(1), Sampling(QUERIES, 10), ALONE)


def test_queries_are_log_spaced_and_end_with_the_last():
    positions = query_positions(65536, 33)
    assert positions[0] == 9
    assert positions[-1] == 65535
    assert positions == sorted(set(positions))
    ratios = np.diff(np.log(np.array(positions) + 1))
    assert ratios[10:].std() < 0.02 * ratios.mean()
    assert query_positions(500, 1) == [499]
    assert query_positions(5, 10) == [4]


def test_ranges_are_decades_that_begin_within_the_length():
    assert distance_ranges(1) == [(0, 1)]
    assert distance_ranges(100) == [(0, 1), (1, 10), (10, 100)]
    assert distance_ranges(101) == [(0, 1), (1, 10), (10, 100), (100, 1000)]


def test_random_pairs_cover_the_lower_triangle_without_the_first_column_evenly():
    length, count = 5, 100_000
    i, j = random_pairs(length, count, torch.Generator().manual_seed(0))
    shares = np.histogram2d(i.numpy(), j.numpy(), bins=[np.arange(6), np.arange(6)])[0] / count
    allowed = np.tril(np.ones((5, 5)))
    allowed[:, 0] = 0
    np.testing.assert_allclose(shares, allowed / allowed.sum(), atol=0.005)


def test_pair_scores_are_scaled_inner_products_of_each_head():
    q, k = torch.randn(2, 3, 7, 4)
    i, j = torch.tensor([6, 2]), torch.tensor([1, 2])
    expected = [float(q[head, a] @ k[head, b]) / 2 for head in range(3) for a, b in ((6, 1), (2, 2))]
    assert pair_scores(q, k, i, j).tolist() == pytest.approx(expected, rel=1e-5)


def test_quantiles_of_gaussian_scores_lie_on_the_line_of_their_mean_and_deviation():
    found = score_quantiles(3 + 2 * torch.randn(400_000))
    assert found["mean"] == pytest.approx(3, abs=0.02)
    assert found["deviation"] == pytest.approx(2, abs=0.02)
    z = np.linspace(-3.5, 3.5, 71)
    np.testing.assert_allclose(found["quantiles"][10:-10], 3 + 2 * z[10:-10], atol=0.05)


def test_qq_scores_are_those_of_the_lower_triangle_with_and_without_rotation(small_gpt: Build):
    model = small_gpt(position("rope"))
    result = attention_statistics(model, tokens(1), Sampling(QUERIES, 40_000), ALONE)["qq"]
    inside = np.tril(np.ones((LENGTH, LENGTH), dtype=bool))
    inside[:, 0] = False
    for layer, (q, k) in enumerate(queries_and_keys(model, tokens(1)[0])):
        plain = np.einsum("hid,hjd->hij", q, k) / math.sqrt(q.shape[-1])
        turned, _ = oracle_logits(model, layer, q, k)
        for kind, scores in {"rotated": turned, "unrotated": plain}.items():
            got, values = result["layers"][layer][kind], scores[:, inside]
            assert got["mean"] == pytest.approx(values.mean(), abs=0.03)
            assert got["deviation"] == pytest.approx(values.std(), rel=0.03)
            quartile = result["z"].index(pytest.approx(0.7, abs=1e-9))
            assert got["quantiles"][quartile] == pytest.approx(np.quantile(values, 0.758036), abs=0.05)


LONG = """
import torch
from pathlib import Path
from configs.command import compose
from eval.attention_statistics import Sampling, attention_statistics
from training.distributed import start_process
from training.state import build_model

config = compose("train", ["experiment=proxy", "position=scale_invariant_p_rope", "model.n_layer=1"])
with start_process("cpu", "fp32") as process:
    model = build_model(config, process.device)
    tokens = torch.randint(config.model.vocab_size, (1, 65536))
    result = attention_statistics(model, tokens, Sampling(64, 20000), process)
assert result["queries"][-1] == 65535
status = Path("/proc/self/status").read_text()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.slow
def test_a_sequence_of_65536_tokens_stays_under_two_gigabytes():
    """One block, since they come one after the other. All of the process is counted; T x T alone would be 17 GB."""
    ran = subprocess.run([sys.executable, "-c", LONG], cwd=ROOT, text=True, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 2e9
