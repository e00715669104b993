"""What is kept of a finished run: its config, its measurements and a thinned metrics.jsonl, small enough to commit.

Tables and figures can be made again from these alone, on another machine or when runs/ is gone. Checkpoints are not
kept, and nothing says where on a machine anything lay.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eval.experiment import Run
from eval.runs import load_config

MEASUREMENTS = ("eval.json", "needle.json", "attention.json", "environments.json")
TRAINING_LINES = 50  # of metrics.jsonl, beside those of the validations
# An absolute path, anywhere in a text; not the "/" of tokens/s, of a relative path or of an address.
ABSOLUTE_PATH = re.compile(r"(?<![\w./~])/(?:[^\s/,:;'\"\]})]+/)*([^\s/,:;'\"\]})]+)/?")


def keep(run: Run) -> Path | None:
    """Copies a finished run to its `kept_dir`, whole or not at all; returns that, None where nothing is to be kept.

    A run that is finished only because it was kept stays as it is. One that was trained again, with the same config,
    keeps the measurements that have not been made again.
    """
    if run.kept_dir is None or run.status != "finished" or run.record != run.run_dir:
        return None
    files = kept_files(run.run_dir)
    there = {path.name: path.read_text() for path in run.kept_dir.glob("*")}
    if there.get("config.yaml") == files["config.yaml"]:
        files = {name: there[name] for name in MEASUREMENTS if name in there} | files
    if files != there:
        _replace(run.kept_dir, files)
    return run.kept_dir


def kept_files(run_dir: Path) -> dict[str, str]:
    """The files that are kept of a run, by name: config.yaml, metrics.jsonl and what there is of MEASUREMENTS."""
    from training.log import read_metrics_lines  # here, because it loads torch

    lines = thinned(read_metrics_lines(run_dir / "metrics.jsonl"))
    files = {
        "config.yaml": OmegaConf.to_yaml(portable(OmegaConf.to_container(load_config(run_dir)))),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
    }
    for name in MEASUREMENTS:
        if (path := run_dir / name).exists():
            files[name] = json.dumps(portable(json.loads(path.read_text())), indent=2) + "\n"
    return files


def thinned(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of all validations, and about TRAINING_LINES others, evenly spaced, the last one included."""
    training = [number for number, line in enumerate(lines) if not any(key.startswith("val/") for key in line)]
    spacing = max(1, -(-len(training) // TRAINING_LINES))
    dropped = set(training) - set(training[::-1][::spacing])
    return [line for number, line in enumerate(lines) if number not in dropped]


def portable(node: Any) -> Any:
    """The same with the last name alone of each absolute path in its texts."""
    if isinstance(node, dict):
        return {key: portable(value) for key, value in node.items()}
    if isinstance(node, list):
        return [portable(value) for value in node]
    return ABSOLUTE_PATH.sub(r"\1", node) if isinstance(node, str) else node


def _replace(folder: Path, files: dict[str, str]) -> None:
    """Makes `folder` hold these files and nothing else. A kill leaves the old or none, never a part."""
    partial, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, text in files.items():
        (partial / name).write_text(text)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
