"""What an experiment is: a list of training runs, one for each combination of its axes and seeds.

An experiment is a file of `configs/experiment/`; a `Run` is one command line of train.py with its fixed folder. A run
is never started over silently: its folder either holds the same configuration or the sweep refuses to begin.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from omegaconf import OmegaConf

from eval.runs import load_config, run_status

KEYS = {"name", "title", "base", "scales", "axes", "seeds", "fast", "runs_in"}
KEYS |= {"measure", "measure_with", "fast_needle", "reference", "same_runs"}
SCALE_KEYS = {"arguments", "prepare", "published", "needle", "prepare_needle"}


@dataclass(frozen=True)
class Experiment:
    """A named set of runs. `shared` are the arguments of all runs.

    `folder` is its place below results/, `runs_in` that of its runs below runs/: experiments may have runs in common.
    `same_runs` names the rows whose runs other experiments make under the name of another row.
    `measure` says what is measured of a trained run (`needle` are the arguments of scripts/needle.py for that,
    `measure_with` the settings of attention statistics), `reference` the row that the others are compared with.
    `kept_in` is where what was measured of its runs is kept, None for a trial (a run that is fast or has a name).
    """

    name: str
    title: str
    folder: str
    runs_in: str
    shared: tuple[str, ...]
    axes: Mapping[str, Sequence[Any]]
    seeds: tuple[int, ...]
    prepare: tuple[str, ...] = ()
    published: str | None = None
    measure: str = "loss"
    reference: str | None = None
    kept_in: Path | None = None
    needle: tuple[str, ...] = ()
    prepare_needle: tuple[str, ...] = ()
    measure_with: Mapping[str, Any] = field(default_factory=dict)
    same_runs: Mapping[str, str] = field(default_factory=dict)

    @property
    def results(self) -> Path:
        """Where its tables and figures go."""
        return Path("results", self.folder)


@dataclass(frozen=True, eq=False)
class Run:
    """One training run: `row` names its combination of axis values, `config` is what train.py will resolve.

    `kept_dir` is where `eval.kept` copies its config and measurements once it is finished.
    """

    script: ClassVar[str] = "train.py"

    row: str
    seed: int
    axes: Mapping[str, Any]
    overrides: tuple[str, ...]
    run_dir: Path
    config: Mapping[str, Any] = field(repr=False)
    kept_dir: Path | None = None

    @property
    def id(self) -> str:
        return self.run_dir.name

    @property
    def steps(self) -> int:
        return self.config["train"]["steps"]

    @property
    def tokens(self) -> int:
        """Training tokens of the whole run."""
        return self.steps * self.config["train"]["tokens_per_step"]

    @property
    def lengths(self) -> list[int]:
        """Validation lengths in tokens."""
        return list(self.config["validation"]["lengths"])

    @property
    def record(self) -> Path:
        """The folder that holds its config and measurements: `run_dir`, or without a run there what was kept of it."""
        kept = self.kept_dir
        if kept is None or not (kept / "config.yaml").is_file() or run_status(self.run_dir, self.steps) != "missing":
            return self.run_dir
        return kept

    @property
    def status(self) -> str:
        """`missing`, `interrupted` or `finished`, from what is on the disk; what is kept was finished."""
        return run_status(self.run_dir, self.steps) if self.record == self.run_dir else "finished"


def read_experiment(config: Mapping[str, Any]) -> Experiment:
    """The experiment that the keys `experiment`, `scale`, `fast`, `name` and `overrides` of a command select.

    Raises ValueError naming the key when the experiment has an unknown or missing key or not the scale asked for.
    """
    config = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(dict(config))))
    description = config["experiment"]
    label = f"experiment={description.get('name', '?')}"
    if "calculate" in description:
        raise ValueError(f"{label} has no runs, it only calculates; use it as: python scripts/reproduce.py {label}")
    if lacking := sorted({"name", "title", "base", "scales", "axes", "seeds"} - set(description)):
        raise ValueError(
            f"{label} has no key {lacking[0]}, so it is not a sweep; see configs/experiment/quickstart.yaml"
        )
    if unknown := sorted(set(description) - KEYS):
        raise ValueError(f"{label}: unknown key experiment.{unknown[0]}; the keys are {', '.join(sorted(KEYS))}")
    _check_types(description)
    for word in config["overrides"]:
        if word.lstrip("+").startswith("dry_run="):
            raise ValueError(f"overrides={word}: a sweep trains; plan=true says what it would train")
        if (key := word.lstrip("+").partition("=")[0]) in {*description["axes"], "seed", "run_dir"}:
            raise ValueError(
                f"overrides={word}: the sweep itself sets {key}; use experiment.axes, experiment.seeds or name"
            )
    check_name(config["name"])
    scale_name, scale = _chosen_scale(description["scales"], config["scale"], label)
    fast = list(description.get("fast") or []) if config["fast"] else []
    runs_in = description.get("runs_in") or description["name"]
    below = "" if scale_name == next(iter(description["scales"])) else scale_name  # the first has no folder of its own

    def folder(own: str) -> str:
        """Fast runs are never mixed with others."""
        return config["name"] or str(Path(below, f"{own}-fast" if config["fast"] else own))

    return Experiment(
        name=description["name"],
        title=description["title"],
        folder=folder(description["name"]),
        runs_in=folder(runs_in),
        shared=(*description["base"], *scale["arguments"], *fast, *config["overrides"]),
        axes={key: list(values) for key, values in description["axes"].items()},
        seeds=tuple(description["seeds"]),
        prepare=tuple(scale.get("prepare") or ()),
        published=scale.get("published"),
        measure=description.get("measure", "loss"),
        reference=description.get("reference"),
        kept_in=None if config["name"] or config["fast"] else Path("results", below, "runs", runs_in),
        needle=(*(scale.get("needle") or ()), *((description.get("fast_needle") or ()) if config["fast"] else ())),
        prepare_needle=tuple(scale.get("prepare_needle") or ()),
        measure_with=description.get("measure_with", {}),
        same_runs=description.get("same_runs", {}),
    )


def check_name(name: Any, key: str = "name") -> None:
    """Raises ValueError for a name that is no name of one folder; None is left to the command."""
    if name is not None and (not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name):
        raise ValueError(f"{key}={_word(name)} must be the name of one folder, such as {key}=trial")


def _check_types(description: Mapping[str, Any]) -> None:
    """Raises ValueError for the first key of an experiment that has a value of another type, or none."""
    if description["name"] is None:
        raise ValueError("experiment.name=null must be the name of one folder, such as experiment.name=trial")
    for key in ("name", "runs_in"):
        check_name(description.get(key), f"experiment.{key}")
    mappings = {key: description[key] for key in ("scales", "axes", "measure_with", "same_runs") if key in description}
    for key, value in mappings.items():
        _check_mapping(key, value)
    lists = {key: description[key] for key in ("seeds", "base", "fast", "fast_needle") if key in description}
    lists |= {f"axes.{axis}": values for axis, values in description["axes"].items()}
    for name, scale in description["scales"].items():
        _check_mapping(f"scales.{name}", scale)
        lists |= {f"scales.{name}.{key}": scale[key] for key in scale if key in SCALE_KEYS - {"published"}}
    for key, value in lists.items():
        _check_list(key, value)
    for key in ("scales", "axes", "seeds", *(f"axes.{axis}" for axis in description["axes"])):
        if not (mappings | lists)[key]:
            raise ValueError(f"experiment.{key} is empty; give at least one")


def _check_mapping(key: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(
            f"experiment.{key}={_word(value)} must be a mapping; leave it out to keep what the experiment's file says"
        )


def _check_list(key: str, value: Any) -> None:
    """An axis has any values, `seeds` whole numbers; all other lists are arguments of a script."""
    if not isinstance(value, list):
        example = [value] if value is not None else {"seeds": [0], "axes.position": ["rope"]}.get(key, [])
        raise ValueError(f"experiment.{key}={_word(value)} must be a list, such as experiment.{key}={_word(example)}")
    if key == "seeds" and (wrong := [seed for seed in value if type(seed) is not int]):
        raise ValueError(f"experiment.seeds={_word(value)}: {_word(wrong[0])} must be a whole number, such as 0")
    if key.partition(".")[0] not in ("seeds", "axes") and (wrong := [word for word in value if type(word) is not str]):
        raise ValueError(
            f"experiment.{key}={_word(value)}: {_word(wrong[0])} must be an argument, such as train.steps=9"
        )


def _chosen_scale(scales: Mapping[str, Any], wanted: str | None, label: str) -> tuple[str, Mapping[str, Any]]:
    """The scale asked for, by default the first one."""
    name = wanted or next(iter(scales))
    if name not in scales:
        raise ValueError(f"scale={name} is not defined for {label}; choose one of: {', '.join(scales)}")
    if "arguments" not in scales[name] or (set(scales[name]) - SCALE_KEYS):
        raise ValueError(
            f"{label}: experiment.scales.{name}={scales[name]} must have arguments, and may have "
            f"{', '.join(sorted(SCALE_KEYS - {'arguments'}))}"
        )
    return name, scales[name]


def expand(experiment: Experiment, compose: Callable[[list[str]], Mapping[str, Any]]) -> list[Run]:
    """Every run of an experiment: the product of the axes in their order, then of the seeds.

    `compose` turns arguments of train.py into its resolved config (plain values) and raises ValueError for wrong ones.
    Raises ValueError when two runs would share a folder, or the experiment's reference is no row of it.
    """
    runs = []
    for values in itertools.product(*experiment.axes.values()):
        axes = dict(zip(experiment.axes, values, strict=True))
        row = "-".join(_label(key, value) for key, value in axes.items())
        for seed in experiment.seeds:
            run_dir = Path("runs", experiment.runs_in, f"{experiment.same_runs.get(row, row)}-seed{seed}")
            overrides = [*experiment.shared, *(f"{key}={_word(value)}" for key, value in axes.items())]
            overrides += [f"seed={seed}", f"run_dir={_quoted(str(run_dir))}"]
            kept_dir = experiment.kept_in and experiment.kept_in / run_dir.name
            runs.append(Run(row, seed, axes, tuple(overrides), run_dir, compose(overrides), kept_dir))
    ids = [run.id for run in runs]
    if doubles := sorted({run_id for run_id in ids if ids.count(run_id) > 1}):
        raise ValueError(
            f"experiment={experiment.name} names the run {doubles[0]} twice; make its axes and seeds distinct"
        )
    rows = list(dict.fromkeys(run.row for run in runs))
    if experiment.reference is not None and experiment.reference not in rows:
        raise ValueError(
            f"experiment.reference={experiment.reference} is no row of experiment={experiment.name}; choose one of: "
            f"{', '.join(rows)}"
        )
    return runs


def select(runs: Sequence[Run], only: Iterable[Any]) -> list[Run]:
    """The runs whose id, row or axis value is in `only`, or all when it is empty. ValueError for an unknown one."""
    wanted = {str(word) for word in only}
    names = [{run.id, run.row, *map(str, run.axes.values())} for run in runs]
    if unknown := sorted(wanted - set().union(*names)):
        raise ValueError(f"only={unknown[0]} matches no run; the runs are {', '.join(run.id for run in runs)}")
    return [run for run, known in zip(runs, names, strict=True) if not wanted or known & wanted]


def refuse_changed(runs: Iterable[Run]) -> None:
    """Raises ValueError when the folder of a run, or what is kept of it, is of a configuration with other results."""
    started = [run for run in runs if run.status != "missing"]
    if not started:
        return
    from training.run_config import explicit, first_difference  # here, because it loads torch

    for run in started:
        started_with, wanted = load_config(run.record), explicit(OmegaConf.create(dict(run.config)))
        if run.record != run.run_dir:  # perhaps of another machine, where the data lie elsewhere
            started_with.data.dir, wanted.data.dir = (Path(each.data.dir).name for each in (started_with, wanted))
        if difference := first_difference(started_with, wanted):
            key, was, now = difference
            raise ValueError(
                f"{run.record} was made with {key}={_word(was)}, but would now be run with {key}={_word(now)}; "
                "choose another name=... or delete that directory"
            )


def _label(key: str, value: Any) -> str:
    """A config group's choice says what it is; a plain value needs its key in front."""
    text = "_".join(map(str, value if isinstance(value, list) else [value])).replace("/", "_")
    return f"{key.rsplit('.', 1)[-1]}_{text}" if "." in key else text


def _quoted(text: str) -> str:
    """In quotes where Hydra's grammar would read more than a plain word; a backslash escapes only before a quote."""
    if re.fullmatch(r"[\w./+-]+", text, re.ASCII):
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), text)
    return f"'{escaped}'"


def _word(value: Any) -> str:
    """A value as one writes it in a Hydra override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    return str(value)
