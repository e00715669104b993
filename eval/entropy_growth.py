"""The entropy of attention inside a range of distances [t, t Delta), over IID Gaussian scores, as t grows.

Plain logits have H = log((Delta - 1) t) - 1/2 there: it grows like log t, attention inside the range is uniform.
Scale-invariant ones have o(log t), about sqrt(log t) (arXiv:2505.17083, definition 3.3 and figures 2 and 6).
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from torch import Tensor
from tqdm import tqdm

from eval.ranges import iid_logits, range_statistics, without_vectors
from model.position import PositionScheme

LOGITS_AT_ONCE = 1 << 22
GROWTH = {"log t": np.log, "sqrt(log t)": lambda t: np.sqrt(np.log(t))}
COLOURS = ("#7f7f7f", "#cc79a7", "#d55e00", "#0072b2", "#009e73")


def read_calculation(config: Any) -> dict[str, Any]:
    """The checked keys of an experiment that only calculates. Raises ValueError naming the first wrong one."""
    keys = cast(dict[str, Any], OmegaConf.to_container(config.experiment))
    label = f"experiment={keys['name']}"
    if keys["calculate"] != "entropy_growth":
        raise ValueError(f"{label}: calculate={keys['calculate']} is unknown; it must be entropy_growth")
    if unset := [key for key in ("schemes", "ratio", "t", "fit_from", "samples", "logits", "seed") if key not in keys]:
        raise ValueError(f"{label} has no key {unset[0]}; see configs/experiment/fig2.yaml")
    for key in ("scale", "only", "overrides", "fast"):
        if config[key]:
            raise ValueError(f"{key}={config[key]} means nothing to {label}, which has no runs; leave it out")
    t, samples = keys["t"], keys["samples"]
    if not (2 <= t["first"] < t["last"] and t["points"] >= 3):
        raise ValueError(f"experiment.t={t} must have 2 <= first < last and points of at least 3")
    if not (keys["ratio"] > 1 and 2 <= samples["fewest"] <= samples["most"]):
        raise ValueError(f"experiment.ratio={keys['ratio']} must be above 1, experiment.samples={samples} 2 or more")
    if not keys["fit_from"] < t["last"]:
        raise ValueError(f"experiment.fit_from={keys['fit_from']} must be below the last t, {t['last']}")
    for position in keys["schemes"].values():
        without_vectors(position)
    return keys


def entropy_growth(config: Any) -> pd.DataFrame:
    """One row a scheme and t: mean and standard error of the entropy (nats) over the draws.

    `config` has: schemes (name: position config), ratio (Delta), t (first, last, points: log-spaced), samples (fewest
    and most draws of a point), logits (per point, within these numbers of draws), seed. Every point has its own random
    numbers.
    """
    first, last, points = config["t"]["first"], config["t"]["last"], config["t"]["points"]
    distances = np.unique(np.geomspace(first, last, points).round().astype(int))
    cases = [(name, position, int(t)) for name, position in config["schemes"].items() for t in distances]
    rows = []
    for index, (name, position, t) in enumerate(tqdm(cases, desc="ranges", disable=None)):
        generator = torch.Generator().manual_seed(1_000_000 * config["seed"] + index)
        entropies = _entropies(without_vectors(position), t, config, generator)
        error = entropies.std() / len(entropies) ** 0.5
        rows.append({"scheme": name, "t": t, "entropy": entropies.mean().item(), "stderr": error.item()})
    return pd.DataFrame(rows)


def _entropies(scheme: PositionScheme, t: int, config: Any, generator: torch.Generator) -> Tensor:
    """Of draws of the range [t, ratio t), a few at a time, so that memory stays bounded."""
    stop = round(t * config["ratio"])
    draws = min(max(round(config["logits"] / (stop - t)), config["samples"]["fewest"]), config["samples"]["most"])
    at_once = max(1, LOGITS_AT_ONCE // (stop - t))
    parts = []
    for done in range(0, draws, at_once):
        logits = iid_logits(scheme, t, stop, stop, min(at_once, draws - done), generator)
        parts.append(range_statistics(logits, [0, stop - t]).entropy)
    return torch.cat(parts)[:, 0]


def growth_fits(data: pd.DataFrame, fit_from: int) -> dict[str, dict[str, dict[str, float]]]:
    """For each scheme the lines H = intercept + slope f(t), f = log t and f = sqrt(log t), of least squares.

    Only points with t >= fit_from count. They are weighted by their standard errors, and `off` is the root mean square
    of the residuals in those.
    """
    fits: dict[str, dict[str, dict[str, float]]] = {}
    for name, part in data.query("t >= @fit_from").groupby("scheme", sort=False):
        t, entropy, error = (part[key].to_numpy(dtype=float) for key in ("t", "entropy", "stderr"))
        for label, f in GROWTH.items():
            slope, intercept = np.polyfit(f(t), entropy, 1, w=1 / error)
            off = np.sqrt(np.mean(((entropy - intercept - slope * f(t)) / error) ** 2))
            values = {"intercept": float(intercept), "slope": float(slope), "off": float(off)}
            fits.setdefault(str(name), {})[label] = values
    return fits


def growth_figure(data: pd.DataFrame, ratio: float, fits: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure:
    """Entropy over t (log axis), one colour a scheme, with both fits: sqrt(log t) solid, log t dashed."""
    figure = Figure(figsize=(9.6, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    drawn = []
    for colour, (name, part) in zip(COLOURS, data.groupby("scheme", sort=False), strict=False):
        t = part["t"].to_numpy()
        style = {"fmt": "o", "ms": 5, "color": colour, "capsize": 2, "zorder": 3}
        drawn.append(axes.errorbar(t, part["entropy"], part["stderr"], label=name, **style))
        for (label, f), line in zip(GROWTH.items(), ("--", "-"), strict=True):
            fit = fits[str(name)][label]
            text = f"  {fit['intercept']:.2f} + {fit['slope']:.2f} {label}   (off by {fit['off']:.1f} s.e.)"
            drawn += axes.plot(t, fit["intercept"] + fit["slope"] * f(t), line, color=colour, lw=1.4, label=text)
    axes.set(xscale="log", xlabel="t (tokens)", ylabel=f"entropy of attention in [t, {ratio:g} t) (nats)")
    axes.set_ylim(bottom=0)
    axes.grid(True, color="0.92", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=drawn, loc="outside lower center", ncols=len(fits), frameon=False, fontsize=8.5
    )  # a column each
    return figure


def write_calculation(folder: Path, data: pd.DataFrame, summary: Mapping[str, Any]) -> list[Path]:
    """Writes data.csv and summary.json, each whole or not at all; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"data.csv": data.to_csv(index=False), "summary.json": json.dumps(summary, indent=2) + "\n"}
    for name, text in texts.items():
        partial = folder / f"{name}.partial"
        partial.write_text(text)
        os.replace(partial, folder / name)
    return [folder / name for name in texts]
