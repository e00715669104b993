"""The heat map of needle-in-a-haystack accuracy: depth of the needle x length of the sample."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

FONT_SIZE = 11


def heat_map(accuracy: Mapping[str, Mapping[str, Any]], title: str) -> Figure:
    """One column a length with its accuracy above, one row a tenth of the haystack; white where no needle lay.

    `accuracy` is that of needle.json: {length: what `eval.needle.summarise` gives}.
    """
    lengths = sorted(accuracy, key=int)
    parts = accuracy[lengths[0]]["by_depth"]
    grid = np.array([[part["mean"] for part in accuracy[length]["by_depth"]] for length in lengths], dtype=float).T
    figure = Figure(figsize=(max(5.6, 2.6 + 1.5 * len(lengths)), 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(grid, cmap="viridis", vmin=0, vmax=1, aspect="auto", origin="upper")
    for (row, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            color = "black" if value > 0.6 else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=FONT_SIZE - 1)
    labels = [f"{int(length):,}\n{accuracy[length]['mean']:.2f}" for length in lengths]
    axes.set_xticks(range(len(lengths)), labels, fontsize=FONT_SIZE)
    axes.set_yticks(range(len(parts)), [f"{part['from']:.1f}-{part['to']:.1f}" for part in parts], fontsize=FONT_SIZE)
    axes.set_xlabel("length (tokens), and accuracy over all depths", fontsize=FONT_SIZE)
    axes.set_ylabel("depth of the needle (0: start of the haystack)", fontsize=FONT_SIZE)
    figure.suptitle(title, fontsize=FONT_SIZE)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes)
    return figure
