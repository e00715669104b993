"""On what, and with which code, something was run or measured."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, IndexError):
        name = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)[0]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """The commit of the code, `-dirty` when a tracked file outside results/ differs from it; None outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the commit."""
    return {**machine(device), "commit": commit()}


def describe_environment(facts: Mapping[str, Any]) -> str:
    """One line of all of it."""
    head, dirty, _ = (facts["commit"] or "unknown").partition("-dirty")
    return (
        f"{facts['device']}, {facts['cores']} cores, {facts['threads']} threads of {facts['cpu_capability']}, "
        f"torch {facts['torch']}, Python {facts['python']}, commit {head[:12]}{dirty}"
    )


def record_environment(run_dir: Path, facts: Mapping[str, Any]) -> None:
    """Adds a start to those in a run's environments.json; whole or not at all."""
    path = run_dir / "environments.json"
    starts = json.loads(path.read_text()) if path.exists() else []
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps([*starts, facts], indent=2) + "\n")
    os.replace(partial, path)
