"""Figure 1 of arXiv:2505.17083: how attention spreads as the context grows, in trained models and over IID scores.

Over IID scores S ~ N(0, 1) the logits are those of the same schemes as they start out: query scale and logits slot.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from eval.attention_figures import figure_1
from eval.attention_run import AttentionSettings, measure_run, range_name, read_current, read_kept
from eval.attention_statistics import attention_by_distance, distance_ranges, query_positions
from eval.entropy_growth import LOGITS_AT_ONCE, write_calculation
from eval.experiment import Experiment, Run
from eval.figures import save_figure
from eval.ranges import iid_logits, without_vectors
from eval.tables import row_name
from training.distributed import start_process

SETTINGS = {"length_factor": 1, "sequences": 1, "queries": 1, "pairs": 1, "draws": 2, "seed": 0}  # and their least
FIRST_RANGE = 10  # tokens; nearer ranges hold too few keys for their entropy to say much


def measure_attention(experiment: Experiment, runs: Sequence[Run], made_by: Mapping[str, Any]) -> list[Path]:
    """Measures each finished run that lacks it, writes data.csv, summary.json and the figure; returns the paths.

    A run that is not finished is named in summary.json and on the console, and the figure says how many seeds a scheme
    has. Raises ValueError, before any work, for a wrong key of experiment.measure_with.
    """
    settings = read_settings(experiment)
    contents = {run: measured(run, settings) for run in tqdm(runs, desc="runs", disable=None)}
    missing = [run.id for run, content in contents.items() if content is None]
    data = pd.DataFrame([*iid_rows(runs, settings), *trained_rows(contents)])
    of_runs = {str(run.run_dir): content["made_with"] for run, content in contents.items() if content}
    summary = {"experiment": experiment.name, **made_by, "settings": settings, "runs": of_runs, "missing": missing}
    paths = write_calculation(experiment.results, data, summary)
    train_lengths = sorted({run.config["train"]["length"] for run in runs})
    paths += save_figure(figure_1(data, scheme_names(contents), train_lengths), experiment.results / experiment.name)
    print(at_full_length(data).to_string(float_format="{:.3f}".format, na_rep="missing"))
    if missing:
        print(f"{len(missing)} of {len(runs)} runs are missing: {', '.join(missing)}")
    return paths


def read_settings(experiment: Experiment) -> dict[str, int]:
    """The checked keys of experiment.measure_with. Raises ValueError naming the first wrong one."""
    given = dict(experiment.measure_with)
    if wrong := sorted(set(SETTINGS) ^ set(given)):
        what = "has no" if wrong[0] in SETTINGS else "does not know the"
        raise ValueError(
            f"experiment.measure_with {what} key {wrong[0]}; the keys of measure=attention are {', '.join(SETTINGS)}"
        )
    for key, least in SETTINGS.items():
        if not isinstance(given[key], int) or given[key] < least:
            raise ValueError(f"experiment.measure_with.{key}={given[key]} must be a whole number, at least {least}")
    return given


def measured(run: Run, settings: Mapping[str, int]) -> dict[str, Any] | None:
    """A run's attention.json, made where it is missing or of other settings; None for a run that is not finished.

    Of a run that was kept without its checkpoint, only what was kept can be told, if it is of these settings.
    """
    if run.status != "finished":
        return None
    wanted = _wanted(run, settings)
    if run.record != run.run_dir:
        return read_kept(run.record, wanted)
    with start_process(run.config["device"], run.config["precision"]) as process:
        return read_current(run.run_dir, wanted, process) or measure_run(run.run_dir, wanted, process, progress=True)


def is_kept_without(run: Run, settings: Mapping[str, int]) -> bool:
    """Whether a run was kept without its checkpoint and without its attention at these settings."""
    return run.record != run.run_dir and read_kept(run.record, _wanted(run, settings)) is None


def _wanted(run: Run, settings: Mapping[str, int]) -> AttentionSettings:
    return AttentionSettings(
        length=_length(run, settings),
        sequences=settings["sequences"],
        queries=settings["queries"],
        pairs=settings["pairs"],
        seed=settings["seed"],
    )


def trained_rows(contents: Mapping[Run, Mapping[str, Any] | None]) -> Iterator[dict[str, Any]]:
    """Mean and standard error over a scheme's seeds of the mean over all heads; one empty row where there is no run."""
    for scheme, runs in _by_scheme(contents).items():
        found = [content for run in runs if (content := contents[run])]
        if not found:
            yield {"source": "trained", "scheme": scheme, "quantity": "missing", "distances": "", "values": 0}
            continue
        statistics = {
            name: np.stack(
                [
                    np.mean(np.concatenate([np.array(layer[name], dtype=float) for layer in content["layers"]]), axis=0)
                    for content in found
                ]
            )
            for name in found[0]["layers"][0]
        }
        keys = [i + 1 for i in found[0]["queries"]]
        yield from _rows("trained", scheme, keys, statistics)


