"""The tables of a report: cells with what they show, what they are sorted by, and whether they are the best."""

import math
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgb
from omegaconf import OmegaConf

from configs.command import CONFIGS
from eval.report import ReportedRun, copies_of_seeds, differing_settings, flatten
from eval.tables import Row, scheme_name
from model.position.scheme import SLOTS

ABSENT = "–"
SCHEME_SLOTS = (*SLOTS, "core")
STARTED = re.compile(  # what train.py logs first
    r"(\S+ \S+) .* \(([\d,]+) parameters\), .*: steps .* on (.+) in (\w+), (\d+) forward passes a step"
)
MACHINE = re.compile(r"\S+ \S+ on (.*, torch .*)")  # what it logs next


@dataclass(frozen=True)
class Cell:
    """`value` is what the column is sorted by, None for text; `note` says more on demand.

    `aside`: measured on other data or of an older checkpoint, so neither averaged nor drawn with the rest.
    """

    text: str
    value: float | None = None
    best: bool = False
    note: str = ""
    background: str = ""
    aside: bool = False

    @property
    def on_dark(self) -> bool:
        """Whether the text must be white to be read."""
        red, green, blue = (value**2.2 for value in to_rgb(self.background))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.18  # where white and black differ from it equally


@dataclass(frozen=True)
class Grid:
    """A table: the first column names the row, `numeric` says which columns are sorted as numbers."""

    caption: str
    columns: list[str]
    rows: list[list[Cell]]

    @property
    def numeric(self) -> list[bool]:
        return [any(row[index].value is not None for row in self.rows) for index in range(len(self.columns))]


def summary(runs: Sequence[ReportedRun]) -> Grid:
    """A row a run: what it is, how far it is, and what was measured of it."""
    losses, accuracies = _lengths(run_losses(run) for run in runs), _lengths(_accuracies(run) for run in runs)
    columns = ["Run", "Scheme", "Seed", "Model", "Trained at", "Steps", "Status"]
    columns += _headings(losses, accuracies)
    columns += ["Tokens/s", "Memory"]
    rows = []
    for run in runs:
        row = [Cell(run.name), Cell(run_scheme(run))]
        row += [setting(run, "seed"), setting(run, "model.name"), setting(run, "train.length")]
        row += [Cell(f"{run.step:,} / {setting(run, 'train.steps').text}", run.step), Cell(run.status)]
        row += [run_losses(run).get(length, Cell(ABSENT)) for length in losses]
        row += [_accuracies(run).get(length, Cell(ABSENT)) for length in accuracies]
        row += [_metric(run, "train/tokens_per_second", "median", "{:,.0f}"), _memory(run)]
        rows.append(row)
    first = columns.index("Status") + 1
    data = [validated_on(run) for run in runs]
    for index in range(first, first + len(losses)):
        mark_best(rows, index, min, data)
    for index in range(first + len(losses), first + len(losses) + len(accuracies)):
        mark_best(rows, index, max)
    caption = "Loss: validation loss in nats per token at a length in tokens. Needles: share of them that were found."
    return Grid(caption, columns, rows)


def seeds(groups: Mapping[str, Sequence[ReportedRun]]) -> Grid | None:
    """A row a setting: mean and standard error over its finished seeds; None where no setting has several runs.

    Each seed counts once, and the caption names the copies.
    """
    if all(len(group) == 1 for group in groups.values()):
        return None
    runs = [run for group in groups.values() for run in group]
    losses, accuracies = _lengths(run_losses(run) for run in runs), _lengths(_accuracies(run) for run in runs)
    copies = {name: of for group in groups.values() for name, of in copies_of_seeds(group).items()}
    rows = []
    for name, group in groups.items():
        distinct = [run for run in group if run.name not in copies]
        finished = [run for run in distinct if run.is_finished]
        values = [
            [_averaged(cells.get(length)) for cells, of in _measured(run, losses, accuracies) for length in of]
            for run in finished
        ]
        row = Row(name, values or [[None] * (len(losses) + len(accuracies))])
        with np.errstate(invalid="ignore"):  # the error of what diverged is nan
            cells = [_with_error(*pair) for pair in zip(row.mean, row.stderr, strict=True)]
        counted = f"{len(finished)}" if len(finished) == len(distinct) else f"{len(finished)} of {len(distinct)}"
        rows.append([Cell(name), Cell(counted, len(finished)), *cells])
    data = [validated_on(group[0]) for group in groups.values()]
    for index in range(len(losses) + len(accuracies)):
        mark_best(rows, 2 + index, *((min, data) if index < len(losses) else (max, None)))
    columns = ["Setting", "Seeds", *_headings(losses, accuracies)]
    caption = "Mean ± standard error over the finished seeds of each setting."
    if copies:
        named = ", ".join(f"{name} (the seed of {of})" for name, of in copies.items())
        caption += f" Not counted again: {named}."
    return Grid(caption, columns, rows)


