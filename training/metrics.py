"""What a training step says of itself in metrics.jsonl."""

import math
import time
from typing import Any

from training.distributed import Process, peak_memory
from training.flops import flops_per_token, peak_flops
from training.state import TrainState
from training.step import StepResult


class StepMetrics:
    """Measures the steps of a run, one after the other; a clock runs from the end of the one before."""

    def __init__(self, config: Any, state: TrainState, process: Process):
        self.process = process
        self.tokens_per_step = config.train.tokens_per_step
        peak = peak_flops(process.device)
        self.flops = flops_per_token(state.model, config.train.length)
        self.peak = None if peak is None else peak * process.world_size

    def start(self) -> None:
        self.started = time.perf_counter()

    def measure(self, state: TrainState, result: StepResult, factor: float) -> dict[str, float]:
        """The values of the step that began at `start`.

        Loss in nats per token, the peak memory of this process in bytes, on a known GPU the utilisation (the model's
        floating-point operations as a share of what the GPUs can do); a loss or norm that is not finite is left out,
        and the steps that had one so far are counted.
        """
        speed = self.tokens_per_step / (time.perf_counter() - self.started)
        measured = {"train/loss": result.loss / self.tokens_per_step, "train/grad_norm": result.grad_norm}
        counts = {f"train/nonfinite_{name}": count for name, count in state.nonfinite.items() if count}
        return {
            "step": state.step,
            "tokens": state.step * self.tokens_per_step,
            **{key: value for key, value in measured.items() if math.isfinite(value)},
            "train/lr_scale": factor,
            "train/tokens_per_second": speed,
            "train/memory_bytes": peak_memory(self.process.device),
            **({} if self.peak is None else {"train/utilisation": self.flops * speed / self.peak}),
            **counts,
        }
