"""Tables of what runs measured: one row a scheme, one column an evaluation length, mean and standard error.

A run that did not finish is shown as missing, never dropped, and a published figure stands beside ours where the
experiment names its source in `published.json`. A second table compares each scheme with one of them, seed by seed:
what the seeds have in common (the initial values) cancels in the differences, so their error is often the smaller one.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.experiment import Experiment, Run
from eval.runs import read_metrics, trained_at

PUBLISHED = Path(__file__).with_name("published.json")
NAMES_BEYOND_TABLE_1 = {
    "scale_invariant_rope": "Scale-invariant RoPE",
    "scale_invariant_nope": "Scale-invariant NoPE",
    "infini_rope": "Infini-attention, RoPE",
    "infini_p_rope": "Infini-attention, p-RoPE",
}

Numbers = list[float | None]


@dataclass(frozen=True)
class Row:
    """What one scheme measured. `seeds` is per seed, per column; None where a run did not finish."""

    name: str
    seeds: list[Numbers]
    published: dict[str, Numbers] | None = None

    @property
    def mean(self) -> Numbers:
        """Mean over the finished seeds of each column; None without any."""
        return [_mean(values) for values in self._columns()]

    @property
    def stderr(self) -> Numbers:
        """Sample standard deviation / sqrt(number of seeds) of each column; None with fewer than two seeds."""
        return [_stderr(values) for values in self._columns()]

    @property
    def finished(self) -> int:
        """How many seeds have a value."""
        return sum(any(value is not None for value in seed) for seed in self.seeds)

    def _columns(self) -> list[list[float]]:
        return [[value for value in column if value is not None] for column in zip(*self.seeds, strict=True)]


@dataclass(frozen=True)
class Measure:
    """What the numbers of a table are: `caption` says it in a sentence, `name` and `column` are short for it.

    `best` is min or max.
    """

    name: str
    column: str
    caption: str
    best: Callable[..., Any]


LOSS = Measure("Loss", "val", "Validation loss in nats per token, by evaluation length in tokens.", min)


@dataclass(frozen=True)
class Paired:
    """Number of a scheme minus that of the reference with the same seed, by column: over `seeds` that both have.

    Their mean (None without any), and their sample standard deviation / sqrt(seeds) (None with fewer than two).
    """

    mean: Numbers
    stderr: Numbers
    seeds: list[int]


@dataclass(frozen=True)
class Table:
    """What an experiment found. `lengths` are the columns, in tokens; `setting`, `command`, `commit` say how.

    `trained_at` are the commits that its runs were trained at, "unknown" among them for a run that did not record it.

    `reference` is the row that the others are compared with.
    """

    experiment: str
    title: str
    lengths: list[int]
    train_lengths: list[int]
    rows: Mapping[str, Row]
    setting: str
    command: str
    commit: str | None
    trained_at: Sequence[str] = ()
    reference: str | None = None
    measure: Measure = LOSS

    @property
    def columns(self) -> list[str]:
        return [f"{self.measure.column}@{length}" for length in self.lengths]

    @property
    def paired(self) -> dict[str, Paired]:
        """Every row but the reference, compared with it."""
        if self.reference is None:
            return {}
        reference = self.rows[self.reference]
        return {
            row_id: paired_difference(row, reference) for row_id, row in self.rows.items() if row_id != self.reference
        }


def paired_difference(row: Row, reference: Row) -> Paired:
    """mean_s(d_s) and sd_s(d_s) / sqrt(n) of each column, d_s = loss of `row` - loss of `reference` with the seed s."""
    by_column = [
        [ours - theirs for ours, theirs in zip(column, beside, strict=True) if ours is not None and theirs is not None]
        for column, beside in zip(zip(*row.seeds, strict=True), zip(*reference.seeds, strict=True), strict=True)
    ]
    return Paired([*map(_mean, by_column)], [*map(_stderr, by_column)], [*map(len, by_column)])


def row_name(run: Run) -> str:
    """The name of a run's row as people write it: `Scale-invariant p-RoPE`, then the other axes as `tau = 1`."""
    parts = []
    for key, value in run.axes.items():
        parts.append(scheme_name(str(value)) if key == "position" else f"{key.rsplit('.', 1)[-1]} = {value}")
    return ", ".join(parts)


