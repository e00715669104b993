"""The bench as a command: what it writes, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import main as bench_main
from tests.tiny_run import refusal, write_tiny_data

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


def test_the_documented_line_measures_a_model_of_configs_model(tmp_path: Path):
    out = tmp_path / "model.json"
    documented = ["model", "model=proxy", "lengths=[16]"]
    small = ["positions=[rope,infini_rope]", "batch=1", "repeats=1", "directions=[forward]"]
    done = bench(*documented, *small, "device=cpu", "peak_tflops=0.1", f"out={out}")
    assert done.returncode == 0, done.stderr
    rope, infini = json.loads(out.read_text())["rows"]
    assert (rope["name"], infini["name"]) == ("proxy rope forward T=16", "proxy infini_rope forward T=16")
    forward = 2 * (4 * 12 * 128**2 + 264 * 128 + 4 * 16 * 128)
    assert rope["utilisation"] == pytest.approx(rope["tokens_per_second"] * forward / 1e11)


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


def test_data_that_has_no_two_blocks_is_read_without_shuffling(tmp_path: Path):
    data, out = write_tiny_data(tmp_path / "data"), tmp_path / "data.json"
    done = bench("data", f"dir={data}", "tokens_per_step=1024", "lengths=[128]", "repeats=1", f"out={out}")
    assert done.returncode == 0, done.stderr
    assert [row["reader"] for row in json.loads(out.read_text())["rows"]] == ["plain", "loader"]


CASES = "cases=[{model:proxy,length:16,batch:2}]"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_training_step_is_measured_beside_transformers(dtype: str, tmp_path: Path):
    out = tmp_path / "train.json"
    done = bench("train", CASES, f"dtypes=[{dtype}]", "repeats=2", "threads=1", "device=cpu", f"out={out}")
    assert done.returncode == 0, done.stderr
    *rows, ours, torchs = json.loads(out.read_text())["rows"]
    assert [row["candidate"] for row in rows] == ["transformers", "rope", "scale_invariant_p_rope"]
    for row in rows:
        assert row["dtype"] == dtype
        assert row["tokens_per_second"] == pytest.approx(32 / row["seconds"])
        assert row["peak_bytes"] > 0
        assert row["memory_ratio"] == pytest.approx(row["peak_bytes"] / rows[0]["peak_bytes"])
    assert rows[0]["ratio"] == rows[1]["ratio_to_first"] == 1
    assert rows[0]["optimizer_share"] is None
    assert rows[0]["utilisation"] is None
    assert rows[1]["utilisation"] > 0  # of what this processor's products of large matrices do
    assert 0 < rows[1]["optimizer_share"] < 1.5  # the shortest of a few updates, over the median step
    assert "torch.optim.Muon" in torchs["name"]
    assert torchs["ratio"] == pytest.approx(torchs["seconds"] / ours["seconds"])


def test_a_training_step_is_measured_without_peers_against_the_first_scheme(tmp_path: Path):
    out = tmp_path / "train.json"
    words = ["peers=[]", "dtypes=[fp32]", "positions=[rope]", "repeats=1", "threads=1", "device=cpu", "peak_tflops=0.1"]
    done = bench("train", "cases=[{model:proxy,length:16,batch:2,micro_batch:1}]", *words, f"out={out}")
    assert done.returncode == 0, done.stderr
    row = json.loads(out.read_text())["rows"][0]
    assert (row["batch"], row["micro_batch"], row["compiled"]) == (2, 1, False)
    assert row["parameters"] == 854_016
    assert (row["ratio"], row["memory_ratio"]) == (1, 1)
    forward = 2 * (4 * 12 * 128**2 + 264 * 128 + 4 * 16 * 128)
    assert row["utilisation"] == pytest.approx(row["tokens_per_second"] * 3 * forward / 1e11)


@pytest.mark.gpu
def test_scale_invariant_attention_costs_at_most_a_quarter_more_than_rope_on_a_gpu(tmp_path: Path):
    out = tmp_path / "train.json"
    words = ["cases=[{model:162m,length:4096,batch:8}]", "peers=[]", "dtypes=[bf16]", "repeats=10", "device=cuda"]
    done = bench("train", *words, f"out={out}")
    assert done.returncode == 0, done.stderr
    rope, scale_invariant, *_ = json.loads(out.read_text())["rows"]
    assert scale_invariant["ratio_to_first"] <= 1.25
    assert rope["utilisation"] is None or rope["utilisation"] > 0.2  # None for a card that isn't listed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "tokens=1000"], "tokens=1000 must be more than tokens_per_step=524288"),
        (["data", "repeats=0"], "repeats=0 must be at least 1"),
        (["data", "dir=nowhere"], "error: dir=nowhere: no such folder"),
        (["data", "lengths=[4096,100]"], "lengths=[4096, 100]: 100 must divide tokens_per_step=524288; change one of"),
        (
            ["data", "dir=TINY", "lengths=[64]", "tokens_per_step=4096"],
            "tokens_per_step=4096 needs one token more than that, but",
        ),
        (["nonsense"], "kind=nonsense is unknown; choose one of: attention, data,"),
        (["train", "peers=[megatron]"], "'megatron' is unknown; use transformers, or peers=[]"),
        (["train", "positions=[]"], "positions=[] must hold at least one scheme"),
        (["train", "positions=[what]"], "position=what is unknown; choose one of: alibi,"),
        (["train", "dtypes=[fp8]"], "'fp8' is unknown; use fp32, bf16"),
        (["train", "cases=[]"], "cases=[] must hold at least one"),
        (["train", "cases=[{model:proxy,length:0,batch:1}]"], "cases[0].length=0 must be at least 1"),
        (["train", "cases=[{model:nope,length:4,batch:1}]"], "model=nope is unknown; choose one of: 162m"),
        (["train", "cases=[{model:proxy,length:4}]"], "cases[0].batch"),
        (
            ["train", "cases=[{model:proxy,length:4,batch:3,micro_batch:2}]"],
            "cases[0].micro_batch=2 must divide its batch=3",
        ),
        (["train", "compile=[maybe]"], "compile=['maybe'] must hold auto (on CUDA, as train.py does), true or false"),
        (["train", "repeats=0"], "repeats=0 must be at least 1"),
        (["attention", "backends=[sdpa,flash]"], "'flash' is unknown; use dense, sdpa"),
        (["attention", "positions=[what]"], "position=what is unknown; choose one of: alibi,"),
        (["attention", "dtype=fp8"], "dtype=fp8 is unknown; use fp32, bf16, fp16"),
        (["attention", "lengths=[64,0]"], "lengths=[64, 0] must be positive"),
        (["attention", "device=tpu"], "device=tpu is not here"),
        (["attention", "positions=[rope,infini_rope]"], "bench.py model positions=[rope,infini_rope]"),
        (["model", "model=what"], "model=what is unknown; choose one of: 162m,"),
        (["model", "positions=[rope,what]"], "position=what is unknown; choose one of: alibi,"),
        (["model", "positions=[alibi]"], "must hold reference=rope"),
        (["model", "dtype=fp16"], "dtype=fp16 is unknown for a model; use fp32 or bf16"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_writes_nothing(words: list[str], message: str, tmp_path: Path, capsys: Any):
    data = write_tiny_data(tmp_path / "data")  # 4,000 tokens
    out = tmp_path / "bench.json"
    assert message in refusal(bench_main, [*(word.replace("TINY", str(data)) for word in words), f"out={out}"], capsys)
    assert list(tmp_path.iterdir()) == [data]
