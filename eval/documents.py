"""A picture of how long the documents of a data set are."""

from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from data.documents import Bin


def length_figure(bins: Sequence[Bin], name: str) -> Figure:
    """Two bars a power of two: the share of the documents of that length, and of the tokens that they hold."""
    figure = Figure(figsize=(max(7.2, 0.62 * len(bins) + 1.5), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    place = np.arange(len(bins))
    documents = np.array([entry.documents for entry in bins])
    tokens = np.array([entry.tokens for entry in bins])
    axes.bar(place - 0.2, documents / documents.sum(), 0.38, color="#0072b2", label="documents")
    axes.bar(place + 0.2, tokens / tokens.sum(), 0.38, color="#d55e00", label="the tokens in them")
    edges = [*(entry.low for entry in bins), 2 * bins[-1].low]
    axes.set_xticks(np.arange(len(edges)) - 0.5, [f"{edge:,}" for edge in edges], rotation=45, ha="right")
    axes.set_xlim(-0.7, len(bins) - 0.3)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(xlabel="document length (tokens)", ylabel="share")
    axes.set_title(f"{name}: {documents.sum():,} documents, {tokens.sum():,} tokens")
    axes.grid(True, axis="y", color="0.92", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
