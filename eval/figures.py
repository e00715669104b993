"""Figures of validation loss: over training steps, over evaluation length, and over the position in a sequence.

Every scheme has one colour and one marker in all figures (after Okabe and Ito's palette, told apart by colour-blind
readers); the scale-invariant ones are drawn stronger. A scheme far above the others leaves its panel at the top, with
its final value in the panel's title, so that the rest stay apart.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from eval.loss import PositionLoss
from eval.tables import Table

STYLES: dict[str, tuple[str, str, str]] = {  # colour, marker, line style
    "nope": ("#7f7f7f", "v", "-"),
    "rope": ("#0072b2", "s", "-"),
    "p_rope": ("#56b4e9", "^", "-"),
    "rope_ntk": ("#0072b2", "<", "--"),
    "yarn": ("#999933", ">", "-"),
    "logn_rope": ("#882255", "p", "--"),
    "logn_p_rope": ("#cc79a7", "P", "-"),
    "logn_ntk": ("#882255", "X", ":"),
    "alibi": ("#009e73", "D", "-"),
    "scale_invariant_p_rope": ("#d55e00", "o", "-"),
    "scale_invariant_rope": ("#d55e00", "h", "--"),
    "scale_invariant_nope": ("#d55e00", "*", ":"),
    "infini_rope": ("#e69f00", "d", "--"),
    "infini_p_rope": ("#e69f00", "8", "-"),
}
FONT_SIZE = 11


def loss_curves(history: pd.DataFrame, table: Table) -> Figure:
    """One panel an evaluation length, one curve a scheme: mean validation loss over steps, seeds as a band.

    `history` is that of `eval.tables.history`; names, order and lengths come from `table`.
    """
    figure, panels = _panels(len(table.lengths))
    for panel, length in zip(panels, table.lengths, strict=True):
        curves = {}
        for row_id, style in _styles(table).items():
            steps, mean, low, high = _curve(history, row_id, length)
            if len(steps):
                panel.plot(steps, mean, label=table.rows[row_id].name, markevery=max(1, len(steps) // 8), **style)
                panel.fill_between(steps, low, high, color=style["color"], alpha=0.15, lw=0)
                curves[row_id] = mean
        note = _limit(panel, curves, table)
        panel.set_title(f"evaluated at {length:,} tokens{_if_trained(table, length)}{note}", fontsize=FONT_SIZE)
        panel.set_xlabel("training step", fontsize=FONT_SIZE)
        panel.margins(x=0.02)
    panels[0].set_ylabel("validation loss (nats per token)", fontsize=FONT_SIZE)
    _legend(figure, panels[0])
    return figure


def loss_by_length(table: Table) -> Figure:
    """Final validation loss over evaluation length (log2), one line a scheme, error bars of one standard error."""
    return by_length(table, "validation loss (nats per token)")[0]


def by_length(table: Table, label: str) -> tuple[Figure, Axes]:
    """What a table holds over evaluation length, under a label; the figure and its one panel."""
    figure, (axes,) = _panels(1)
    for row_id, style in _styles(table).items():
        row = table.rows[row_id]
        mean, stderr = np.array(row.mean, dtype=float), np.array(row.stderr, dtype=float)
        bars = None if np.isnan(stderr).all() else stderr
        axes.errorbar(table.lengths, mean, bars, label=row.name, capsize=3, **style)
    for length in table.train_lengths:
        axes.axvline(length, color="0.6", lw=1, ls=(0, (4, 3)), zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(table.lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" + _if_trained(table, round(x))))
    axes.set_xlabel("evaluation length (tokens)", fontsize=FONT_SIZE)
    axes.set_ylabel(label, fontsize=FONT_SIZE)
    _legend(figure, axes)
    return figure, axes


def loss_by_position(losses: pd.DataFrame, table: Table) -> Figure:
    """One panel an evaluation length, one curve a scheme: loss over the tokens of context, the mean of the seeds.

    `losses` is that of `eval.evaluation.losses_by_position`; names, order and lengths come from `table`. Position p
    has p + 1 tokens of context; each range of positions stands at the geometric middle of its contexts.
    """
    figure, panels = _panels(len(table.lengths))
    for panel, length in zip(panels, table.lengths, strict=True):
        curves = {}
        for row_id, style in _styles(table).items():
            chosen = losses[(losses["row"] == row_id) & (losses["length"] == length)]
            ranges = chosen.groupby(["start", "end"])["loss"].agg(["mean"]).reset_index()
            start, end, mean = ranges.to_numpy(dtype=float).T
            if len(mean):
                panel.plot(_context(start, end), mean, label=table.rows[row_id].name, **style)
                curves[row_id] = mean
        note = _limit(panel, curves, table)
        panel.set_title(f"evaluated at {length:,} tokens{note}", fontsize=FONT_SIZE)
        _context_axis(panel, length, table.train_lengths)
    panels[0].set_ylabel("validation loss (nats per token)", fontsize=FONT_SIZE)
    _legend(figure, panels[0])
    return figure


def position_curves(by_position: Mapping[int, PositionLoss], train_length: int, title: str) -> Figure:
    """Of one run: loss over the tokens of context, one curve an evaluation length."""
    figure, (axes,) = _panels(1)
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(by_position)))
    for shade, (length, of_length) in zip(shades, sorted(by_position.items()), strict=True):
        context = _context(np.array(of_length.edges[:-1]), np.array(of_length.edges[1:]))
        axes.plot(context, of_length.mean, label=f"{length:,} tokens", color=shade, marker="o", ms=5)
    axes.set_title(f"{title}, by evaluation length", fontsize=FONT_SIZE)
    _context_axis(axes, max(by_position), [train_length])
    axes.set_ylabel("validation loss (nats per token)", fontsize=FONT_SIZE)
    _legend(figure, axes)
    return figure


def save_figure(figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Writes `stem`.png (200 dpi) and `stem`.pdf, each whole or not at all; returns the paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    for path in paths:
        partial = path.with_name(f".partial-{path.name}")
        # Without dates in the files, the same numbers give the same bytes.
        metadata = {"CreationDate": None} if path.suffix == ".pdf" else {}
        figure.savefig(partial, dpi=200, metadata=metadata)
        os.replace(partial, path)
    return paths


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    width = 7.2 if count == 1 else 3.9 * count + 0.6
    figure = Figure(figsize=(width, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, count, squeeze=False)[0])
    for panel in panels:
        panel.grid(True, color="0.92", lw=0.8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
    return figure, panels


def _styles(table: Table) -> Mapping[str, dict[str, Any]]:
    """How each row is drawn: a scheme in its own colour, any other row (an ablation) in its place on a colour scale."""
    others = [row_id for row_id in table.rows if row_id not in STYLES]
    shades = colormaps["viridis"](np.linspace(0, 0.9, max(1, len(others))))
    styles = {}
    for row_id in table.rows:
        strong = row_id.startswith("scale_invariant")
        color, marker, line = STYLES.get(row_id) or (shades[others.index(row_id)], "o", "-")
        styles[row_id] = {"color": color, "marker": marker, "ls": line, "lw": 2.8 if strong else 1.6}
        styles[row_id] |= {"ms": 7 if strong else 5.5, "zorder": 3 if strong else 2, "mec": "white", "mew": 0.6}
    return styles


def _curve(history: pd.DataFrame, row_id: str, length: int) -> list[np.ndarray]:
    """Steps, and the mean, lowest and highest loss of the seeds at each."""
    chosen = history[(history["row"] == row_id) & (history["length"] == length)]
    seeds = chosen.groupby("step")["loss"].agg(["mean", "min", "max"]).reset_index()
    return list(seeds.to_numpy(dtype=float).T)


def _context(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The geometric middle of the contexts, start + 1 to end tokens, of a range of positions."""
    return np.sqrt((start + 1.0) * end)


