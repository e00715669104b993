"""The estimate of a run against what a run takes, and the dry run as a command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import train
from configs.command import compose
from tests.tiny_run import ROOT, refusal, run
from training.estimate import estimate_memory
from training.state import build_model

# Two steps in a process of its own, after two steps of a tiny model that load what torch loads late. glibc maps each
# large block by itself here (see the environment below), so that the resident memory is what is in use.
MEASURE = """
import sys
import torch
from configs.command import compose
from eval.timing import resident_bytes
from training.distributed import Process
from training.state import build_state
from training.step import train_step, wrap

torch.set_num_threads(1)
process = Process(rank=0, world_size=1, device=torch.device("cpu"), precision="fp32")

def steps(config, rows):
    state = build_state(config)
    tokens = torch.randint(config.model.vocab_size, (rows, config.train.length))
    for _ in range(2):
        train_step(state, wrap(state.model, process), tokens, tokens, rows, 1.0, process)

steps(compose("train", [*sys.argv[1:], "train.length=64"]), 1)
before = resident_bytes()
steps(compose("train", sys.argv[1:]), 32)
print(resident_bytes("VmHWM") - before)
"""


def measured_peak(words: list[str]) -> int:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *words],
        cwd=ROOT,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**18), "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("position", ["nope", "rope", "scale_invariant_p_rope"])
def test_the_estimated_memory_of_the_proxy_is_within_a_tenth_of_the_measured_peak(position: str, checkpointing: bool):
    words = ["experiment=proxy", f"position={position}", f"train.activation_checkpointing={checkpointing}"]
    config = compose("train", words)
    estimate = estimate_memory(config, build_model(config), "cpu", "fp32")
    assert estimate.peak == pytest.approx(measured_peak(words), rel=0.1)


def test_162m_at_65536_tokens_fits_one_80_gb_device():
    for more in ([], ["train.activation_checkpointing=true"]):
        config = compose("train", ["experiment=162m_64k", *more])
        memory = estimate_memory(config, build_model(config), "cuda", "bf16")
        assert memory.peak < 40e9
        assert memory.logits < 1e9  # a chunk, not the 13 GB of all


def test_parts_follow_from_the_sizes():
    config = compose("train", ["experiment=162m_4k"])
    model = build_model(config)
    alone, shared = (estimate_memory(config, model, "cuda", "bf16", devices) for devices in (1, 8))
    assert alone.weights == alone.gradients == 4 * 162_201_600
    assert alone.optimizer_states == 4 * (84_934_656 + 2 * 2 * 50304 * 768)
    assert shared.optimizer_states == 4 * (84_934_656 // 8 + 2 * 2 * 50304 * 768)  # Muon's momentum is shared out
    assert shared.activations == alone.activations  # as many tokens in a forward pass


def test_the_dry_run_prints_everything_and_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["experiment=304m_4k", "dry_run=true", "estimate.devices=4", "device=cuda", f"run_dir={tmp_path / 'run'}"]
    assert run(train.main, [*words, "train.micro_batch_tokens=114688", "data.dir=nowhere"]) == 0
    said = capsys.readouterr().out
    for part in ("304,349,184", "10,900 of 917,504 tokens", "10,000,793,600"):
        assert part in said
    assert "4, each 56 sequences a step: 2 forward passes of 28" in said  # the paper's accumulation
    assert "memory of a cuda device in bf16" in said
    assert not list(tmp_path.iterdir())


def test_the_dry_run_counts_the_processes_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert run(train.main, ["experiment=proxy", "dry_run=true"]) == 0
    said = capsys.readouterr().out
    assert "8, each 4 sequences a step: 1 forward passes of 4" in said
    assert "memory of a cpu device in " in said
    assert "memory of a cuda device in bf16" in said


def test_hours_follow_from_the_flops_and_the_utilisation(capsys: pytest.CaptureFixture[str]):
    words = ["experiment=proxy", "dry_run=true", "estimate.peak_tflops=0.001", "validation.lengths=[256]"]
    assert run(train.main, [*words, "estimate.utilisation=0.5"]) == 0
    said = capsys.readouterr().out
    # 4 layers of 12 width^2, the output layer, causal attention; 3 passes of 2 operations; then validation forwards
    forward = 2 * (4 * 12 * 128**2 + 264 * 128 + 4 * 256 * 128)
    flops = 400 * 8192 * 3 * forward + 9 * 131_072 * forward
    assert f"{flops / 5e8 / 3600:.2f} at 50% of 0.001 TFLOP/s" in said


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("estimate.devices=3", "train.tokens_per_step=8192 is not a multiple of train.length=256 times 3 devices"),
        ("estimate.devices=-1", "estimate.devices=-1 must be at least 1"),
        ("estimate.utilisation=40", "estimate.utilisation=40"),
        ("estimate.peak_tflops=0", "estimate.peak_tflops=0"),
        ("device=tpu", "device=tpu is unknown"),
    ],
)
def test_a_mistake_in_a_dry_run_is_one_line(word: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert message in refusal(train.main, ["experiment=proxy", "dry_run=true", word], capsys)