def iid_rows(runs: Sequence[Run], settings: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """The same over draws of IID scores for each head, at the same context sizes; every scheme has the same scores."""
    schemes = {run.row: run for run in runs}
    for name, run in tqdm(schemes.items(), desc="IID scores", disable=None):
        position = {slot: run.config["position"][slot] for slot in ("query_scale", "logits")}
        position["allow_two_temperatures"] = True  # the run was let through already
        heads, length = run.config["model"]["n_head"], _length(run, settings)
        scheme = without_vectors(position, heads)
        keys = [i + 1 for i in query_positions(length, settings["queries"])]
        by_keys = []
        for n in keys:
            generator = torch.Generator().manual_seed(1_000_000 * settings["seed"] + n)
            at_once = max(1, LOGITS_AT_ONCE // (n * heads))
            parts = [
                attention_by_distance(
                    iid_logits(scheme, 0, n, n, min(at_once, settings["draws"] - done), generator, heads),
                    distance_ranges(length),
                )
                for done in range(0, settings["draws"], at_once)
            ]
            by_keys.append({what: torch.cat([part[what] for part in parts]).numpy() for what in parts[0]})
        yield from _rows(
            "iid", name, keys, {what: np.stack([each[what] for each in by_keys], 1) for what in by_keys[0]}
        )


def at_full_length(data: pd.DataFrame) -> pd.DataFrame:
    """Means at the largest context size, a line for each scheme and a column for each quantity and range."""
    lines: dict[tuple[str, str], dict[str, float]] = {}
    for row in data.to_dict("records"):
        line = lines.setdefault((row["source"], row["scheme"]), {})
        if row["keys"] == data["keys"].max():
            line[f"{row['quantity']} {row['distances']}".strip()] = row["mean"]
    return pd.DataFrame.from_dict(lines, orient="index")


def scheme_names(contents: Mapping[Run, Mapping[str, Any] | None]) -> dict[str, str]:
    """What the legend says of each scheme; with the number of trained seeds where some are missing."""
    names = {}
    for scheme, runs in _by_scheme(contents).items():
        found = sum(contents[run] is not None for run in runs)
        names[scheme] = row_name(runs[0]) + ("" if found == len(runs) else f" (trained: {found} of {len(runs)} seeds)")
    return names


def _rows(
    source: str, scheme: str, keys: Sequence[int], statistics: Mapping[str, np.ndarray]
) -> Iterator[dict[str, Any]]:
    """Over the first axis of the statistics; of the ranges only those that lie in the context as a whole."""
    for quantity in ("entropy", "last_100"):
        for index, n in enumerate(keys):
            yield _row(source, scheme, quantity, "", n, statistics[quantity][:, index])
    for r, (start, stop) in enumerate(distance_ranges(keys[-1])):
        for index, n in enumerate(keys):
            if start >= FIRST_RANGE and stop <= n:
                values = statistics["range_entropy"][:, index, r]
                yield _row(source, scheme, "range_entropy", range_name(start, stop), n, values)


def _row(source: str, scheme: str, quantity: str, distances: str, keys: int, values: np.ndarray) -> dict[str, Any]:
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    row = {"source": source, "scheme": scheme, "quantity": quantity, "distances": distances, "keys": keys}
    return {**row, "mean": values.mean(), "stderr": error, "values": len(values)}


def _by_scheme(runs: Iterable[Run]) -> dict[str, list[Run]]:
    schemes: dict[str, list[Run]] = {}
    for run in runs:
        schemes.setdefault(run.row, []).append(run)
    return schemes


def _length(run: Run, settings: Mapping[str, int]) -> int:
    return settings["length_factor"] * run.config["train"]["length"]