def _context_axis(axes: Axes, length: int, train_lengths: Sequence[int]) -> None:
    """Tokens of context, log2, the training lengths marked."""
    for train_length in train_lengths:
        axes.axvline(train_length, color="0.6", lw=1, ls=(0, (4, 3)), zorder=0)
    axes.set_xscale("log", base=2)
    ticks = [4**k for k in range(10) if 4**k <= length] if length < 4**8 else [16**k for k in range(6)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel("tokens of context (dashed: training length)", fontsize=FONT_SIZE)


def _limit(panel: Axes, curves: Mapping[str, np.ndarray], table: Table) -> str:
    """Limits the y axis to what the middle scheme does after a fifth of the training; says what ends above that."""
    if not curves:
        return ""
    low = min(curve.min() for curve in curves.values())
    early = np.median([curve[len(curve) // 5] for curve in curves.values()])
    high = max(early, np.median([curve[-1] for curve in curves.values()]), 1.02 * low)
    margin = 0.06 * (high - low)
    low, high = low - margin, high + margin
    panel.set_ylim(low, high)
    above = [f"{table.rows[row_id].name} at {curve[-1]:.2f}" for row_id, curve in curves.items() if curve[-1] > high]
    return "\n" + fill(f"ends above: {', '.join(above)}", 40) if above else ""


def _if_trained(table: Table, length: int) -> str:
    return "\n(training length)" if length in table.train_lengths else ""


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the panels, where it covers no curve, in as many columns as fit; a scheme that all share is its title."""
    handles, labels = axes.get_legend_handles_labels()
    schemes = {label.rpartition(", ")[0] for label in labels}
    shared = schemes.pop() if len(schemes) == 1 else ""
    labels = [label.removeprefix(f"{shared}, ") for label in labels]
    inches = 0.7 + 0.075 * max(map(len, labels), default=0)  # of a column at that font size
    columns = max(1, min(len(labels), int(figure.get_figwidth() / inches)))
    figure.legend(
        handles, labels, title=shared or None, loc="outside lower center", ncols=columns, frameon=False, fontsize=11
    )
