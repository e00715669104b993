"""Floating-point operations of a model, and what a card can do at most: their ratio is the utilisation."""

import torch

from model.gpt import GPT

# Dense bf16 products with fp32 sums, in TFLOP/s, from the vendors' data sheets. The first name that occurs in the
# card's own is taken, so the longer ones stand first.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H800": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.1,
    "L40": 181.1,
    "L4": 121.0,
    "RTX 6000 Ada": 364.2,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def flops_per_token(model: GPT, length: int, backward: bool = True) -> float:
    """Multiplications and additions of the matrix products for one token, causal attention counted as half of T x T.

    Forward 2 (P + L T C): P the parameters of the matrices (without the token embedding, which is a look-up), L layers,
    T length, C width; the backward pass is twice that. The model may live on any device, also on "meta".
    """
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - model.embedding.weight.numel()
    forward = 2 * (matrices + model.config.n_layer * length * model.config.width)
    return forward * (3 if backward else 1)


def peak_flops(device: torch.device) -> float | None:
    """The most bf16 FLOP/s that a device can do by its data sheet; None for a CPU and for a card that isn't listed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * tflops for card, tflops in PEAK_TFLOPS.items() if card in name), None)
