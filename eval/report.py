"""What a report knows of each run: its directory, read as far as it can be.

A file that is missing or broken becomes a line of the report, never the end of it, so every reader below checks what it
reads and raises ValueError (or what Python raises for a value of another type), and `ReportedRun.part` notes it.
"""

import base64
import glob
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import OmegaConf
from tqdm import tqdm

from eval.runs import load_config, read_metrics, run_status
from training.checkpoint_folder import checkpoint_step, list_checkpoints
from training.log import LOG, METRICS, read_metrics_lines
from training.run_config import CONFIG, FREE

# What makes no other setting of a run: with another of these it is another seed, or the same.
SEEDS = (*FREE, "seed", "needle.seed", "needle.parent")
LONGEST_TEXT = 20_000  # characters of a text file that the page takes in
# What writes each file that a run may lack.
WRITERS = {
    **dict.fromkeys((CONFIG, "metrics.jsonl", LOG), "train.py"),
    "eval.json": "scripts/evaluate.py",
    "needle.json": "scripts/needle.py",
    "attention.json": "scripts/attention.py",
}
# How Python says that a value in a file isn't what it should be.
BROKEN = (ValueError, OSError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Measured:
    """A mean over `count` (tokens or needles) at one length; the standard error where it is known."""

    mean: float
    count: int
    stderr: float | None = None


@dataclass(frozen=True)
class ByPosition:
    """Mean loss in nats per token of the positions from edges[k] up to edges[k + 1], None where there were none."""

    edges: list[int]
    mean: list[float | None]


@dataclass(frozen=True)
class Evaluation:
    """What eval.json says: losses by length, and by position where it has them; at a step, on the data of a folder."""

    step: int | None
    loss: dict[int, Measured]
    by_position: dict[int, ByPosition]
    data: str | None = None


@dataclass(frozen=True)
class Depth:
    """Share of the needles that were found of those that lay in a part of the haystack; None where none lay."""

    name: str
    mean: float | None


@dataclass(frozen=True)
class Needles:
    """What needle.json says: accuracy by length, and by length and depth where it has that."""

    tested: str
    accuracy: dict[int, Measured]
    by_depth: dict[int, list[Depth]]


@dataclass
class ReportedRun:
    """One run directory. `settings` is its config with dotted keys; what could not be read stays empty."""

    run_dir: Path
    name: str
    status: str = "not started"
    settings: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    metrics: pd.DataFrame = field(default_factory=lambda: pd.DataFrame({"step": []}))
    evaluation: Evaluation | None = None
    needles: Needles | None = None
    attention: str = ""
    pictures: dict[str, str] = field(default_factory=dict)  # data URIs by file name
    texts: dict[str, str] = field(default_factory=dict)  # by file name
    log: list[str] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)  # steps
    missing: list[str] = field(default_factory=list)  # names of files
    broken: list[str] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    @property
    def is_finetuned(self) -> bool:
        """Whether its losses are those of the answers of a task, which no loss of text compares with."""
        return any(key.startswith("needle.") for key in self.settings)

    @property
    def seed(self) -> str:
        """What tells it from the other runs of its setting: its seed, or that of its fine-tuning and of what."""
        return repr([self.settings.get(key) for key in ("seed", "needle.seed", "needle.parent.run_dir")])

    @property
    def step(self) -> int:
        """The last step that it has metrics of."""
        return int(self.column("step").max(initial=0))

    @property
    def last_step(self) -> int:
        """The step of its last checkpoint; of a run without any, such as a kept one, the last with metrics."""
        return max(self.checkpoints, default=self.step)

    @property
    def evaluated_data(self) -> str | None:
        """The folder of the data that eval.json is of: the run's own where it is that one or doesn't say."""
        own, data = self.settings.get("data.dir"), self.evaluation.data if self.evaluation else None
        if own is None or data is None:
            return data if own is None else str(own)
        return str(own) if _is_same_folder(str(own), data, kept=not self.checkpoints) else data

    @property
    def evaluated_elsewhere(self) -> str:
        """Where eval.json is not of the run's own data and last checkpoint, what it is of: "data/other, step 4"."""
        if self.evaluation is None:
            return ""
        own, data, step = self.settings.get("data.dir"), self.evaluated_data, self.evaluation.step
        parts = [str(data)] if own is not None and data != str(own) else []
        parts += [f"step {step:,}"] if step is not None and 0 < self.last_step != step else []
        return ", ".join(parts)

    @property
    def validation(self) -> dict[int, tuple[int, float]]:
        """The step and the loss in nats per token of the last validation, by length."""
        last = {}
        for key in self.metrics.columns:
            if key.startswith("val/loss_") and key.removeprefix("val/loss_").isdecimal():
                losses = self.column(key)
                if len(measured := np.flatnonzero(~np.isnan(losses))):
                    step = int(self.column("step")[measured[-1]])
                    last[int(key.removeprefix("val/loss_"))] = (step, float(losses[measured[-1]]))
        return last

    def column(self, key: str) -> np.ndarray:
        """A metric by row, nan where a step has none."""
        return self.metrics[key].to_numpy(dtype=float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Notes that a file is broken, and goes on without it."""
        try:
            yield
        except BROKEN as error:
            text = " ".join(str(error).split()) or type(error).__name__
            self.broken.append(f"{name}: {text}")


def find_run_dirs(patterns: Sequence[str]) -> list[Path]:
    """The run directories that names and patterns mean, each once, those of a pattern by name.

    Raises ValueError naming the word that means none.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        if glob.has_magic(pattern) and not Path(pattern).exists():
            matches = [Path(match) for match in sorted(glob.glob(pattern)) if Path(match).is_dir()]
        else:
            matches = [Path(pattern)] if Path(pattern).is_dir() else []
        if not matches:
            raise ValueError(f"run_dirs={pattern} is no folder; give run directories, such as 'run_dirs=[runs/NAME]'")
        found |= dict.fromkeys(matches)
    if not any((folder / CONFIG).is_file() for folder in found):
        listed = f"[{','.join(patterns)}]"
        raise ValueError(f"run_dirs={listed} holds no run with a {CONFIG}; give folders that train.py made")
    return list(found)


def read_runs(run_dirs: Iterable[Path], pictures: bool = True) -> list[ReportedRun]:
    """What the report shows of each folder; a run is called by its folder's name, or its path where two share that."""
    run_dirs = list(run_dirs)
    shown = tqdm(run_dirs, desc="reading", unit="run", disable=None)  # quiet unless stderr is a terminal
    names = [folder.resolve().name for folder in run_dirs]
    return [
        read_run(folder, name if names.count(name) == 1 else str(folder), pictures)
        for folder, name in zip(shown, names, strict=True)
    ]


def read_run(run_dir: Path, name: str, pictures: bool = True) -> ReportedRun:
    """Reads what there is in a run directory."""
    run = ReportedRun(run_dir, name)
    with run.part(CONFIG):
        if _is_there(run, CONFIG):
            run.config_text = (run_dir / CONFIG).read_text(errors="replace")
            run.settings = flatten(OmegaConf.to_container(load_config(run_dir)))
    with run.part("metrics.jsonl"):
        if _is_there(run, "metrics.jsonl"):
            run.metrics = read_metrics(run_dir).astype(float)
    with run.part("checkpoints"):
        run.checkpoints = [checkpoint_step(folder) for folder in list_checkpoints(run_dir)]
        if "train.steps" in run.settings:
            run.status = run_status(run_dir, run.settings["train.steps"])
            if run.status == "interrupted" and _was_kept(run):
                run.status = "finished"
    with run.part("eval.json"):
        if _is_there(run, "eval.json"):
            run.evaluation = parse_evaluation(json.loads((run_dir / "eval.json").read_text()))
    with run.part("needle.json"):
        if _is_there(run, "needle.json"):
            run.needles = parse_needles(json.loads((run_dir / "needle.json").read_text()), str(run_dir))
    _read_attention(run, pictures)
    _read_texts(run)
    return run


def parse_evaluation(document: Mapping[str, Any]) -> Evaluation:
    """Of eval.json. Raises what `BROKEN` lists for another document."""
    loss = {int(length): Measured(float(of["mean"]), int(of["tokens"])) for length, of in document["loss"].items()}
    by_position = {}
    for length, of in document.get("by_position", {}).items():
        edges, mean = [int(edge) for edge in of["edges"]], [_number(value) for value in of["mean"]]
        if len(edges) != len(mean) + 1 or edges != sorted(set(edges)):
            raise ValueError(f"by_position of {length} must have rising edges, one more than means")
        by_position[int(length)] = ByPosition(edges, mean)
    step, data = document.get("step"), document.get("data")
    return Evaluation(None if step is None else int(step), loss, by_position, None if data is None else str(data))


def parse_needles(document: Mapping[str, Any], run_dir: str) -> Needles:
    """Of needle.json. Raises what `BROKEN` lists for another document."""
    accuracy, by_depth = {}, {}
    for length, of in document["accuracy"].items():
        accuracy[int(length)] = Measured(float(of["mean"]), int(of["needles"]), _number(of.get("stderr")))
        by_depth[int(length)] = [
            Depth(f"{float(part['from']):.1f} to {float(part['to']):.1f}", _number(part["mean"]))
            for part in of.get("by_depth", [])
        ]
    if len({tuple(depth.name for depth in depths) for depths in by_depth.values()}) > 1:
        raise ValueError("by_depth must have the same parts at each length")
    return Needles(str(document.get("run_dir", run_dir)), accuracy, by_depth)


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"train": {"length": 256}} -> {"train.length": 256}."""
    if not isinstance(node, dict):
        return {prefix[:-1]: node}
    children = (flatten(child, f"{prefix}{name}.") for name, child in node.items())
    return {key: value for child in children for key, value in child.items()}


def differing_settings(runs: Sequence[ReportedRun], but: Sequence[str] = FREE) -> list[str]:
    """The keys of the configs that do not have the same value in all runs, but for some, which don't matter."""
    configured = [run.settings for run in runs if run.settings]
    keys = sorted({key for settings in configured for key in settings})
    return [
        key
        for key in keys
        if not any(key == free or key.startswith(f"{free}.") for free in but)
        and len({repr(settings.get(key)) for settings in configured}) > 1
    ]


