"""A picture of a position plan: rotation angles, query scale, and the scale and shift of the logits, over distance."""

import math
from collections.abc import Callable

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from model.position import Plan

EMPTY = {"rotation angle": "no rotation", "query scale": "s = 1", "scale": "scale = 1", "shift": "shift = 0"}


def position_figure(plan: Plan, name: str, train_length: int) -> Figure:
    """Four panels over distance or position in tokens, on log axes; a dashed line marks the training length."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2).flat
    scale = None if plan.transform is None else plan.transform.scale
    shift = None if plan.transform is None else plan.transform.shift
    drawn: list[tuple[str, str, Callable[[Axes], None] | None]] = [
        ("rotation angle", "distance t", _angles(plan)),
        ("query scale", "query position i", _lines(None if plan.query_scale is None else plan.query_scale[0])),
        ("scale", "distance t", _lines(scale)),
        ("shift", "distance t", _lines(None if shift is None else -shift, log=True)),
    ]
    labels = ("angle t f (radians)", "s (factor on the logits)", "scale (factor on the logits)", "- shift (nats)")
    for panel, (title, over, draw), label in zip(axes, drawn, labels, strict=True):
        panel.set_title(title)
        panel.set(xlabel=f"{over} (tokens)", ylabel=label, xscale="log", xlim=(1, max(plan.length, 2)))
        if draw is None:
            panel.set_yticks([])
            panel.text(
                0.5, 0.5, EMPTY[title], transform=panel.transAxes, ha="center", va="center", color="0.4", size=13
            )
            continue
        draw(panel)
        panel.grid(alpha=0.25)
        if train_length < plan.length:
            panel.axvline(train_length, color="0.5", ls="--", lw=1)
    factor = "" if plan.temperature == 1 else f"; all logits times {plan.temperature:.4f}"
    figure.suptitle(f"{name}, {plan.length:,} tokens (dashed: training length {train_length:,}){factor}")
    return figure


def _angles(plan: Plan) -> Callable[[Axes], None] | None:
    if plan.angular_frequency is None:
        return None
    frequency = plan.angular_frequency.numpy()

    def draw(panel: Axes) -> None:
        turning = frequency[frequency > 0]
        t = np.array([1, plan.length])
        for colour, f in zip(colormaps["viridis"](np.linspace(0, 0.9, len(turning))), turning, strict=True):
            panel.plot(t, t * f, color=colour, lw=1)
        panel.axhline(2 * math.pi, color="#d55e00", lw=1.5)
        panel.text(1.2, 2 * math.pi * 1.15, "one turn", color="#d55e00")
        still = len(frequency) - len(turning)
        panel.set_yscale("log")
        panel.set_title(f"rotation angle: {len(turning)} turning pairs" + (f", {still} still" if still else ""))

    return draw


def _lines(table: Tensor | None, log: bool = False) -> Callable[[Axes], None] | None:
    """One line a head over the index (from 1 on, since the axis is logarithmic); one line when all are the same."""
    if table is None:
        return None
    rows = table.detach().numpy()
    if (rows == rows[:1]).all():
        rows = rows[:1]
    index = np.unique(np.geomspace(1, max(rows.shape[1] - 1, 1), 400).astype(int))
    index = index[index < rows.shape[1]]

    def draw(panel: Axes) -> None:
        colours = colormaps["viridis"](np.linspace(0, 0.9, len(rows)))
        for head, (row, colour) in enumerate(zip(rows, colours, strict=True)):
            panel.plot(index, row[index], color=colour, lw=1.8, label=f"head {head}" if len(rows) > 1 else "all heads")
        panel.set_yscale("log" if log else "linear")
        panel.legend(frameon=False, fontsize=9, ncols=2)

    return draw
