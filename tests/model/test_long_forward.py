"""The paper's longest sequence through the laptop's model, in a process of its own."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORWARD = """
import sys
from pathlib import Path
import torch
from configs.command import compose
from training.distributed import start_process
from training.state import build_model

config = compose("train", ["experiment=proxy", f"position={sys.argv[1]}"])
with start_process("cpu", "fp32") as process, torch.no_grad():
    model = build_model(config, process.device)
    tokens = torch.randint(config.model.vocab_size, (1, 65537))
    loss = model(tokens[:, :-1], tokens[:, 1:]).item()
status = Path("/proc/self/status").read_text()
print(loss, int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope", "scale_invariant_p_rope"])
def test_a_sequence_of_65536_tokens_stays_under_two_gigabytes(position: str):
    """All of the process is counted, the interpreter and torch included; a T x T matrix alone would be 17 GB."""
    command = [sys.executable, "-c", FORWARD, position]
    ran = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
    loss, peak = map(float, ran.stdout.split())
    assert loss == pytest.approx(math.log(264), rel=1e-5)  # the untrained output layer is zero
    assert peak < 2e9
