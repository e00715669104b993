"""A self-contained HTML page about runs: what `eval.report` read, as tables, and as charts that the page draws itself.

Everything that comes from a run directory goes through Jinja's autoescape or its `tojson`, which leaves no `<` in the
page's data; and the page's policy lets no other script than its own run, and nothing be fetched.
"""

import base64
import hashlib
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.colors import to_hex

from eval import report_tables as tables
from eval.figures import STYLES
from eval.report import SEEDS, WRITERS, ReportedRun, differing_settings, group_seeds

HERE = Path(__file__).parent
POINTS = 500  # of a curve, at most
DASHES = {"-": "", "--": "7 4", ":": "2 3", "-.": "8 3 2 3"}  # matplotlib's words, and SVG's
LOSS = "loss (nats per token)"
LENGTHS_FROM = "Of the last validation; at other lengths, of eval.json, if of the run's own data and last checkpoint."


def write_page(path: Path, page: str) -> None:
    """Writes the page, whole or not at all; what no encoding has a word for becomes a question mark."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    partial.write_bytes(page.encode("utf-8", errors="replace"))
    os.replace(partial, path)


def render(runs: Sequence[ReportedRun], title: str, made_by: Mapping[str, str]) -> str:
    """The page. `made_by` says how the report was made: a name and a text each."""
    groups = name_groups(runs)
    script = (HERE / "report.js").read_text()
    loader = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
    loader.trim_blocks = loader.lstrip_blocks = True
    loader.policies |= {"json.dumps_kwargs": {"allow_nan": False, "separators": (",", ":")}}
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return loader.get_template("report.html").render(
        title=title,
        status=_status(runs),
        runs=runs,
        summary=tables.summary(runs),
        seeds=tables.seeds(groups),
        lengths=tables.losses_by_length(runs),
        needles=[grid for run in runs if (grid := tables.needle_map(run))],
        attended=[run for run in runs if run.attention or run.pictures],
        written=[run for run in runs if run.texts],
        problems=[f"{run.run_dir}/{problem}" for run in runs for problem in run.broken],
        missing=_missing(runs),
        other_data=_other_data(runs),
        differences=tables.differences(runs),
        environments=tables.environments(runs),
        sections=(sections := charts(runs)),
        data={"runs": styles(runs, groups), "charts": {c["id"]: c for s in sections for c in s["charts"]}},
        made_by=made_by,
        style=Markup((HERE / "report.css").read_text()),
        script=Markup(script),
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
    )


def name_groups(runs: Sequence[ReportedRun]) -> dict[str, list[ReportedRun]]:
    """The seeds of each setting under a name that tells it from the others: its scheme, and what else differs."""
    groups = group_seeds(runs)
    schemes = [tables.run_scheme(group[0]) for group in groups]
    named = {}
    for scheme, group in zip(schemes, groups, strict=True):
        rivals = [other[0] for name, other in zip(schemes, groups, strict=True) if name == scheme]
        keys = differing_settings(rivals, SEEDS) if len(rivals) > 1 else []
        parts = [f"{key.rpartition('.')[2]} = {tables.setting(group[0], key).text}" for key in keys]
        name = ", ".join([scheme, *parts[:4], *(["…"] if len(parts) > 4 else [])])
        named[name if name not in named else f"{name} ({group[0].name})"] = group
    return named


def styles(runs: Sequence[ReportedRun], groups: Mapping[str, Sequence[ReportedRun]]) -> list[dict[str, Any]]:
    """How each run is drawn: in its scheme's colour of the figures, further settings of a scheme in other dashes.

    Settings of one scheme only, such as values of tau, lie on a colour scale, and so do schemes without a colour.
    """
    schemes = [str(group[0].settings.get("position.name")) for group in groups.values()]
    alone = len(schemes) > 1 and len(set(schemes)) == 1
    shades = iter(colormaps["viridis"](np.linspace(0, 0.9, len(schemes))))
    drawn: dict[str, dict[str, Any]] = {}
    for index, ((name, group), scheme) in enumerate(zip(groups.items(), schemes, strict=True)):
        shade = to_hex(next(shades))
        color, _, line = STYLES.get(scheme, (shade, "o", "-"))
        dash = list(DASHES).index(line) + (0 if alone else schemes[:index].count(scheme))
        style = {
            "group": name,
            "color": shade if alone else color,
            "dash": list(DASHES.values())[dash % len(DASHES)],
            "width": 2.6 if scheme.startswith("scale_invariant") and not alone else 1.6,
        }
        drawn |= {run.name: style for run in group}
    unknown = {"group": "without a config", "color": "#7f7f7f", "dash": "", "width": 1.6}
    told_by_seed = all(
        len({repr(run.settings.get("seed")) for run in group}) == len(group) for group in groups.values()
    )
    labels = [str(run.settings.get("seed")) if told_by_seed else run.name for run in runs]
    return [
        {"name": run.name, "label": label, **drawn.get(run.name, unknown)}
        for run, label in zip(runs, labels, strict=True)
    ]


def charts(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """The sections of charts, each {title, note, charts}; a chart or a section that would be empty is left out."""
    text = [None if run.is_finetuned else run for run in runs]  # None keeps the places of the others
    answers = [run if run.is_finetuned else None for run in runs]
    averaged = f"Of more than {POINTS} steps, each point is the mean of several."
    sections = [
        ("Validation loss", "", _validation_charts(text, "validation", "Evaluated at")),
        (
            "Training loss",
            averaged,
            [_metric_chart(text, "training", "train/loss", LOSS, "Loss of the training batches")],
        ),
        ("Loss by length", LENGTHS_FROM, [_length_chart(runs)]),
        ("Loss by position", "Mean loss of the positions in a range, by eval.json.", _position_charts(runs)),
        ("Fine-tuning on needles", "Loss of the answers only.", _validation_charts(answers, "answers", "Evaluated at")),
        (
            "Speed and memory",
            averaged,
            [
                _metric_chart(runs, "throughput", "train/tokens_per_second", "tokens per second", "Throughput"),
                _metric_chart(runs, "memory", "train/memory_bytes", "peak memory (GB)", "Memory", scale=1e-9),
            ],
        ),
    ]
    filled = [(title, note, [c for c in found if c["series"]]) for title, note, found in sections]
    return [
        {"id": title.lower().replace(" ", "-"), "title": title, "note": note, "charts": found}
        for title, note, found in filled
        if found
    ]


def _validation_charts(runs: Sequence[ReportedRun | None], name: str, title: str) -> list[dict[str, Any]]:
    """One chart a length: validation loss over steps."""
    lengths = sorted({length for run in runs if run for length in run.validation})
    return [
        _metric_chart(runs, f"{name}-{length}", f"val/loss_{length}", LOSS, f"{title} {length:,} tokens")
        for length in lengths
    ]


def _metric_chart(
    runs: Sequence[ReportedRun | None], name: str, key: str, y: str, title: str, scale: float = 1.0
) -> dict[str, Any]:
    """A metric over the training steps."""
    series = []
    for index, run in enumerate(runs):
        if run and key in run.metrics:
            steps, values = thin_out(run.column("step"), scale * run.column(key))
            series += _series(index, steps, values)
    return {"id": name, "title": title, "x": "training step", "y": y, "log": False, "series": series}


def _length_chart(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """Loss over evaluation length."""
    series = []
    for index, run in enumerate(runs):
        losses = {length: cell.value for length, cell in sorted(tables.run_losses(run).items()) if not cell.aside}
        series += _series(index, list(losses), [loss for loss in losses.values() if loss is not None])
    title = "Over evaluation length"
    return {"id": "length", "title": title, "x": "evaluation length (tokens)", "y": LOSS, "log": True, "series": series}


def _position_charts(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """One chart a length: loss over the last position of each range of positions, counted from 1.

    What was evaluated on other data or of an older checkpoint than the run's last has charts of its own.
    """
    drawn: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for index, run in enumerate(runs):
        for length, of_run in run.evaluation.by_position.items() if run.evaluation else ():
            series = drawn.setdefault((length, run.evaluated_elsewhere), [])
            series += _series(index, of_run.edges[1:], of_run.mean)
    found = []
    for number, ((length, elsewhere), series) in enumerate(sorted(drawn.items(), key=lambda item: item[0])):
        name = f"position-{length}-{number}" if elsewhere else f"position-{length}"
        title = f"Sequences of {length:,} tokens" + (f" ({elsewhere})" if elsewhere else "")
        x = "up to position (tokens)"
        found.append({"id": name, "title": title, "x": x, "y": LOSS, "log": True, "series": series})
    return found


def thin_out(steps: np.ndarray, values: np.ndarray) -> tuple[list[float], list[float]]:
    """At most POINTS finite points: the values as they are, or the means of equal runs of them at their last steps."""
    finite = pd.DataFrame({"step": steps, "value": values})[np.isfinite(values)]
    chunk = np.arange(len(finite)) // max(1, math.ceil(len(finite) / POINTS))
    thinned = finite.groupby(chunk).agg({"step": "last", "value": "mean"})
    return thinned["step"].tolist(), thinned["value"].tolist()


def _series(run: int, x: Sequence[float], y: Sequence[float | None]) -> list[dict[str, Any]]:
    """The finite points of one run, rounded to what a chart can show; nothing where there are none."""
    points = [(a, float(f"{b:.5g}")) for a, b in zip(x, y, strict=True) if b is not None and math.isfinite(b)]
    return [{"run": run, "x": [int(a) for a, _ in points], "y": [b for _, b in points]}] if points else []


def _status(runs: Sequence[ReportedRun]) -> str:
    """ "3 finished, 1 interrupted"."""
    counts = Counter(run.status for run in runs)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def _missing(runs: Sequence[ReportedRun]) -> list[str]:
    """A line a file that some run lacks: what writes it, and who lacks it."""
    lines = []
    for name, writer in WRITERS.items():
        lacking = [run.name for run in runs if name in run.missing]
        who = f"all {len(runs)} runs" if len(lacking) == len(runs) > 1 else ", ".join(lacking)
        if lacking:
            lines.append(f"{name} (written by {writer}): {who}")
    return lines


def _other_data(runs: Sequence[ReportedRun]) -> str:
    """The validation data where the runs do not share it."""
    found = {tables.validated_on(run) for run in runs if run.settings and not run.is_finetuned}
    return ", ".join(sorted(found)) if len(found) > 1 else ""