def group_seeds(runs: Sequence[ReportedRun]) -> list[list[ReportedRun]]:
    """The runs whose configs differ in nothing but the seed (and what doesn't matter to the results), together."""
    keys = differing_settings(runs, SEEDS)
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        if run.settings:
            groups.setdefault(repr([run.settings.get(key) for key in keys]), []).append(run)
    return list(groups.values())


def copies_of_seeds(group: Sequence[ReportedRun]) -> dict[str, str]:
    """Of the runs of one setting those whose seed another one has, by name, and the one that stands for both.

    That is the first finished one of a seed, or the first one; a copy is no further sample of the setting's results.
    """
    chosen: dict[str, ReportedRun] = {}
    for run in sorted(group, key=lambda run: not run.is_finished):  # stable
        chosen.setdefault(run.seed, run)
    return {run.name: chosen[run.seed].name for run in group if chosen[run.seed] is not run}


def _is_there(run: ReportedRun, name: str) -> bool:
    found = (run.run_dir / name).exists()
    if not found:
        run.missing.append(name)
    return found


def _was_kept(run: ReportedRun) -> bool:
    """Whether the folder holds what was measured of a run to the end, and no checkpoints, as `eval.kept` leaves it.

    To a sweep that is an interrupted run, for it trains one again that lost its checkpoints; to a report it is done.
    """
    if run.metrics.empty or (run.run_dir / "checkpoints").exists():  # of broken metrics there are none
        return False
    validated = {f"val/loss_{length}" for length in run.settings.get("validation.lengths") or ["?"]}
    lines = read_metrics_lines(run.run_dir / METRICS)  # unlike a table, they tell a loss that is nan from none
    return any(line["step"] == run.settings["train.steps"] and validated <= line.keys() for line in lines)


