"""Trains one model: python train.py model=162m position=rope data=fineweb10b run_dir=runs/NAME

The same command under torchrun --standalone --nproc_per_node=8 gives the same result on eight devices. Run again, it
goes on from the newest checkpoint of its run_dir. With dry_run=true it only says what the run would take.
"""

import math
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from configs.command import command
from configs.schema import check
from data.loader import TokenStream, TrainBatches, open_split, validation_batches
from eval.loss import loss_by_length
from training.checkpoint import latest_checkpoint, restore_checkpoint, save_checkpoint
from training.distributed import Process, StopSignal, start_process
from training.estimate import describe_run
from training.log import RunLog
from training.run_config import check_run_dir, write_config
from training.schedule import learning_rate_factor
from training.state import TrainState, build_state
from training.step import micro_batch_rows, train_step, wrap


@command("train")
def main(config: Any) -> None:
    check(config)
    if config.dry_run:
        print(describe_run(config))
        return
    with start_process(config.device, config.precision) as process:
        batches, validation = open_data(config, process)
        if config.attention == "flex" and process.device.type == "cpu":
            raise ValueError("attention=flex has no gradients on a CPU; use attention=auto or blockwise")
        state = build_state(config, process.device)
        run_dir = Path(config.run_dir)
        check_run_dir(run_dir, config)
        if folder := latest_checkpoint(run_dir):
            restore_checkpoint(folder, state)
        if state.step >= config.train.steps:
            if process.is_main:
                print(f"{run_dir} is already trained to step {state.step}; nothing to do")
            return
        process.barrier()  # everyone has read the run directory before the main process writes to it
        process.on_main(lambda: write_config(run_dir, config))
        with RunLog(run_dir, config, state.step, process) as log:
            train(config, state, batches, validation, process, log)


def open_data(config: Any, process: Process) -> tuple[TrainBatches, TokenStream]:
    """The training batches of this process and the validation tokens; raises ValueError when there are too few."""
    vocab_size = config.model.vocab_size
    batches = TrainBatches(
        open_split(config.data.dir, "train", vocab_size),
        config.train.tokens_per_step,
        config.train.length,
        process.rank,
        process.world_size,
        config.data.repeat,
    )
    batches.check(config.train.steps)
    validation = open_split(config.data.dir, "val", vocab_size)
    for length in config.validation.lengths:
        validation_batches(validation, length, config.validation.tokens, rows_per_batch=1)  # checks, reads nothing
    return batches, validation


def train(
    config: Any, state: TrainState, batches: TrainBatches, validation: TokenStream, process: Process, log: RunLog
) -> None:
    """Steps until config.train.steps, with validation and checkpoints on the way."""
    run_dir, steps, per_step = Path(config.run_dir), config.train.steps, config.train.tokens_per_step
    micro_rows = micro_batch_rows(batches.rows_per_rank, config.train.length, config.train.micro_batch_tokens)
    forward = wrap(state.model, process)
    if config.compile == "True" or (config.compile == "auto" and process.device.type == "cuda"):
        for block in state.model.blocks:  # by block: one compilation serves all layers
            block.compile()
    log.info(describe(config, state, batches.rows_per_rank // micro_rows, process))

    def validate() -> None:
        losses = loss_by_length(
            state.model,
            validation,
            config.validation.lengths,
            config.validation.tokens,
            process,
            config.train.micro_batch_tokens,
        )
        named = {f"val/loss_{length}": loss for length, loss in losses.items()}
        check_finite(named, state.step, run_dir)
        log.metrics({"step": state.step, "tokens": state.step * per_step, **named})
        log.info(f"step {state.step}/{steps}  " + "  ".join(f"{key} {loss:.4f}" for key, loss in named.items()))

    stop = StopSignal()
    if state.step == 0:
        validate()
    while state.step < steps:
        started = time.perf_counter()
        factor = learning_rate_factor(state.step, steps, config.schedule.kind, config.schedule.cooldown_fraction)
        tokens, targets = batches.batch(state.step)
        loss = train_step(state, forward, tokens, targets, micro_rows, factor, process)
        loss, stopping = process.sum(torch.stack([loss, loss.new_tensor(stop.number)])).tolist()
        check_finite({"train/loss": loss}, state.step, run_dir)
        log.metrics(
            {
                "step": state.step,
                "tokens": state.step * per_step,
                "train/loss": loss / per_step,
                "train/lr_scale": factor,
                "train/tokens_per_second": per_step / (time.perf_counter() - started),
            }
        )
        if state.step % config.validation.every == 0 or state.step == steps:
            validate()
        if state.step % config.train.checkpoint_every == 0 or state.step == steps or stopping:
            # after validation: a run with its last checkpoint has all its metrics
            rest = state.state_dict()  # made by all processes together: each has the momentum of its own matrices
            process.on_main(lambda rest=rest: save_checkpoint(run_dir, state, config.train.keep_checkpoints, rest))
        if stopping and state.step < steps:
            log.info(f"stopped by a signal after step {state.step}; the same command goes on from there")
            sys.exit(128 + (stop.number or signal.SIGTERM))


def check_finite(losses: Mapping[str, float], step: int, run_dir: Path) -> None:
    """Raises ValueError, before anything is written, when a loss is infinite or not a number."""
    if bad := [key for key, loss in losses.items() if not math.isfinite(loss)]:
        raise ValueError(
            f"{bad[0]}={losses[bad[0]]} at step {step}; the last good checkpoint is {latest_checkpoint(run_dir)}; try "
            "lower rates in optimizer, in another run_dir"
        )


def describe(config: Any, state: TrainState, accumulation: int, process: Process) -> str:
    """One line that says what is about to run."""
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    return (
        f"{config.model.name} ({parameters:,} parameters), {config.position.name}, {config.train.length} tokens a "
        f"sequence: steps {state.step} to {config.train.steps} of {config.train.tokens_per_step:,} tokens on "
        f"{process.world_size} x {process.device.type} in {process.precision}, {accumulation} forward passes a step"
    )


if __name__ == "__main__":
    main()
