"""Entropy and attention by ranges of distances, and how they grow over IID logits."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from eval.entropy_growth import entropy_growth, growth_figure, growth_fits
from eval.ranges import iid_logits, range_statistics, without_vectors

SCALE_INVARIANT = {"logits": {"kind": "scale_invariant"}}


def test_range_statistics_are_those_of_the_definition():
    logits = torch.randn(3, 20)
    got = range_statistics(logits, [2, 5, 6, 20])
    for row in range(3):
        L = logits[row].double().numpy()
        shares = np.array([np.exp(L[a:b]).sum() for a, b in ((2, 5), (5, 6), (6, 20))])
        np.testing.assert_allclose(got.log_total[row].exp(), shares, rtol=1e-12)
        np.testing.assert_allclose(got.share()[row], shares / shares.sum(), rtol=1e-12)
        for r, (a, b) in enumerate(((2, 5), (5, 6), (6, 20))):
            p = np.exp(L[a:b]) / np.exp(L[a:b]).sum()
            assert got.entropy[row, r].item() == pytest.approx(-(p * np.log(p)).sum(), abs=1e-12)


def test_equal_logits_have_the_entropy_of_their_number():
    entropy = range_statistics(torch.full((1, 100), 3.0), [0, 10, 100]).entropy
    assert entropy[0].tolist() == pytest.approx([math.log(10), math.log(90)])


@pytest.mark.parametrize("edges", [[0, 5, 5], [3, 1], [0, 21], [-1, 5]], ids=str)
def test_edges_that_do_not_rise_within_the_logits_are_refused(edges: list[int]):
    with pytest.raises(ValueError, match="must rise from at least 0 to at most 20"):
        range_statistics(torch.zeros(20), edges)


def test_iid_logits_have_the_mean_and_deviation_of_their_scheme():
    t, n = 500, 20000
    square = 2 * math.log1p(t / 10) + 1
    logn = {"query_scale": {"kind": "logn", "start": 0.4}}
    cases = [({}, 0.0, 1.0), (SCALE_INVARIANT, 1 - square, square**0.5), (logn, 0.0, 0.4 * math.log(1000))]
    for position, mean, deviation in cases:
        logits = iid_logits(without_vectors(position), t, t + 1, 1000, n, torch.Generator().manual_seed(0))[:, 0]
        assert logits.shape == (n,)
        assert logits.mean().item() == pytest.approx(mean, abs=5 * deviation / n**0.5)
        assert logits.std().item() == pytest.approx(deviation, rel=0.03)


def test_every_head_has_its_own_iid_logits():
    position = {"logits": {"kind": "scale_invariant", "tau": [10.0, 1000.0]}}
    scheme = without_vectors(position, 2)
    logits = iid_logits(scheme, 500, 501, 1000, 20000, torch.Generator().manual_seed(0), n_head=2)[:, 0]
    assert logits.shape == (40000,)
    for head, tau in enumerate((10, 1000)):
        square = 2 * math.log1p(500 / tau) + 1
        assert logits[head::2].mean().item() == pytest.approx(1 - square, abs=5 * (square / 20000) ** 0.5)
        assert logits[head::2].std().item() == pytest.approx(square**0.5, rel=0.03)


def growth(schemes: dict, last: int) -> pd.DataFrame:
    t = {"first": 10, "last": last, "points": 8}
    return entropy_growth(
        {"schemes": schemes, "ratio": 10, "t": t, "samples": {"fewest": 20, "most": 1000}, "logits": 1e6, "seed": 0}
    )


def test_plain_entropy_grows_like_log_t_and_scale_invariant_entropy_slower():
    data = growth({"none": {}, "si": SCALE_INVARIANT}, 10000)
    fits = growth_fits(data, 10)
    assert fits["none"]["log t"]["slope"] == pytest.approx(1, abs=0.02)
    largest = data[(data["scheme"] == "none") & (data["t"] == 10000)]["entropy"].item()
    assert largest == pytest.approx(math.log(90000) - 0.5, abs=0.01)
    assert 0.05 < fits["si"]["log t"]["slope"] < 0.3
    assert fits["si"]["sqrt(log t)"]["off"] < fits["si"]["log t"]["off"]
    figure = growth_figure(data, 10, fits)
    assert len(figure.axes[0].get_lines()) >= 4


def test_the_same_seed_gives_the_same_numbers_whatever_else_is_drawn():
    alone, together = growth({"si": SCALE_INVARIANT}, 100), growth({"si": SCALE_INVARIANT, "none": {}}, 100)
    pd.testing.assert_frame_equal(alone, together.query("scheme == 'si'"))
