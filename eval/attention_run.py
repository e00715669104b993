"""attention.json of a run: its attention statistics on given text, and what they were made with."""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int64
from torch import Tensor

from data.loader import open_split
from eval.attention_statistics import Sampling, attention_statistics, check_softmax
from eval.generate import run_tokenizer
from eval.runs import find_checkpoint, load_config, load_run
from training.checkpoint import CHECKSUMS, WEIGHTS
from training.checkpoint_folder import checkpoint_step, read_json
from training.distributed import Process

FILE = "attention.json"


@dataclass(frozen=True)
class AttentionSettings:
    """What is measured: `sequences` of `length` tokens from the start of a text, and of each what `Sampling` says.

    The text is the run's validation split, that of the prepared folder `data_dir`, or the file `text`, encoded by
    `tokenizer` (by default that of the run's data). `step` is the checkpoint's, as in `load_run`.

    Raises ValueError for a value out of range, or both `text` and `data_dir`.
    """

    length: int
    sequences: int = 4
    queries: int = 64
    pairs: int = 20000
    seed: int = 0
    text: str | None = None
    tokenizer: str | None = None
    data_dir: str | None = None
    step: int | str | None = None

    def __post_init__(self) -> None:
        for key, least in {"length": 2, "sequences": 1, "queries": 1, "pairs": 1, "seed": 0}.items():
            if getattr(self, key) < least:
                raise ValueError(f"{key}={getattr(self, key)} must be at least {least}")
        if self.text is not None and self.data_dir is not None:
            raise ValueError(f"text={self.text} and data_dir={self.data_dir} are two texts; leave one of them out")
        if self.text is None and self.tokenizer is not None:
            raise ValueError(f"tokenizer={self.tokenizer} encodes text=FILE, which is not set; leave it out")


def measure_run(run_dir: Path, settings: AttentionSettings, process: Process, progress: bool = False) -> dict[str, Any]:
    """Writes attention.json into the run's folder, whole or not at all; returns its content.

    Raises FileNotFoundError without such a run, checkpoint or text; ValueError, before anything is computed, for a text
    that is too short and a run without softmax attention.
    """
    made_with = provenance(run_dir, settings, process)
    trained = load_config(run_dir)
    tokens = read_sequences(settings, trained)
    model, _ = load_run(run_dir, process.device, settings.step)
    check_softmax(model)
    sampling = Sampling(settings.queries, settings.pairs, settings.seed)
    result = {
        "position": trained.position.name,
        "train_length": trained.train.length,
        **attention_statistics(model, tokens, sampling, process, progress),
        "made_with": made_with,
    }
    result = _plain(result)
    partial = run_dir / f"{FILE}.partial"
    partial.write_text(json.dumps(result, allow_nan=False) + "\n")
    os.replace(partial, run_dir / FILE)
    return result


def read_current(run_dir: Path, settings: AttentionSettings, process: Process) -> dict[str, Any] | None:
    """attention.json of a run, if it is what `measure_run` would write now; None if it is missing, older or damaged."""
    try:
        content = json.loads((run_dir / FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return content if content.get("made_with") == provenance(run_dir, settings, process) else None


def read_kept(record: Path, settings: AttentionSettings) -> dict[str, Any] | None:
    """attention.json that was kept of a run without its checkpoint, if it is of these settings; else None."""
    try:
        content = json.loads((record / FILE).read_text())
    except FileNotFoundError:
        return None
    wanted = {"length": settings.length, "sequences": settings.sequences, "queries": settings.queries}
    wanted |= {"pairs": settings.pairs, "seed": settings.seed}
    return content if wanted.items() <= content["made_with"].items() else None


def provenance(run_dir: Path, settings: AttentionSettings, process: Process) -> dict[str, Any]:
    """What the statistics depend on: the settings, the text, the weights and the precision."""
    checkpoint = find_checkpoint(run_dir, settings.step)
    sums = read_json(checkpoint / CHECKSUMS, (WEIGHTS,)) or {WEIGHTS: None}
    return {
        **asdict(settings),
        "data_dir": None if settings.text is not None else settings.data_dir or load_config(run_dir).data.dir,
        "step": checkpoint_step(checkpoint),
        "weights_sha256": sums[WEIGHTS],
        "precision": process.precision,
    }


def read_sequences(settings: AttentionSettings, trained: Any) -> Int64[Tensor, "rows T"]:
    """The first tokens of the text, cut into rows. Raises ValueError when it has too few."""
    needed = settings.sequences * settings.length
    if settings.text is not None:
        tokenizer = run_tokenizer(trained, settings.tokenizer)
        ids = tokenizer.encode(Path(settings.text).read_text(encoding="utf-8", errors="replace"))
        tokens = np.concatenate([[tokenizer.end_of_text], ids]).astype(np.int64)  # as every document of a split starts
        source, available = f"text={settings.text}", len(tokens)
    else:
        folder = settings.data_dir or trained.data.dir
        key = "data_dir" if settings.data_dir else "data.dir"
        stream = open_split(folder, "val", trained.model.vocab_size, key=key)
        source, available = f"the validation split in {folder}", len(stream)
        tokens = stream.read(0, min(needed, available))
    if available < needed:
        remedy = (
            f"use length={available} or less" if settings.sequences == 1 else "use fewer of them, or a lower length"
        )
        raise ValueError(
            f"sequences={settings.sequences} of length={settings.length} need {needed} tokens, but {source} has "
            f"{available}; {remedy}"
        )
    return torch.from_numpy(tokens[:needed]).view(settings.sequences, settings.length)


def last_query_table(content: dict[str, Any]) -> pd.DataFrame:
    """What the last query of a sequence attends to, one row a layer, the mean over its heads."""
    keys = content["queries"][-1] + 1
    names = [range_name(start, min(stop, keys)) for start, stop in content["ranges"]]
    rows = []
    for index, layer in enumerate(content["layers"]):
        of_last = {name: np.array(value, dtype=float)[:, -1].mean(0) for name, value in layer.items()}
        shares = dict(zip(names, of_last["range_mass"], strict=True))
        rows.append({"layer": index, "entropy": of_last["entropy"], "last 100": of_last["last_100"], **shares})
    return pd.DataFrame(rows)


def range_name(start: int, stop: int) -> str:
    """Of distances in tokens: 0, 1-9, 10-99, ..."""
    return f"{start:,}" if stop == start + 1 else f"{start:,}-{stop - 1:,}"


def _plain(node: Any) -> Any:
    """Six significant digits, and None for nan, for which JSON has no word."""
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    if isinstance(node, float):
        return float(f"{node:.6g}") if math.isfinite(node) else None
    return node
