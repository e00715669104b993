"""What a device is fast at."""

import torch


def fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices faster than fp32 ones (elsewhere it emulates them, slowly)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    processor = torch.cpu.get_capabilities()
    return any(processor.get(feature, False) for feature in ("avx512_bf16", "amx_bf16"))