def losses_by_length(runs: Sequence[ReportedRun]) -> Grid | None:
    """What evaluate.py measured, on which data, at which step and on how many tokens; None without any eval.json.

    The best is one of those on as many tokens of the same data, each at its run's end or at the same step.
    """
    evaluated = [(run, run.evaluation) for run in runs if run.evaluation]
    if not evaluated:
        return None
    lengths = _lengths(evaluation.loss for _, evaluation in evaluated)
    rows, alike = [], []
    for run, evaluation in evaluated:
        tokens = sorted({measured.count for measured in evaluation.loss.values()})
        row = [
            Cell(run.name),
            Cell((evaluation.data and run.evaluated_data) or ABSENT),
            number(evaluation.step),
            Cell(", ".join(f"{n:,}" for n in tokens), max(tokens, default=0)),
        ]
        rows.append(row + [_loss(evaluation.loss[n].mean) if n in evaluation.loss else Cell(ABSENT) for n in lengths])
        at_end = run.is_finished and evaluation.step in (None, run.last_step)
        data = os.path.abspath(run.evaluated_data) if run.evaluated_data else None
        alike.append((data, "end" if at_end else evaluation.step, *tokens))
    for index in range(len(lengths)):
        mark_best(rows, 4 + index, min, alike)
    columns = ["Run", "Data", "Step", "Tokens", *_headings(lengths, [])]
    caption = "Loss in nats per token that scripts/evaluate.py measured."
    return Grid(f"{caption} Bold: the best of those on the same data at the same step or the end.", columns, rows)


def needle_map(run: ReportedRun) -> Grid | None:
    """Depth x length of one run's needles, coloured by the share that was found."""
    if run.needles is None:
        return None
    lengths = sorted(run.needles.accuracy)
    whole = [_share(run.needles.accuracy[n].mean, f"{run.needles.accuracy[n].count:,} needles") for n in lengths]
    rows = [[Cell("all depths"), *whole]]
    for part in range(len(run.needles.by_depth[lengths[0]]) if lengths else 0):
        depths = [run.needles.by_depth[length][part] for length in lengths]
        rows.append([Cell(depths[0].name), *(_share(depth.mean) for depth in depths)])
    elsewhere = run.needles.tested.rstrip("/").rpartition("/")[2]
    tested = "" if elsewhere in (run.run_dir.name, "") else f" (tested: {elsewhere})"
    return Grid(f"{run.name}{tested}", ["Depth", *(f"{length:,}" for length in lengths)], rows)


def differences(runs: Sequence[ReportedRun]) -> Grid | None:
    """The config keys whose values differ, a row a run; None where none does."""
    keys = differing_settings(runs)
    rows = [[Cell(run.name), *(setting(run, key) for key in keys)] for run in runs if run.settings]
    return Grid("The settings that are not the same in all runs.", ["Run", *keys], rows) if keys else None


def environments(runs: Sequence[ReportedRun]) -> Grid:
    """What log.txt says of where and with what a run ran last and how it went, and which checkpoints there are."""
    rows = []
    for run in runs:
        starts = [found for line in run.log if (found := STARTED.match(line))]
        last = list(starts[-1].groups()) if starts else [ABSENT] * STARTED.groups
        checkpoints = ", ".join(f"{step:,}" for step in run.checkpoints) or ABSENT
        machines = [found[1] for line in run.log if (found := MACHINE.match(line))]
        row = [Cell(run.name), *map(Cell, last), number(len(starts)), Cell(run.log[-1] if run.log else ABSENT)]
        rows.append([*row, Cell(checkpoints), Cell(machines[-1] if machines else ABSENT)])
    columns = [
        "Run",
        "Started",
        "Parameters",
        "Devices",
        "Precision",
        "Passes a step",
        "Starts",
        "Last line of log.txt",
    ]
    return Grid(
        "Of the last start of each run, from log.txt.", [*columns, "Checkpoints at step", "Machine and code"], rows
    )


def run_scheme(run: ReportedRun) -> str:
    """The name of a run's position scheme, the slots that are not the scheme's, and whether it is fine-tuned."""
    name = str(run.settings.get("position.name", ABSENT))
    kinds = {slot: run.settings.get(f"position.{slot}.kind") for slot in SCHEME_SLOTS}
    given = _given_kinds().get(name, kinds)
    changed = [f"{slot}={kind}" for slot, kind in kinds.items() if kind is not None and kind != given[slot]]
    scheme = ", ".join([scheme_name(name), *changed])
    return f"{scheme}, fine-tuned on needles" if run.is_finetuned else scheme


def run_losses(run: ReportedRun) -> dict[int, Cell]:
    """By length the loss of the last validation, and eval.json's at other lengths.

    In brackets, for it does not compete: what an unfinished run measured, or eval.json elsewhere.
    """
    cells = {}
    if run.evaluation:
        where = "eval.json" if run.evaluation.step is None else f"eval.json, step {run.evaluation.step:,}"
        data = f" of {run.evaluated_data}" if run.evaluation.data else ""
        for length, measured in run.evaluation.loss.items():
            cell = _loss(measured.mean, f"{where}, {measured.count:,} tokens{data}")
            cells[length] = replace(cell, aside=bool(run.evaluated_elsewhere))
    if not run.is_finetuned:
        for length, (step, loss) in run.validation.items():
            cells[length] = _loss(loss, f"validation at step {step:,}")
    unfinished = "" if run.is_finished else "; not finished"
    return {
        length: replace(cell, text=f"({cell.text})", note=cell.note + unfinished) if unfinished or cell.aside else cell
        for length, cell in cells.items()
    }


