"""Tables of what runs measured: one row a scheme, one column an evaluation length, mean and standard error.

A run that did not finish is shown as missing, never dropped, and a published figure stands beside ours where the
experiment names its source in `published.json`.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.experiment import Experiment, Run
from eval.runs import read_metrics

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
        return [float(np.mean(values)) if values else None for values in self._columns()]

    @property
    def stderr(self) -> Numbers:
        """Sample standard deviation / sqrt(number of seeds) of each column; None with fewer than two seeds."""
        return [
            float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
            for values in self._columns()
        ]

    @property
    def finished(self) -> int:
        """How many seeds have a value."""
        return sum(any(value is not None for value in seed) for seed in self.seeds)

    def _columns(self) -> list[list[float]]:
        return [[value for value in column if value is not None] for column in zip(*self.seeds, strict=True)]


@dataclass(frozen=True)
class Measure:
    """What the numbers of a table are: `caption` says it in a sentence, `column` is short for it, `best` min or max."""

    column: str
    caption: str
    best: Callable[..., float]


LOSS = Measure("val", "Validation loss in nats per token, by evaluation length in tokens.", min)


@dataclass(frozen=True)
class Table:
    """What an experiment found. `lengths` are the columns, in tokens; `setting`, `command`, `commit` say how."""

    experiment: str
    title: str
    lengths: list[int]
    train_lengths: list[int]
    rows: Mapping[str, Row]
    setting: str
    command: str
    commit: str | None
    measure: Measure = LOSS

    @property
    def columns(self) -> list[str]:
        return [f"{self.measure.column}@{length}" for length in self.lengths]


def row_name(run: Run) -> str:
    """The name of a run's row as people write it: `Scale-invariant p-RoPE`, then the other axes as `tau = 1`."""
    table1 = _published_tables()["table1_val_loss_162m_train4k"]["rows"]
    schemes = {scheme: row["name"] for scheme, row in table1.items()} | NAMES_BEYOND_TABLE_1
    parts = []
    for key, value in run.axes.items():
        parts.append(schemes.get(value, str(value)) if key == "position" else f"{key.rsplit('.', 1)[-1]} = {value}")
    return ", ".join(parts)


def history(runs: Iterable[Run]) -> pd.DataFrame:
    """Finite validation losses over training, of unfinished runs too: columns row, seed, step, length, loss (nats)."""
    frames = [pd.DataFrame(columns=["row", "seed", "step", "length", "loss"])]
    for run in runs:
        if not (run.run_dir / "metrics.jsonl").exists():
            continue
        metrics = read_metrics(run.run_dir)
        for length in run.lengths:
            if (key := f"val/loss_{length}") in metrics:
                frame = pd.DataFrame({"step": metrics["step"], "length": length, "loss": metrics[key]})
                frames.append(frame[np.isfinite(frame["loss"])].assign(row=run.row, seed=run.seed))
    return pd.concat(frames if len(frames) == 1 else frames[1:], ignore_index=True)


def collect(experiment: Experiment, runs: Sequence[Run], command: str, commit: str | None = None) -> Table:
    """The table of an experiment from its run folders: the validation after the last step of every finished run."""
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
        measure=measure,
    )


def write_table(table: Table, folder: Path) -> list[Path]:
    """Writes table.md, .csv, .tex and .json into `folder`, each whole or not at all; returns the paths."""
    writers = {"md": to_markdown, "csv": to_csv, "tex": to_latex, "json": to_json}
    return [_write(folder / f"table.{kind}", writer(table)) for kind, writer in writers.items()]


def to_markdown(table: Table) -> str:
    """Markdown with human names, the best of each column in bold, and a note on how the table was made."""
    header, *rows = _grid(table, bold="**{}**", error="{} ± {}")
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(
        [
            f"# {table.title}",
            "",
            table.measure.caption,
            "",
            *(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)),
            "",
            f"{table.setting}. Made by `{table.command}` at commit {table.commit or 'unknown'}.",
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


def to_json(table: Table) -> str:
    """The table for programs. null: a missing run, the error of a single seed, a loss that is not finite."""
    rows = {}
    for row_id, row in table.rows.items():
        rows[row_id] = {"mean": row.mean, "stderr": row.stderr, "seeds": row.seeds, "published": row.published}
    whole = {"experiment": table.experiment, "columns": table.columns, "rows": rows}
    whole |= {"command": table.command, "commit": table.commit}
    return json.dumps(_finite(whole), indent=1, allow_nan=False) + "\n"


def _grid(table: Table, bold: str, error: str) -> list[list[str]]:
    """The cells of header and rows, marked up."""
    with_published = any(row.published for row in table.rows.values())
    beside = table.columns if with_published else []
    header = ["", *table.columns, *(f"published {column} (ours minus it)" for column in beside)]
    columns = zip(*(row.mean for row in table.rows.values()), strict=True)
    bests = [_best(values, table.measure.best) for values in columns]
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


def _beside(published: float | None, stderr: float | None, ours: float | None, error: str) -> str:
    """A published figure, and how far ours is from it."""
    difference = "" if published is None or ours is None else f" ({ours - published:+.3f})"
    return _cell(published, stderr, error, absent="") + difference


def _cell(mean: float | None, stderr: float | None, error: str, absent: str = "missing") -> str:
    if mean is None:
        return absent
    if not math.isfinite(mean):
        return "diverged"
    return f"{mean:.3f}" if stderr is None else error.format(f"{mean:.3f}", f"{stderr:.3f}")


def _best(values: Iterable[float | None], best: Callable[..., float]) -> str:
    """The best value as it is shown, so that all that look best are marked."""
    return f"{best((v for v in values if v is not None and math.isfinite(v)), default=math.nan):.3f}"


def _final_losses(run: Run, lengths: Sequence[int]) -> Numbers:
    if run.status != "finished":
        return [None] * len(lengths)
    last = read_metrics(run.run_dir).set_index("step").loc[run.steps]
    return [float(last[f"val/loss_{length}"]) if length in run.lengths else None for length in lengths]


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