def _is_same_folder(one: str, other: str, kept: bool) -> bool:
    """`kept` says that the names may be kept ones: of an absolute path `eval.kept` leaves the last name alone."""
    names = {Path(one).name, Path(other).name}
    return os.path.abspath(one) == os.path.abspath(other) or (kept and len(names) == 1 and bool(names & {one, other}))


def _read_attention(run: ReportedRun, pictures: bool) -> None:
    path = run.run_dir / "attention.json"
    with run.part(path.name):
        if _is_there(run, path.name):
            run.attention = _short(json.dumps(json.loads(path.read_text()), indent=1))
    for picture in sorted(run.run_dir.glob("attention*.png")) if pictures else []:
        with run.part(picture.name):
            content = picture.read_bytes()
            if not content.startswith(b"\x89PNG\r\n\x1a\n"):
                raise ValueError("not a PNG picture")
            run.pictures[picture.name] = f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _read_texts(run: ReportedRun) -> None:
    """Of log.txt the lines, of every other .txt (samples that someone kept there) the beginning."""
    with run.part(LOG):
        if _is_there(run, LOG):
            run.log = (run.run_dir / LOG).read_text(errors="replace").splitlines()
    for path in sorted(run.run_dir.glob("*.txt")):
        with run.part(path.name):
            if path.name != LOG:
                run.texts[path.name] = _short(path.read_text(errors="replace"))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + f"\n… ({len(text):,} characters in all)"


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
