from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from model.gpt import GPT, GPTConfig
from training.flops import flops_per_token, peak_flops

CUDA = torch.device("cuda")


@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_that_torch_counts_but_for_the_masked_half_of_attention(
    small_gpt: Callable[..., GPT], backward: bool
):
    model = small_gpt(attention="dense", n_layer=3)
    tokens = torch.randint(0, 31, (2, 48))
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        # from the logits: torch does not count the products that our own cross-entropy makes in place
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        if backward:
            loss.backward()
    masked = (3 if backward else 1) * 2 * 3 * 48 * 32  # 2 L T C
    assert counter.get_total_flops() / tokens.numel() == flops_per_token(model, 48, backward) + masked


def test_flops_of_the_papers_model_are_known_without_its_memory():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert flops_per_token(model, 4096) == 6 * (84_934_656 + 50304 * 768 + 12 * 4096 * 768)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_the_peak_of_a_known_card_is_its_data_sheets(monkeypatch: pytest.MonkeyPatch, name: str, tflops: float):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(CUDA) == 1e12 * tflops


def test_an_unknown_card_and_a_cpu_have_no_known_peak(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Voodoo 2")
    assert peak_flops(CUDA) is None
    assert peak_flops(torch.device("cpu")) is None
