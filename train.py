"""Trains one model: python train.py model=162m position=rope data=fineweb10b run_dir=runs/NAME

The same command under torchrun --standalone --nproc_per_node=8 gives the same result on eight devices. Run again, it
goes on from the newest checkpoint of its run_dir. With dry_run=true it only says what the run would take.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from configs.command import command
from configs.schema import check
from data.loader import TrainBatches, open_split, validation_batches
from eval.loss import loss_by_length
from model.attend import check_trainable
from model.gpt import GPT
from training.checkpoint import restore_checkpoint, save_checkpoint
from training.checkpoint_folder import (
    awaits_validation,
    check_not_moved,
    checkpoint_path,
    latest_checkpoint,
    record_validation,
)
from training.distributed import Process, Stopped, StopSignal, start_process
from training.environment import describe_environment, environment, record_environment
from training.estimate import describe_run
from training.health import check_finite, check_same_step, check_step
from training.log import RunLog
from training.metrics import StepMetrics
from training.profiler import profiled
from training.run_config import check_run_dir, locked, wandb_id, write_config
from training.schedule import learning_rate_factor
from training.state import TrainState, build_state
from training.step import compile_blocks, micro_batch_rows, train_step, wrap

Measure = Callable[[GPT, Callable[[], None]], dict[int, float]]  # validation: {length: mean loss}


class Batches(Protocol):
    """The data of one process: of a step, tokens and targets, each (rows_per_rank, length)."""

    rows_per_rank: int
    length: int

    def batch(self, step: int) -> tuple[Tensor, Tensor]: ...


@record  # torchrun's own report then shows the bug of the process that failed first
@command("train")
def main(config: Any) -> None:
    check(config)
    if config.dry_run:
        print(describe_run(config))
        return
    with start_process(config.device, config.precision) as process:
        run(config, process, open_data)


def run(
    config: Any,
    process: Process,
    open_data: Callable[[Any, Process], tuple[Batches, Measure]],
    initialise: Callable[[GPT], object] = lambda model: None,
) -> None:
    """The run that `config` describes, from its newest checkpoint, or from the weights that `initialise` gives it."""
    run_dir = Path(config.run_dir)
    with process.together():
        batches, measure = open_data(config, process)
        check_trainable(config.attention, process.device)
        check_run_dir(run_dir, config)
        config.wandb.id = wandb_id(run_dir, config)
        state = build_state(config, process.device)
        if folder := latest_checkpoint(run_dir):
            restore_checkpoint(folder, state)
        else:
            initialise(state.model)
    check_same_step(state, run_dir, process)
    validated = folder is not None and not awaits_validation(folder)
    if state.step >= config.train.steps and validated:
        if process.is_main:
            print(f"{run_dir} is already trained to step {state.step}; nothing to do")
        return
    with locked(run_dir, process):
        with process.together():
            check_not_moved(run_dir, folder)
        process.on_main(lambda: write_config(run_dir, config))
        with RunLog(run_dir, config, state.step, process, validated) as log:
            try:
                train(config, state, batches, measure, process, log)
            except OSError as error:  # a full disk, above all
                error.add_note(f"(the same command goes on from {latest_checkpoint(run_dir) or 'the start'})")
                raise


def open_data(config: Any, process: Process) -> tuple[TrainBatches, Measure]:
    """The training batches of this process and the validation; raises ValueError when there are too few tokens."""
    vocab_size = config.model.vocab_size
    batches = TrainBatches(
        open_split(config.data.dir, "train", vocab_size),
        config.train.tokens_per_step,
        config.train.length,
        process.rank,
        process.world_size,
        config.data.repeat,
        config.data.shuffle_seed,
        pin_memory=process.device.type == "cuda",
    )
    batches.check(config.train.steps)
    validation = open_split(config.data.dir, "val", vocab_size)
    for length in config.validation.lengths:
        validation_batches(validation, length, config.validation.tokens, rows_per_batch=1)  # checks, reads nothing

    def measure(model: GPT, between: Callable[[], None]) -> dict[int, float]:
        return loss_by_length(
            model,
            validation,
            config.validation.lengths,
            config.validation.tokens,
            process,
            config.train.micro_batch_tokens,
            between=between,
        )

    return batches, measure


def train(config: Any, state: TrainState, batches: Batches, measure: Measure, process: Process, log: RunLog) -> None:
    """Steps until config.train.steps, with validation and checkpoints on the way."""
    run_dir, steps = Path(config.run_dir), config.train.steps
    rows, at_once = batches.rows_per_rank, config.train.micro_batch_tokens
    forward = wrap(state.model, process)
    if config.compile == "True" or (config.compile == "auto" and process.device.type == "cuda"):
        compile_blocks(state.model)
    log.info(describe(config, state, rows // micro_batch_rows(rows, batches.length, at_once), process))
    if process.is_main:  # it asks git
        facts = environment(process.device)
        log.info(f"on {describe_environment(facts)}")
        started = {"step": state.step, "processes": process.world_size, "precision": process.precision}
        record_environment(run_dir, {**started, **facts})
    metrics = StepMetrics(config, state, process)
    stop = StopSignal()

    def validate() -> dict[int, float]:
        """Raises Stopped where a signal cuts it short."""
        losses = measure(state.model, lambda: stop.check(process))
        named = {f"val/loss_{length}": loss for length, loss in losses.items()}
        check_finite(named, state.step, run_dir, process)
        log.metrics({"step": state.step, "tokens": state.step * config.train.tokens_per_step, **named})
        log.info(f"step {state.step}/{steps}  " + "  ".join(f"{key} {loss:.4f}" for key, loss in named.items()))
        return losses

    def leave() -> NoReturn:
        log.info(f"stopped by a signal after step {state.step}; the same command goes on from there")
        sys.exit(128 + stop.number)

    try:
        if state.step == 0:
            validate()
        elif awaits_validation(folder := checkpoint_path(run_dir, state.step)):
            validated = validate()
            process.on_main(lambda: record_validation(folder, config.train.length, validated))
    except Stopped:
        leave()
    with profiled(config.profile and process.is_main, run_dir, process.device) as step_done:
        while state.step < steps:
            metrics.start()
            factor = learning_rate_factor(state.step, steps, **config.schedule)
            tokens, targets = batches.batch(state.step)
            micro_rows = micro_batch_rows(len(tokens), tokens.shape[1], at_once)
            result = train_step(state, forward, tokens, targets, micro_rows, factor, process)
            log.metrics(metrics.measure(state, result, factor))
            step_done()
            check_step(config, state, result, process, log)
            validation_due = state.step % config.validation.every == 0 or state.step == steps
            losses, stopped = None, False
            try:
                stop.check(process)
                losses = validate() if validation_due else None
            except Stopped:
                stopped = True
            if state.step % config.train.checkpoint_every == 0 or state.step == steps or stopped:
                # after validation: a run with its last checkpoint has all its metrics
                process.on_main(log.sync)
                save_checkpoint(run_dir, state, config.train.keep_checkpoints, losses, validation_due, process)
            if stopped:
                leave()


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
