"""Figures of needle-in-a-haystack accuracy: by depth of the needle and length of the sample, and by length alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from eval.figures import FONT_SIZE, by_length
from eval.tables import Table

LENGTH_LABEL = "length (tokens), and accuracy over all depths"
DEPTH_LABEL = "depth of the needle (0: start of the haystack)"


def accuracy_by_length(table: Table) -> Figure:
    """Accuracy over the length of the tested samples (log2), one line a scheme, error bars of one standard error."""
    figure, axes = by_length(table, "share of needles found")
    axes.set_ylim(-0.03, 1.03)
    return figure


def heat_map(accuracy: Mapping[str, Mapping[str, Any]], title: str) -> Figure:
    """One column a length with its accuracy above, one row a tenth of the haystack; white where no needle lay.

    `accuracy` is that of needle.json: {length: what `eval.needle.summarise` gives}.
    """
    figure = Figure(figsize=(max(5.6, 2.6 + 1.5 * len(accuracy)), 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = _draw(axes, accuracy)
    axes.set_xlabel(LENGTH_LABEL, fontsize=FONT_SIZE)
    axes.set_ylabel(DEPTH_LABEL, fontsize=FONT_SIZE)
    figure.suptitle(title, fontsize=FONT_SIZE)
    figure.colorbar(image, ax=axes)
    return figure


def heat_maps(schemes: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """One such panel for each scheme, under its name; without any, one that says so."""
    columns = max(1, min(len(schemes), 3 if len(schemes) <= 6 else 5))
    rows = max(1, -(-len(schemes) // columns))
    figure = Figure(figsize=(3.2 * columns + 1.6, 4.2 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    image = None
    for panel, (name, accuracy) in zip(panels, schemes.items(), strict=False):
        image = _draw(panel, accuracy)
        panel.set_title(name, fontsize=FONT_SIZE)
    for panel in panels[len(schemes) :]:
        panel.set_axis_off()
    if image is None:
        panels[0].text(0.5, 0.5, "no run is tested yet", ha="center", fontsize=FONT_SIZE)
        return figure
    figure.supxlabel(LENGTH_LABEL, fontsize=FONT_SIZE)
    figure.supylabel(DEPTH_LABEL, fontsize=FONT_SIZE)
    figure.colorbar(image, ax=panels, shrink=0.6)
    return figure


def _draw(axes: Axes, accuracy: Mapping[str, Mapping[str, Any]]) -> AxesImage:
    lengths = sorted(accuracy, key=int)
    parts = accuracy[lengths[0]]["by_depth"]
    grid = np.array([[part["mean"] for part in accuracy[length]["by_depth"]] for length in lengths], dtype=float).T
    image = axes.imshow(grid, cmap="viridis", vmin=0, vmax=1, aspect="auto", origin="upper")
    for (row, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            color = "black" if value > 0.6 else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=FONT_SIZE - 1)
    labels = [f"{int(length):,}\n{accuracy[length]['mean']:.2f}" for length in lengths]
    axes.set_xticks(range(len(lengths)), labels, fontsize=FONT_SIZE)
    axes.set_yticks(range(len(parts)), [f"{part['from']:.1f}-{part['to']:.1f}" for part in parts], fontsize=FONT_SIZE)
    axes.spines[:].set_visible(False)
    return image
