"""Figures of attention: of one run by query position, distance and Gaussian quantiles, and figure 1 of the paper."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eval.attention_run import range_name
from eval.figures import STYLES

FONT_SIZE = 11
QQ_COLUMNS = 6
KINDS = {"rotated": ("#0072b2", "o", "with rotation"), "unrotated": ("#d55e00", "x", "without rotation")}
SOURCES = {"iid": "IID Gaussian scores", "trained": "trained models"}
RANGE_LINES = ("-", "--", "-.", ":", (0, (1, 4)), (0, (6, 4)))


def run_figure(content: Mapping[str, Any], name: str) -> Figure:
    """Three panels, a line a layer (mean over heads): entropy and share of the last 100 tokens by query position, and
    the last query's attention by range of distances."""
    keys = np.array(content["queries"]) + 1
    layers = [{key: np.array(value, dtype=float).mean(0) for key, value in each.items()} for each in content["layers"]]
    figure, (entropy, shares, last) = _panels(1, 3, (13.5, 4.8))
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(layers)))
    x = range(len(content["ranges"]))
    for index, (layer, colour) in enumerate(zip(layers, colours, strict=True)):
        style = {"color": colour, "lw": 1.6, "label": f"layer {index}"}
        entropy.plot(keys, layer["entropy"], **style)
        shares.plot(x, layer["range_mass"][-1], marker="o", ms=5, **style)
        last.plot(keys, layer["last_100"], **style)
    entropy.plot(keys, np.log(keys), color="0.6", ls=":", label="uniform attention")
    entropy.set(ylabel="entropy of attention (nats)", title="entropy")
    labels = [range_name(start, min(stop, keys[-1])) for start, stop in content["ranges"]]
    shares.set_xticks(x, labels, rotation=30, ha="right")
    shares.set(xlabel="distance (tokens)", ylabel="share of attention", title=f"the last query of {keys[-1]:,} tokens")
    last.set(ylabel="share of attention", title="last 100 tokens", ylim=(0, 1.03))
    for panel in (entropy, last):
        _over_keys(panel, "keys of the query (tokens)", [content["train_length"]])
    figure.suptitle(f"{name}: mean over heads (dashed: training length {content['train_length']:,})")
    _legend(figure, entropy.get_lines()[: len(layers) + 1], 7)
    return figure


def qq_figure(content: Mapping[str, Any], name: str) -> Figure:
    """One panel a layer: quantiles of its scores S over those of a Gaussian, and the Gaussian of their mean and
    deviation as a line; with and without the rotation of q and k."""
    z, layers = np.array(content["qq"]["z"]), content["qq"]["layers"]
    columns = min(len(layers), QQ_COLUMNS)
    rows = -(-len(layers) // columns)
    figure, panels = _panels(rows, columns, (2.6 * columns + 1.2, 2.7 * rows + 1.2))
    for index, panel in enumerate(panels):
        if index >= len(layers):
            panel.set_axis_off()
            continue
        for kind, (colour, marker, label) in KINDS.items():
            scores = layers[index][kind]
            panel.plot(z, scores["quantiles"], marker, color=colour, ms=3.5, label=label)
            panel.plot(z, scores["mean"] + scores["deviation"] * z, color=colour, lw=1)
        panel.set_title(f"layer {index}", fontsize=FONT_SIZE)
        panel.set_xlabel("quantile of N(0, 1)", fontsize=FONT_SIZE)
        if index % columns == 0:
            panel.set_ylabel("quantile of the scores S", fontsize=FONT_SIZE)
    figure.suptitle(f"{name}: scores of random pairs without the first token (line: Gaussian)", fontsize=FONT_SIZE)
    _legend(figure, panels[0].get_lines()[::2], 2)
    return figure


def figure_1(data: pd.DataFrame, names: Mapping[str, str], train_lengths: Sequence[int]) -> Figure:
    """Rows: IID Gaussian scores, trained models. Columns: entropy, entropy in ranges, share of the last 100 tokens.

    `data` is that of `eval.attention_experiment`, `names` says its schemes for people. Lines are means, bands one
    standard error; dashed verticals mark the training lengths.
    """
    figure, panels = _panels(2, 3, (13.5, 8.6))
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(names)))
    colours = {
        scheme: STYLES[scheme][0] if scheme in STYLES else shade for scheme, shade in zip(names, shades, strict=True)
    }
    ranges = [name for name in data["distances"].unique() if name]
    lines = dict(zip(["", *ranges], ("-", *RANGE_LINES), strict=False))
    columns = {"entropy": "total entropy", "range_entropy": "entropy in ranges", "last_100": "the last 100 tokens"}
    cases = [(source, quantity) for source in SOURCES for quantity in columns]
    for panel, (source, quantity) in zip(panels, cases, strict=True):
        shown = data.query("source == @source and quantity == @quantity")
        for scheme, name in itertools.product(names, lines):
            part = shown.query("scheme == @scheme and distances == @name")
            style = {"color": colours[scheme], "ls": lines[name]}
            panel.plot(part["keys"], part["mean"], lw=1.8, **style)
            mean, error = part["mean"].to_numpy(dtype=float), np.nan_to_num(part["stderr"].to_numpy(dtype=float))
            panel.fill_between(part["keys"], mean - error, mean + error, color=style["color"], alpha=0.2, lw=0)
        panel.set_title(f"{SOURCES[source]}: {columns[quantity]}", fontsize=FONT_SIZE)
        panel.set_ylabel("share of attention" if quantity == "last_100" else "entropy (nats)", fontsize=FONT_SIZE)
        _over_keys(panel, "context size (tokens)", train_lengths if source == "trained" else ())
        panel.set_ylim(0, 1.03 if quantity == "last_100" else None)
    handles = [Line2D([], [], color=colours[scheme], lw=2.5, label=name) for scheme, name in names.items()]
    handles += [Line2D([], [], color="0.3", ls=lines[name], label=f"distances {name}") for name in ranges]
    _legend(figure, handles, 6)
    return figure


def _panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels:
        panel.grid(True, color="0.92", lw=0.8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
    return figure, panels


def _over_keys(panel: Axes, label: str, train_lengths: Sequence[int]) -> None:
    panel.set_xscale("log")
    panel.set_xlabel(label, fontsize=FONT_SIZE)
    for length in train_lengths:
        panel.axvline(length, color="0.6", lw=1, ls=(0, (4, 3)), zorder=0)


def _legend(figure: Figure, handles: Sequence[Any], columns: int) -> None:
    """Below the panels, where it covers no curve."""
    columns = min(len(handles), columns)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=FONT_SIZE)
