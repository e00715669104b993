"""eval.json files that were made by hand."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from eval.experiment import Run


def write_evaluation(folder: Path, run: Run, start: float = 1.0, **changes: Any) -> None:
    """An eval.json as evaluate.py leaves it, whose losses rise by one from range to range."""
    tokens, measured = run.config["validation"]["tokens"], {}
    for length in run.lengths:
        edges = [0, *(2**k for k in range((length - 1).bit_length())), length]
        counts = [(end - first) * tokens // length for first, end in pairwise(edges)]
        measured[str(length)] = {"edges": edges, "mean": [start + k for k in range(len(counts))], "tokens": counts}
    evaluation = {"by_position": measured, "step": run.steps, "data": run.config["data"]["dir"]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eval.json").write_text(json.dumps(evaluation | changes))
