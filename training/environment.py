"""On what, and with which code, something was run or measured."""

import os
import platform
import re
import subprocess
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


def describe_environment(device: torch.device) -> str:
    """One line of all of it."""
    facts, (head, dirty, _) = machine(device), (commit() or "unknown").partition("-dirty")
    return (
        f"{facts['device']}, {facts['cores']} cores, {facts['threads']} threads of {facts['cpu_capability']}, "
        f"torch {facts['torch']}, Python {facts['python']}, commit {head[:12]}{dirty}"
    )
