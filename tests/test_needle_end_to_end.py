"""Table 2 for real, small: prepare, train, fine-tune, test, tables and figures; then again, with nothing left to do."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_run import ROOT

TINY = ["model.n_layer=1", "model.width=32", "train.length=32", "train.tokens_per_step=256", "validation.lengths=[32]"]
COMMAND = [
    *(sys.executable, "scripts/reproduce.py", "experiment=table2", "scale=proxy", "fast=true", "only=[rope,alibi]"),
    *("experiment.seeds=[0]", f"overrides=[{','.join(json.dumps(word) for word in TINY)}]"),
]


@pytest.mark.slow
def test_table_2_is_fine_tuned_tested_and_written_and_then_left_as_it_is(tmp_path: Path) -> None:
    for part in ("configs", "data", "eval", "model", "scripts", "training"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("shards", "__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path)
    first = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert "rope-seed0-needle-seed0: finished" in first.stderr
    runs, results = (tmp_path / kind / "proxy" for kind in ("runs", "results"))
    rows = json.loads((results / "table2-fast" / "table.json").read_text())["rows"]
    for row in ("rope", "alibi"):
        tested = json.loads((runs / "4k-fast" / f"{row}-seed0-needle-seed0" / "needle.json").read_text())
        assert rows[row]["mean"] == [entry["mean"] for entry in tested["accuracy"].values()]
        assert tested["finetuned_from"] == f"runs/proxy/4k-fast/{row}-seed0"
    assert rows["nope"]["mean"] == [None, None, None]
    assert (results / "table2-fast" / "accuracy_by_depth.png").stat().st_size > 10_000

    second = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "starts" not in second.stderr
    assert "resumes" not in second.stderr