def validated_on(run: ReportedRun) -> str:
    """The folder of a run's validation data, and how much of it: "data/shards/x (1024 tokens)"."""
    return f"{run.settings.get('data.dir')} ({run.settings.get('validation.tokens')} tokens)"


def setting(run: ReportedRun, key: str) -> Cell:
    """A value of the run's config."""
    value = run.settings.get(key)
    return number(value) if value is None or type(value) in (int, float) else Cell(str(value))


def number(value: float | None) -> Cell:
    if value is None or not math.isfinite(value):
        return Cell(ABSENT if value is None else str(value))
    return Cell(f"{value:,}" if isinstance(value, int) else f"{value:g}", value)


def mark_best(
    rows: list[list[Cell]],
    index: int,
    best: Callable[[Iterable[float]], float],
    alike: Sequence[Hashable] | None = None,
) -> None:
    """Marks the best of at least two values of a column, and all that look like it; none that stands in brackets.

    `alike` has a value a row: only rows with the same one are compared.
    """
    compared: dict[Hashable, list[list[Cell]]] = {}
    for row, value in zip(rows, alike or [None] * len(rows), strict=True):
        compared.setdefault(value, []).append(row)
    for among in compared.values():
        _mark_best_among(among, index, best)


def _mark_best_among(rows: list[list[Cell]], index: int, best: Callable[[Iterable[float]], float]) -> None:
    cells = [row[index] for row in rows]
    finite = [c for c in cells if c.value is not None and math.isfinite(c.value) and not c.text.startswith("(")]
    if len(finite) < 2:
        return
    shown = f"{best(cell.value for cell in finite if cell.value is not None):.3f}"
    for row in rows:
        if any(row[index] is cell for cell in finite) and f"{row[index].value:.3f}" == shown:
            row[index] = replace(row[index], best=True)


@cache
def _given_kinds() -> dict[str, dict[str, str]]:
    """The kind of each slot by scheme, as configs/position/ has it."""
    files = (CONFIGS / "position").glob("*.yaml")
    schemes = {path.stem: flatten(OmegaConf.to_container(OmegaConf.load(path))) for path in files}
    return {
        name: {slot: scheme.get(f"{slot}.kind", "none") for slot in SCHEME_SLOTS} for name, scheme in schemes.items()
    }


def _headings(losses: Iterable[int], accuracies: Iterable[int]) -> list[str]:
    """Of the columns by length; broken before the length, if anywhere."""
    named = [("Loss", losses), ("Needles", accuracies)]
    return [f"{name}\N{NO-BREAK SPACE}at {length:,}" for name, lengths in named for length in lengths]


def _lengths(measured: Iterable[Mapping[int, Any]]) -> list[int]:
    return sorted({length for of_run in measured for length in of_run})


def _measured(
    run: ReportedRun, losses: Sequence[int], accuracies: Sequence[int]
) -> list[tuple[dict[int, Cell], Sequence[int]]]:
    return [(run_losses(run), losses), (_accuracies(run), accuracies)]


def _averaged(cell: Cell | None) -> float | None:
    """What enters an average."""
    return None if cell is None or cell.aside else cell.value


def _loss(loss: float, note: str = "") -> Cell:
    return Cell(
        f"{loss:.3f}" if math.isfinite(loss) else "diverged", loss if math.isfinite(loss) else math.inf, note=note
    )


def _accuracies(run: ReportedRun) -> dict[int, Cell]:
    if run.needles is None:
        return {}
    return {
        length: Cell(f"{of.mean:.3f}", of.mean, note=f"of {of.count:,} needles")
        for length, of in run.needles.accuracy.items()
    }


def _with_error(mean: float | None, stderr: float | None) -> Cell:
    if mean is None or not math.isfinite(mean):
        return Cell(ABSENT if mean is None else "diverged", mean)
    return Cell(f"{mean:.3f}" if stderr is None else f"{mean:.3f} ± {stderr:.3f}", mean)


def _share(mean: float | None, note: str = "") -> Cell:
    if mean is None:
        return Cell(ABSENT, note="no needle lay here")
    return Cell(f"{mean:.2f}", mean, note=note, background=to_hex(colormaps["viridis"](min(max(mean, 0.0), 1.0))))


def _metric(run: ReportedRun, key: str, statistic: str, form: str) -> Cell:
    values = run.metrics[key].dropna() if key in run.metrics else []
    return Cell(form.format(value := float(getattr(values, statistic)())), value) if len(values) else Cell(ABSENT)


def _memory(run: ReportedRun) -> Cell:
    cell = _metric(run, "train/memory_bytes", "max", "{}")
    return cell if cell.value is None else replace(cell, text=f"{cell.value / 1e9:.2f} GB")
