"""A run as it goes on a GPU: blocks compiled with inductor, in a process of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import metrics_of
from tests.tiny_run import ROOT, tiny_words, write_tiny_data


def losses(folder: Path, *more: str) -> dict[str, float]:
    """Every loss that a run logs, of training and validation, by step and name."""
    words = tiny_words(folder, "model.n_layer=2", "model.width=64", "train.steps=8", *more)
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        f"{line['step']} {key}": value for line in metrics_of(folder) for key, value in line.items() if "loss" in key
    }


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=[pytest.mark.slow, pytest.mark.compiler]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("position", ["rope", "logn_p_rope", "scale_invariant_p_rope", "infini_rope"])
def test_a_compiled_run_has_the_losses_of_an_eager_one_also_when_it_is_resumed(
    tmp_path: Path, position: str, device: str
):
    found = {}
    for compiled in ("true", "false"):
        folder = tmp_path / compiled
        write_tiny_data(folder / "data")
        words = [f"position={position}", f"device={device}", f"compile={compiled}"]
        found[compiled] = losses(folder, *words)
    assert found["true"] == pytest.approx(found["false"], rel=1e-4)
    shutil.rmtree(tmp_path / "true" / "run" / "checkpoints" / "step_000008")
    resumed = losses(tmp_path / "true", f"position={position}", f"device={device}", "compile=true")
    assert resumed == pytest.approx(found["true"], rel=1e-5)
    assert "steps 4 to 8" in (tmp_path / "true" / "run" / "log.txt").read_text()
