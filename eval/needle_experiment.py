"""Table 2 (arXiv:2505.17083): the runs of an experiment, each fine-tuned on needles and tested, and their accuracies.

A `NeedleRun` is one command line of scripts/needle.py with its fixed folder, beside that of the run it starts from.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from eval.experiment import Experiment, Run
from eval.tables import Measure, Numbers, Table, row_name, tabulate

Accuracy = dict[str, dict[str, Any]]  # that of needle.json: {length: what `eval.needle.summarise` gives}

# The keys of needle.py's `train` that change its results.
TRAINING = ("length", "first_length", "first_fraction", "rows", "steps", "warmup_fraction", "cooldown_fraction")


@dataclass(frozen=True, eq=False)
class NeedleRun(Run):
    """The fine-tuned copy of `parent`; `config` is what scripts/needle.py will resolve."""

    script: ClassVar[str] = "scripts/needle.py"

    parent: Run = field(kw_only=True)

    @property
    def tokens(self) -> int:
        train = self.config["train"]
        return self.steps * train["rows"] * (train["length"] or self.parent.config["train"]["length"])

    @property
    def lengths(self) -> list[int]:
        """Tested lengths in tokens."""
        return list(self.config["lengths"])

    @property
    def status(self) -> str:
        """`missing`, `interrupted` or `finished`: fine-tuned, and tested on as many samples of each length as asked."""
        trained = super().status
        return "finished" if self.accuracy else "interrupted" if trained == "finished" else trained

    @property
    def can_start(self) -> bool:
        """Whether there are weights to start from; of a run that was only kept there are none."""
        return self.parent.status == "finished" and self.parent.record == self.parent.run_dir

    @property
    def accuracy(self) -> Accuracy:
        """What the test that the config asks for found, as it stands in the parent's needle.json; else empty.

        Whatever else needle.py does with the parent (another seed, other haystacks, no fine-tuning) goes into that
        file, too, and is no result of this copy.
        """
        path = self.parent.record / "needle.json"
        try:
            found = json.loads(path.read_text())
            accuracy, as_asked = found["accuracy"], self._made(found)
            samples = {int(length): entry["samples"] for length, entry in accuracy.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}); delete it, and the run is tested again"
            ) from error
        return accuracy if as_asked and samples == dict.fromkeys(self.lengths, self.config["samples"]) else {}

    def _made(self, found: Mapping[str, Any]) -> bool:
        """Whether the content of a needle.json is of this copy, fine-tuned and tested as its config says."""
        if found["finetuned_from"] is None:
            return False
        data = self.config["data_dir"] or self.parent.config["data"]["dir"]
        is_kept = self.parent.record != self.parent.run_dir  # perhaps of another machine, where the data lie elsewhere
        same_data = Path(found["data"]).name == Path(data).name
        if not is_kept:
            same_data = Path(found["data"]).resolve() == Path(data).resolve()
        names = [Path(found[key]).name for key in ("run_dir", "finetuned_from")]
        tested = found["task"], found["seed"], found["step"]
        # results from before these were recorded have nothing to compare
        started_at = found.get("finetuned_from_step", self.parent.steps)
        trained = self._training(found.get("train", self.config["train"]))
        return (
            same_data
            and names == [self.run_dir.name, self.parent.run_dir.name]
            and tested == (self.config["needle"], self.config["seed"], self.steps)
            and (started_at, trained) == (self.parent.steps, self._training(self.config["train"]))
        )

    def _training(self, train: Mapping[str, Any]) -> list[Any]:
        return [train["length"] or self.parent.config["train"]["length"], *(train[key] for key in TRAINING[1:])]


def needle_runs(
    experiment: Experiment, runs: Sequence[Run], compose: Callable[[list[str]], Mapping[str, Any]]
) -> list[NeedleRun]:
    """The fine-tuned copy of every run; `compose` turns arguments of scripts/needle.py into its resolved config.

    Raises ValueError where the experiment does not say how to fine-tune.
    """
    if not experiment.needle:
        raise ValueError(
            f"experiment={experiment.name} has measure=needle, but its scale has no key needle; add the arguments of "
            "scripts/needle.py, such as needle: [scale=proxy]"
        )
    copies = []
    for run in runs:
        out_dir = Path(f"{run.run_dir}-needle-seed{run.seed}")
        words = [*experiment.needle, f"run_dir={run.run_dir}", f"out_dir={out_dir}", f"seed={run.seed}"]
        copies.append(NeedleRun(run.row, run.seed, run.axes, tuple(words), out_dir, compose(words), parent=run))
    return copies


def collect_needles(experiment: Experiment, runs: Sequence[NeedleRun], command: str, commit: str | None) -> Table:
    """The table of the accuracies of what is fine-tuned and tested."""

    def read(run: Run, lengths: Sequence[int]) -> Numbers:
        accuracy = copies[run].accuracy
        return [accuracy[str(length)]["mean"] if accuracy else None for length in lengths]

    copies = {run.parent: run for run in runs}
    measure = Measure("Accuracy", "acc", _caption(runs[0]), max)
    return tabulate(experiment, list(copies), runs[0].lengths, read, measure, command, commit)


def by_scheme(runs: Sequence[NeedleRun]) -> dict[str, Accuracy]:
    """The accuracies of each row's tested runs, by length and depth, as the mean over its seeds."""
    rows: dict[str, list[Accuracy]] = {}
    for run in runs:
        if accuracy := run.accuracy:
            rows.setdefault(row_name(run), []).append(accuracy)
    return {name: {key: _mean([seed[key] for seed in seeds]) for key in seeds[0]} for name, seeds in rows.items()}


def _mean(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    depths = []
    for parts in zip(*(entry["by_depth"] for entry in entries), strict=True):
        found = [part["mean"] for part in parts if part["needles"]]
        depths.append({**parts[0], "mean": float(np.mean(found)) if found else None})
    return {"mean": float(np.mean([entry["mean"] for entry in entries])), "by_depth": depths}


def _caption(run: NeedleRun) -> str:
    train, needle = run.config["train"], run.config["needle"]
    return (
        "Share of needles whose city and number are both right in the model's own answer, by length in tokens: "
        f"{needle['needles']} of {needle['digits']} digits in each of {run.config['samples']} samples, after "
        f"fine-tuning on answers alone ({train['steps']} steps, {run.tokens:,} tokens)."
    )