def scheme_name(scheme: str) -> str:
    """The name of a position scheme as people write it; its id where it is none of ours."""
    table1 = _published_tables()["table1_val_loss_162m_train4k"]["rows"]
    return ({known: row["name"] for known, row in table1.items()} | NAMES_BEYOND_TABLE_1).get(scheme, scheme)


def history(runs: Iterable[Run]) -> pd.DataFrame:
    """Finite validation losses over training, of unfinished runs too: columns row, seed, step, length, loss (nats)."""
    frames = [pd.DataFrame(columns=["row", "seed", "step", "length", "loss"])]
    for run in runs:
        if not (run.record / "metrics.jsonl").exists():
            continue
        metrics = read_metrics(run.record)
        for length in run.lengths:
            if (key := f"val/loss_{length}") in metrics:
                frame = pd.DataFrame({"step": metrics["step"], "length": length, "loss": metrics[key]})
                frames.append(frame[np.isfinite(frame["loss"])].assign(row=run.row, seed=run.seed))
    return pd.concat(frames if len(frames) == 1 else frames[1:], ignore_index=True)


def collect(experiment: Experiment, runs: Sequence[Run], command: str, commit: str | None = None) -> Table:
    """The table of an experiment from its run folders: the validation after the last step of every finished run.

    Raises ValueError naming a run that lacks it.
    """
    lengths = sorted({length for run in runs for length in run.lengths})
    return tabulate(experiment, runs, lengths, _final_losses, LOSS, command, commit)


def tabulate(
    experiment: Experiment,
    runs: Sequence[Run],
    lengths: list[int],
    read: Callable[[Run, Sequence[int]], Numbers],
    measure: Measure,
    command: str,
    commit: str | None,
) -> Table:
    """The table of what `read` gives for each run at the lengths, None where there is nothing."""
    rows: dict[str, Row] = {}
    for run in runs:
        row = rows.setdefault(run.row, Row(row_name(run), [], _published(experiment.published, run, lengths)))
        row.seeds.append(read(run, lengths))
    return Table(
        experiment=experiment.name,
        title=experiment.title,
        lengths=lengths,
        train_lengths=sorted({run.config["train"]["length"] for run in runs}),
        rows=rows,
        setting=_setting(experiment, runs),
        command=command,
        commit=commit,
        trained_at=sorted({at for run in runs if run.status == "finished" for at in trained_at(run.record)}),
        reference=_reference(experiment, rows, measure),
        measure=measure,
    )


def write_table(table: Table, folder: Path) -> list[Path]:
    """Writes table.md, .csv, .tex, .json and paired.csv into `folder`, each whole or not at all; returns the paths."""
    writers = {"table.md": to_markdown, "table.csv": to_csv, "table.tex": to_latex, "table.json": to_json}
    writers["paired.csv"] = to_paired_csv
    return [_write(folder / name, writer(table)) for name, writer in writers.items()]


def to_markdown(table: Table) -> str:
    """Markdown with human names, the best of each column in bold, the paired differences, and how both were made."""
    return "\n".join(
        [
            f"# {table.title}",
            "",
            table.measure.caption,
            "",
            *_markdown_rows(_grid(table, bold="**{}**", error="{} ± {}")),
            "",
            *_paired_markdown(table),
            f"{table.setting}. Drawn by `{table.command}` at commit {table.commit or 'unknown'}, from runs trained at "
            f"{', '.join(at[:12] for at in table.trained_at) or 'none'}.",
            "",
        ]
    )


