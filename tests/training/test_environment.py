"""On what, and with which code, something was run."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from training import environment
from training.environment import commit, describe_environment, record_environment


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of this repository's root, which is outside git at first."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    return tmp_path


def test_the_commit_is_none_outside_git(checkout: Path):
    assert commit() is None
    assert describe_environment(environment.environment(torch.device("cpu"))).endswith(", commit unknown")


def test_the_commit_is_dirty_with_changed_code_but_not_with_new_results(checkout: Path):
    git(checkout, "init", "-q")
    for name in ("code.py", "results/table.md"):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("a")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "results/table.md").write_text("b")
    (checkout / "new.py").write_text("b")
    assert commit() == head
    assert describe_environment(environment.environment(torch.device("cpu"))).endswith(f", commit {head[:12]}")
    (checkout / "code.py").write_text("b")
    assert commit() == f"{head}-dirty"
    assert describe_environment(environment.environment(torch.device("cpu"))).endswith(f", commit {head[:12]}-dirty")


def test_the_machine_is_described_with_what_figures_depend_on():
    line = describe_environment(environment.environment(torch.device("cpu")))
    assert f", {torch.get_num_threads()} threads of {torch.backends.cpu.get_cpu_capability()}, torch 2." in line


def test_every_start_of_a_run_is_recorded(tmp_path: Path):
    for step in (0, 6):
        record_environment(tmp_path, {"step": step, "commit": None})
    recorded = json.loads((tmp_path / "environments.json").read_text())
    assert recorded == [{"step": 0, "commit": None}, {"step": 6, "commit": None}]
    assert [path.name for path in tmp_path.iterdir()] == ["environments.json"]
