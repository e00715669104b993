"""What a device is fast at."""

import torch


def fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices faster than fp32 ones (elsewhere it emulates them, slowly)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return has_bf16_unit(device) or bool(torch.cpu.get_capabilities().get("avx512_bf16", False))


def has_bf16_unit(device: torch.device) -> bool:
    """Whether the device has a unit for bf16 matrices, beside which fp32 is many times slower (CUDA, AMX)."""
    return device.type == "cuda" or bool(torch.cpu.get_capabilities().get("amx_bf16", False))