def to_latex(table: Table) -> str:
    """A booktabs tabular of the same cells as the Markdown."""
    grid = _grid(table, bold=r"\textbf{{{}}}", error=r"{} $\pm$ {}")
    header, *rows = (" & ".join(cells) + r" \\" for cells in grid)
    begin = rf"\begin{{tabular}}{{l{'r' * (len(grid[0]) - 1)}}}"
    return "\n".join([begin, r"\toprule", header, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", ""])


def to_csv(table: Table) -> str:
    """One line a scheme: id, name, finished seeds, then mean and standard error of each column in full precision."""
    records = []
    for row_id, row in table.rows.items():
        record: dict[str, Any] = {"scheme": row_id, "name": row.name, "seeds": row.finished}
        for column, mean, stderr in zip(table.columns, row.mean, row.stderr, strict=True):
            record |= {column: "missing" if mean is None else str(mean), f"{column}_stderr": stderr}
        records.append(record)
    return pd.DataFrame(records).to_csv(index=False)


def to_paired_csv(table: Table) -> str:
    """One line a scheme but the reference: of each column the mean difference, its standard error and its seeds."""
    records = []
    for row_id, paired in table.paired.items():
        record: dict[str, Any] = {"scheme": row_id, "name": table.rows[row_id].name, "reference": table.reference}
        for column, *numbers in zip(table.columns, paired.mean, paired.stderr, paired.seeds, strict=True):
            mean, stderr, seeds = numbers
            mean = "missing" if mean is None else str(mean)
            record |= {column: mean, f"{column}_stderr": stderr, f"{column}_seeds": seeds}
        records.append(record)
    return pd.DataFrame(records).to_csv(index=False)


def to_json(table: Table) -> str:
    """The table for programs. null: a missing run, the error of a single seed, a loss that is not finite.

    `paired` is {"reference": row id, "rows": {row id: {"mean": [...], "stderr": [...], "seeds": [how many]}}}.
    """
    rows = {}
    for row_id, row in table.rows.items():
        rows[row_id] = {"mean": row.mean, "stderr": row.stderr, "seeds": row.seeds, "published": row.published}
    whole = {"experiment": table.experiment, "columns": table.columns, "rows": rows}
    whole |= {"command": table.command, "commit": table.commit, "trained_at": list(table.trained_at)}
    whole["paired"] = {"reference": table.reference, "rows": {key: asdict(row) for key, row in table.paired.items()}}
    return json.dumps(_finite(whole), indent=1, allow_nan=False) + "\n"


def _grid(table: Table, bold: str, error: str) -> list[list[str]]:
    """The cells of header and rows, marked up."""
    with_published = any(row.published for row in table.rows.values())
    beside = table.columns if with_published else []
    header = ["", *table.columns, *(f"published {column} (ours minus it)" for column in beside)]
    columns = zip(*(row.mean for row in table.rows.values()), strict=True)
    bests = [_best(values, table.measure) for values in columns]
    grid = [header]
    for row in table.rows.values():
        partly = f" ({row.finished} of {len(row.seeds)} seeds)" if 0 < row.finished < len(row.seeds) else ""
        cells = [row.name + partly]
        for mean, stderr, best in zip(row.mean, row.stderr, bests, strict=True):
            cell = _cell(mean, stderr, error)
            cells.append(bold.format(cell) if cell.split()[0] == best else cell)
        if row.published:
            published = zip(row.published["mean"], row.published["stderr"], row.mean, strict=True)
            cells += [_beside(mean, stderr, ours, error) for mean, stderr, ours in published]
        grid.append(cells + [""] * (len(header) - len(cells)))
    return grid


def _markdown_rows(grid: Sequence[Sequence[str]]) -> list[str]:
    header, *rows = grid
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def _paired_markdown(table: Table) -> list[str]:
    """The second table, where there is anything to compare; says of how many seeds where it is not all of them."""
    if table.reference is None or not any(any(paired.seeds) for paired in table.paired.values()):
        return []
    grid = [["", *table.columns]]
    for row_id, paired in table.paired.items():
        fewer = 0 < max(paired.seeds) < len(table.rows[row_id].seeds)
        partly = f" ({max(paired.seeds)} of {len(table.rows[row_id].seeds)} seeds)" if fewer else ""
        cells = (_cell(*cell, "{} ± {}", number="{:+.3f}") for cell in zip(paired.mean, paired.stderr, strict=True))
        grid.append([table.rows[row_id].name + partly, *cells])
    of_what = f"{table.measure.name} minus that of {table.rows[table.reference].name} with the same seed"
    errors = any(error is not None for paired in table.paired.values() for error in paired.stderr)
    return [f"{of_what}{', mean ± standard error' if errors else ''}.", "", *_markdown_rows(grid), ""]


def _beside(published: float | None, stderr: float | None, ours: float | None, error: str) -> str:
    """A published figure, and how far ours is from it."""
    difference = "" if published is None or ours is None else f" ({ours - published:+.3f})"
    return _cell(published, stderr, error, absent="") + difference


def _cell(mean: float | None, stderr: float | None, error: str, absent: str = "missing", number: str = "{:.3f}") -> str:
    if mean is None:
        return absent
    if not math.isfinite(mean):
        return "diverged"
    return number.format(mean) if stderr is None else error.format(number.format(mean), f"{stderr:.3f}")


def _best(values: Iterable[float | None], measure: Measure) -> str:
    """The best value as it is shown, so that all that look best are marked."""
    return f"{measure.best((v for v in values if v is not None and math.isfinite(v)), default=math.nan):.3f}"


def _final_losses(run: Run, lengths: Sequence[int]) -> Numbers:
    if run.status != "finished":
        return [None] * len(lengths)
    metrics = read_metrics(run.record).set_index("step")
    keys = [f"val/loss_{length}" for length in run.lengths]
    if run.steps not in metrics.index or not set(keys) <= set(metrics.columns):
        raise ValueError(
            f"{run.record}/metrics.jsonl lacks the validation at step {run.steps}; delete that directory, and the run "
            "is trained again"
        )
    last = metrics.loc[run.steps]
    return [float(last[f"val/loss_{length}"]) if length in run.lengths else None for length in lengths]


def _reference(experiment: Experiment, rows: Mapping[str, Row], measure: Measure) -> str:
    """The experiment's own, else scale-invariant p-RoPE, else the best at the longest length."""
    chosen = experiment.reference or ("scale_invariant_p_rope" if "scale_invariant_p_rope" in rows else None)
    longest = {
        row_id: mean for row_id, row in rows.items() if (mean := row.mean[-1]) is not None and math.isfinite(mean)
    }
    return chosen or measure.best(longest or rows, key=lambda row_id: longest.get(row_id, 0.0))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _stderr(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def _setting(experiment: Experiment, runs: Sequence[Run]) -> str:
    def listed(values: Iterable[Any]) -> str:
        return " or ".join(map(str, sorted(set(values))))

    return (
        f"Model {listed(run.config['model']['name'] for run in runs)}, trained at "
        f"{listed(run.config['train']['length'] for run in runs)} tokens; {listed(run.steps for run in runs)} steps, "
        f"{listed(f'{run.tokens:,}' for run in runs)} tokens a run; seeds: {', '.join(map(str, experiment.seeds))}"
    )


@cache
def _published_tables() -> dict[str, Any]:
    return json.loads(PUBLISHED.read_text())


def _published(key: str | None, run: Run, lengths: Sequence[int]) -> dict[str, Numbers] | None:
    """The published figures of a run's scheme at our lengths, None where the paper has none."""
    if key is None:
        return None
    if key not in _published_tables():
        known = ", ".join(_published_tables())
        raise ValueError(f"experiment.published={key} is not in {PUBLISHED.name}; choose one of: {known}")
    source = _published_tables()[key]
    row = source["rows"].get(run.row)
    index = {_tokens(column): position for position, column in enumerate(source["columns"])}
    if row is None or not index.keys() & set(lengths):
        return None
    return {
        what: [row[what][index[length]] if row[what] and length in index else None for length in lengths]
        for what in ("mean", "stderr")
    }


def _tokens(column: str) -> int:
    """`val@16k` -> 16384."""
    return int(column.partition("@")[2].removesuffix("k")) * 1024


def _finite(node: Any) -> Any:
    """The same with None for each number that JSON has no word for."""
    if isinstance(node, dict):
        return {key: _finite(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_finite(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)
    return path
