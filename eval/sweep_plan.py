"""What a sweep has yet to do: tokens, and hours by the speed that its runs reached so far or that a GPU should reach.

Hours count training and validation alike, by their floating-point operations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import OmegaConf

from eval.experiment import Run
from eval.runs import read_metrics
from eval.sweep import run_state, tokens_done
from model.gpt import GPT
from training.estimate import run_flops
from training.flops import flops_per_token, peak_flops
from training.state import build_model


@dataclass(frozen=True)
class Speed:
    """FLOP/s of a run, all its devices together: by row where the row was measured, else `default` (None: unknown)."""

    by_row: Mapping[str, float]
    default: float | None
    basis: str

    def of(self, run: Run) -> float | None:
        return self.by_row.get(run.row, self.default)


def check_buildable(runs: Sequence[Run]) -> None:
    """Raises ValueError, naming the run, when the model or position scheme of one can't be built as its config says.

    Builds what train.py would, but for the vocabulary and all layers but one, which decide nothing and take long.
    """
    seen = set()
    for run in runs:
        config: Any = OmegaConf.create(dict(run.config))
        config.model.vocab_size = config.model.n_layer = 1
        config.seed, config.run_dir = 0, ""
        if (key := OmegaConf.to_yaml(config)) in seen:
            continue
        seen.add(key)
        try:
            build_model(config)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{run.id}: {error}") from error


def plan_table(runs: Sequence[Run], speed: Speed, jobs: Mapping[Run, object]) -> pd.DataFrame:
    """One row a run: its state, its tokens, those still to train on, and the hours that they should take."""
    rows = []
    for run in runs:
        left = run.tokens - tokens_done(run)
        flops, rate = sum(run_flops(_config(run), _sizes(run))) * left / run.tokens, speed.of(run)
        hours = 0.0 if not left else flops / rate / 3600 if rate else None
        rows.append({"run": run.id, "status": run_state(run, jobs), "tokens": run.tokens, "left": left, "hours": hours})
    return pd.DataFrame(rows).astype({"hours": float})


def describe_plan(table: pd.DataFrame, speed: Speed, devices: int, at_once: int | None) -> str:
    """The table, and below it its sums and what the hours rest on; `at_once` runs go side by side (None: unknown)."""
    shown = table.assign(tokens=table["tokens"].map("{:,}".format), left=table["left"].map("{:,}".format))
    lines = [shown.to_string(index=False, na_rep="-", float_format="{:.2f}".format), ""]
    left, hours = list(table["left"]), list(table["hours"])
    unfinished = sum(tokens > 0 for tokens in left)
    lines.append(f"{len(left)} runs, {unfinished} to train; {sum(table['tokens']):,} tokens, {sum(left):,} left")
    if any(map(math.isnan, hours)):
        return "\n".join([*lines, f"hours: unknown, {speed.basis}"])
    total = f"{sum(hours):.2f} hours of one run after the other ({sum(hours) * devices:.2f} of a device)"
    if at_once and unfinished:
        side = min(at_once, unfinished)
        total += f", about {max(sum(hours) / side, *hours):.2f} with {side} at a time"
    return "\n".join([*lines, f"{total}; {speed.basis}"])


def expected_speed(runs: Sequence[Run], devices: int, on_gpus: bool) -> Speed:
    """The speed that runs of the sweep measured; before there are any, what GPUs should reach.

    Args:
        devices: of a run. on_gpus: whether the sweep will run on GPUs.
    """
    measured: dict[str, list[float]] = {}
    for run in runs:
        metrics = read_metrics(run.run_dir)
        if "train/tokens_per_second" in metrics:
            per_token = flops_per_token(_sizes(run), run.config["train"]["length"])
            rate = float(np.nanmedian(metrics["train/tokens_per_second"].to_numpy(float)))
            measured.setdefault(run.row, []).append(rate * per_token)
    if measured:
        by_row = {row: fmean(rates) for row, rates in measured.items()}
        count = sum(map(len, measured.values()))
        return Speed(by_row, fmean(by_row.values()), f"at the tokens/s that {count} of these runs measured")
    if not on_gpus:
        return Speed({}, None, "on a CPU they are estimated once a run has measured its tokens/s")
    estimate = runs[0].config["estimate"]
    card = peak_flops(torch.device("cuda")) if torch.cuda.is_available() else None
    peak = card or 1e12 * estimate["peak_tflops"]
    return Speed(
        {},
        devices * estimate["utilisation"] * peak,
        f"at {estimate['utilisation']:.0%} of {peak / 1e12:g} TFLOP/s on each of {devices} GPUs"
        + ("" if card else " (estimate.utilisation, estimate.peak_tflops)"),
    )


def _config(run: Run) -> Any:
    return OmegaConf.create(dict(run.config))


_models: dict[str, GPT] = {}


def _sizes(run: Run) -> GPT:
    """A model of the run's sizes without memory, and without its position scheme, whose parameters hardly count."""
    config = _config(run)
    config.position, config.attention = {"name": "none"}, "auto"
    key = OmegaConf.to_yaml(config.model)
    if key not in _models:
        with torch.device("meta"):
            _models[key] = build_model(config, "meta")
    return _models[key]
