"""The bench as a command: what it writes, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["lengths=[20]", "head_dims=[4]", "n_head=2", "repeats=3", "device=cpu"]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/bench.py", *words]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)


def test_every_backend_has_a_row_for_every_scheme_that_it_serves(tmp_path: Path):
    out = tmp_path / "new" / "attention.json"
    words = ["positions=[rope,logn_rope,alibi]", "backends=[sdpa,blockwise,dense,flex]"]
    done = bench("attention", *SMALL, *words, f"out={out}")
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["machine"]["device"]
    assert result["machine"]["threads"] >= 1
    rows = result["rows"]
    combinations = [(row["position"], row["backend"]) for row in rows if row["direction"] == "forward"]
    served = [(name, backend) for name in ("rope", "logn_rope") for backend in ("sdpa", "blockwise", "dense")]
    # sdpa has no place for ALiBi, and flex none for a head dimension of 4
    assert combinations == [("plain sdpa", "sdpa"), *served, ("alibi", "blockwise"), ("alibi", "dense")]
    assert len(rows) == 2 * len(combinations)
    for row in rows:
        assert row["name"] in done.stdout
        assert row["seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(20 / row["seconds"])
        assert row["peak_bytes"] is None or row["peak_bytes"] >= 0
        assert (row["ratio_to_sdpa"] == 1) == (row["position"] == "plain sdpa")
        assert row["utilisation"] is None
    assert list(out.parent.iterdir()) == [out]


def test_every_scheme_has_a_row_against_the_reference_and_a_utilisation(tmp_path: Path):
    out = tmp_path / "model.json"
    words = ["positions=[rope,alibi]", "lengths=[40]", "batch=2", "repeats=3", "device=cpu", "peak_tflops=0.1"]
    done = bench("model", *words, f"out={out}")
    assert done.returncode == 0, done.stderr
    rows = {(row["position"], row["direction"]): row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == 4
    for (position, direction), row in rows.items():
        assert row["tokens_per_second"] == pytest.approx(80 / row["seconds"])
        assert (row["ratio"] == 1) == (position == "rope")
        # 4 layers of 12 width^2, the output layer, and causal attention of 40 tokens: multiply and add
        forward = 2 * (4 * 12 * 128**2 + 264 * 128 + 4 * 40 * 128)
        flops = forward * (1 if direction == "forward" else 3)
        assert row["utilisation"] == pytest.approx(row["tokens_per_second"] * flops / 1e11)


def test_each_reader_of_the_data_has_a_row(tmp_path: Path):
    out = tmp_path / "data.json"
    done = bench("data", "tokens=200000", "tokens_per_step=16384", "lengths=[1024,8192]", "repeats=3", f"out={out}")
    assert done.returncode == 0, done.stderr
    rows = {(row["reader"], row["length"]): row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {(r, n) for r in ("plain", "loader", "loader shuffled") for n in (1024, 8192)}
    for (reader, _), row in rows.items():
        assert row["tokens"] == 12 * 16384
        assert row["tokens_per_second"] == pytest.approx(12 * 16384 / row["seconds"])
        assert (row["ratio"] == 1) == (reader == "plain")
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "tokens=1000"], "tokens=1000 must be more than tokens_per_step=524288"),
        (["data", "repeats=0"], "repeats=0 must be at least 1"),
        (["data", "dir=nowhere"], "data.dir=nowhere: no such folder"),
        (["nonsense"], "kind=nonsense is unknown; choose one of: attention, data,"),
        (["attention", "backends=[sdpa,flash]"], "'flash' is unknown; use dense, sdpa"),
        (["attention", "positions=[what]"], "position=what is unknown; choose one of: alibi,"),
        (["attention", "dtype=fp8"], "dtype=fp8 is unknown; use fp32, bf16, fp16"),
        (["attention", "lengths=[64,0]"], "lengths=[64, 0] must be positive"),
        (["attention", "device=tpu"], "device=tpu is not here"),
        (["model", "positions=[rope,what]"], "position=what is unknown; choose one of: alibi,"),
        (["model", "positions=[alibi]"], "must hold reference=rope"),
        (["model", "dtype=fp16"], "dtype=fp16 is unknown for a model; use fp32 or bf16"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_and_writes_nothing(words: list[str], message: str, tmp_path: Path):
    failed = bench(*words, f"out={tmp_path / 'bench.json'}")
    assert failed.returncode == 2
    assert message in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
