"""Figure 1: what is made of attention.json files and of IID scores."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import train
from configs.command import compose
from eval import attention_experiment
from eval.attention_experiment import (
    iid_rows,
    is_kept_without,
    measure_attention,
    measured,
    read_settings,
    trained_rows,
)
from eval.attention_figures import figure_1
from eval.experiment import Experiment, Run, expand, read_experiment
from eval.kept import keep
from tests.tiny_run import SIZES, run, write_tiny_data

MADE_BY = {"command": "make", "commit": "abc"}
SETTINGS = {"length_factor": 4, "sequences": 2, "queries": 6, "pairs": 50, "draws": 30, "seed": 0}
SCHEMES = ["p_rope", "logn_p_rope", "scale_invariant_p_rope"]


def experiment_of(folder: Path, **settings: Any) -> tuple[Experiment, list[Run]]:
    """fig1 with the tiny model, of one layer and two heads, trained at 32 tokens."""
    words = ["experiment=fig1", "experiment.scales.full.prepare=[]", "experiment.seeds=[0,1]"]
    config = compose("reproduce", words)
    config.experiment.measure_with = SETTINGS | settings
    config.experiment.scales.full.arguments = [*SIZES, f"data.dir={folder / 'data'}", "train.steps=1"]
    experiment = read_experiment(config)
    return experiment, expand(experiment, lambda overrides: compose("train", overrides))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished runs p_rope-seed0 and scale_invariant_p_rope-seed0 and -seed1."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_data(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for one in experiment_of(folder)[1]:
            if one.id in ("p_rope-seed0", "scale_invariant_p_rope-seed0", "scale_invariant_p_rope-seed1"):
                assert run(train.main, list(one.overrides)) == 0
    return folder


@pytest.fixture
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def test_figure_1_is_written_from_what_is_finished_and_names_what_is_missing(folder: Path, capsys: Any):
    experiment, runs = experiment_of(folder)
    paths = measure_attention(experiment, runs, MADE_BY)
    names = ["data.csv", "summary.json", "fig1.png", "fig1.pdf"]
    assert [path.name for path in paths] == names
    assert {path.name for path in (folder / "results" / "fig1").iterdir()} == set(names)
    summary = json.loads((folder / "results" / "fig1" / "summary.json").read_text())
    assert summary["missing"] == ["p_rope-seed1", "logn_p_rope-seed0", "logn_p_rope-seed1"]
    assert summary["command"] == "make"
    data = pd.read_csv(folder / "results" / "fig1" / "data.csv", keep_default_na=False)
    missing = data.query("quantity == 'missing'")
    assert missing[["source", "scheme", "mean"]].to_numpy().tolist() == [["trained", "logn_p_rope", ""]]
    said = capsys.readouterr().out
    assert "3 of 6 runs are missing: p_rope-seed1, logn_p_rope-seed0, logn_p_rope-seed1" in said


def test_what_was_kept_of_a_run_stands_for_it_where_it_is_of_the_same_settings(folder: Path):
    one = next(one for one in experiment_of(folder)[1] if one.id == "p_rope-seed0")
    assert not is_kept_without(one, SETTINGS)  # it has its weights
    whole = measured(one, SETTINGS)
    assert whole
    keep(one)
    one.run_dir.rename(folder / "moved")
    try:
        kept = measured(one, SETTINGS)
        assert kept
        assert kept["layers"] == whole["layers"]
        assert not is_kept_without(one, SETTINGS)
        assert measured(one, SETTINGS | {"queries": 7}) is None
        assert is_kept_without(one, SETTINGS | {"queries": 7})
    finally:
        (folder / "moved").rename(one.run_dir)


def test_trained_values_are_mean_and_standard_error_over_seeds_of_the_mean_over_heads(folder: Path):
    _, runs = experiment_of(folder)
    contents = {one: measured(one, SETTINGS) for one in runs}
    data = pd.DataFrame(trained_rows(contents))
    for seeds, scheme in ((1, "p_rope"), (2, "scale_invariant_p_rope")):
        found = [content for one, content in contents.items() if content and one.row == scheme]
        assert len(found) == seeds
        for quantity in ("entropy", "last_100"):
            heads = np.array([[layer[quantity] for layer in content["layers"]] for content in found])
            assert heads.shape == (seeds, 1, 2, 6)
            by_seed = heads.mean((1, 2))
            part = data.query("scheme == @scheme and quantity == @quantity")
            assert part["keys"].tolist() == [i + 1 for i in found[0]["queries"]]
            np.testing.assert_allclose(part["mean"], by_seed.mean(0), rtol=1e-9)
            error = by_seed.std(0, ddof=1) / math.sqrt(2) if seeds == 2 else np.full(6, np.nan)
            np.testing.assert_allclose(part["stderr"], error, rtol=1e-6, atol=1e-12)


def test_a_range_counts_only_where_all_of_it_lies_in_the_context(folder: Path):
    _, runs = experiment_of(folder)
    ranges = [row for row in iid_rows(runs, SETTINGS) if row["quantity"] == "range_entropy"]
    assert {row["distances"] for row in ranges} == {"10-99"}
    assert {row["keys"] for row in ranges} == {128}


def test_iid_values_are_those_of_gaussian_logits(folder: Path):
    """Against other draws, whose logits and softmax are written out here."""
    _, runs = experiment_of(folder)
    n, draws = 1024, 200
    rows = iid_rows(runs, SETTINGS | {"length_factor": n // 32, "draws": draws, "queries": 2})
    found = {(row["scheme"], row["quantity"], row["distances"]): row for row in rows if row["keys"] == n}
    square = 2 * np.log(np.arange(n) / 10 + 1) + 1
    S = np.random.default_rng(7).standard_normal((draws, n))
    cases = {"p_rope": S, "logn_p_rope": 0.4 * math.log(n) * S, "scale_invariant_p_rope": square**0.5 * S + 1 - square}
    for scheme, logits in cases.items():
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        inside = p[:, 100:1000] / p[:, 100:1000].sum(-1, keepdims=True)
        for quantity, distances, values in (
            ("entropy", "", -(p * np.log(p)).sum(-1)),
            ("range_entropy", "100-999", -(inside * np.log(inside)).sum(-1)),
            ("last_100", "", p[:, :100].sum(-1)),
        ):
            got, error = found[scheme, quantity, distances], values.std() / draws**0.5
            assert got["mean"] == pytest.approx(values.mean(), abs=5 * error), (scheme, quantity)
            assert got["stderr"] == pytest.approx(error / 2**0.5, rel=0.35), (scheme, quantity)
            assert got["values"] == 2 * draws  # the model has two heads


@pytest.mark.parametrize("kind", ["alibi", "scale_invariant"])
def test_heads_that_differ_have_iid_values_too(folder: Path, kind: str):
    run = experiment_of(folder)[1][-1]
    logits = {"kind": "alibi"} if kind == "alibi" else {**run.config["position"]["logits"], "tau": [1.0, 1000.0]}
    config = {**run.config, "position": {**run.config["position"], "logits": logits}}
    rows = list(iid_rows([replace(run, config=config)], SETTINGS))
    entropies = [row["mean"] for row in rows if row["quantity"] == "entropy"]
    assert len(entropies) == 6
    assert np.isfinite(entropies).all()


def test_a_run_is_measured_once_until_its_settings_or_its_weights_change(folder: Path, monkeypatch: Any):
    one = next(one for one in experiment_of(folder)[1] if one.id == "p_rope-seed0")
    calls, real = [], attention_experiment.measure_run
    monkeypatch.setattr(attention_experiment, "measure_run", lambda *a, **k: calls.append(1) or real(*a, **k))
    settings = SETTINGS | {"seed": 5}
    first = measured(one, settings)
    assert measured(one, settings) == first
    assert len(calls) == 1
    measured(one, settings | {"queries": 7})
    assert len(calls) == 2
    sums = one.run_dir / "checkpoints" / "step_000001" / "checksums.json"
    content = json.loads((one.run_dir / "attention.json").read_text())
    assert content["made_with"]["weights_sha256"] == json.loads(sums.read_text())["model.safetensors"]
    content["made_with"]["weights_sha256"] = "of another training"
    (one.run_dir / "attention.json").write_text(json.dumps(content))
    measured(one, settings | {"queries": 7})
    (one.run_dir / "attention.json").write_text("{half")
    measured(one, settings | {"queries": 7})
    assert len(calls) == 4


def test_the_figure_has_a_line_for_each_scheme_and_range_and_says_how_many_seeds_there_are(folder: Path):
    runs = experiment_of(folder)[1]
    names = attention_experiment.scheme_names({one: {} if one.id == "p_rope-seed0" else None for one in runs})
    assert names["p_rope"] == "p-RoPE (trained: 1 of 2 seeds)"
    assert names["logn_p_rope"] == "LogN+p-RoPE (trained: 0 of 2 seeds)"
    data = pd.DataFrame(iid_rows(runs, SETTINGS))
    figure = figure_1(data, names, [32])
    drawn = [sum(len(np.asarray(line.get_xdata())) > 2 for line in panel.lines) for panel in figure.axes]
    assert drawn[:3] == [3, 0, 3]
    assert drawn[3:] == [0, 0, 0]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*names.values(), "distances 10-99"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draws": 1}, "experiment.measure_with.draws=1 must be a whole number, at least 2"),
        ({"queries": "many"}, "experiment.measure_with.queries=many must be a whole number"),
        (
            {"tau": 1},
            "experiment.measure_with does not know the key tau; the keys of measure=attention are length_factor",
        ),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: dict[str, Any], message: str):
    experiment, _ = experiment_of(tmp_path, **settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_settings(experiment)
