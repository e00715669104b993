"""What a run says: metrics.jsonl (one JSON object a line), log.txt, the terminal, and wandb where asked for."""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from traceback import format_exception
from typing import Any

from omegaconf import OmegaConf
from tqdm import tqdm

from training.distributed import Process, first_line, lost_process

METRICS, LOG = "metrics.jsonl", "log.txt"
TIME = "%Y-%m-%d %H:%M:%S"


class RunLog:
    """The log of one run; on processes other than the main one it says nothing, but for an error.

    A resumed run first drops from metrics.jsonl what lies beyond the step that it resumes from.

    Args:
        run_dir: the run's folder, which exists.
        config: the run's config; wandb.mode says whether wandb hears of it too.
        step: the step that the run goes on from.
        process: this process; only the main one writes.
        validated: whether that step has had its validation; if not, metrics.jsonl forgets what it says of it.
    """

    def __init__(self, run_dir: Path, config: Any, step: int, process: Process, validated: bool = True):
        self._process = process
        self.is_main = process.is_main
        self._run_dir = run_dir
        self._open = ExitStack()
        self._wandb: Any = None
        with ExitStack() as unless_started:
            unless_started.callback(self._open.close)
            process.on_main(lambda: self._start(config, step, validated))
            unless_started.pop_all()

    def _start(self, config: Any, step: int, validated: bool) -> None:
        path = self._run_dir / METRICS
        _keep_metrics(path, step, validated)
        self._metrics = self._open.enter_context(path.open("ab", buffering=0))  # a full disk is noticed at once
        self._logger = _open_logger(self._run_dir / LOG, self._open)
        self._wandb = _start_wandb(config, self._run_dir)
        self._started, self._started_step = time.monotonic(), step
        self._steps, self._every = config.train.steps, config.train.log_every
        per_step = config.train.tokens_per_step
        self._bar = self._open.enter_context(
            tqdm(
                total=config.train.steps * per_step,
                initial=step * per_step,
                unit="tok",
                unit_scale=True,
                desc=self._run_dir.name,
                disable=None,  # quiet unless stderr is a terminal
                dynamic_ncols=True,
            )
        )

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl; must have "step" and "tokens"."""
        if not self.is_main:
            return
        line = memoryview((json.dumps(metrics) + "\n").encode())
        while line:
            line = line[self._metrics.write(line) :]
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=int(metrics["step"]))
        if "train/lr_scale" in metrics:
            self._show(metrics)

    def _show(self, metrics: Mapping[str, float]) -> None:
        """A training step on the bar, and every so often as a line."""
        step = int(metrics["step"])
        shown = _readable(metrics)
        self._bar.set_postfix_str(", ".join(shown), refresh=False)
        self._bar.update(metrics["tokens"] - self._bar.n)
        if step % self._every == 0 or step == self._steps:
            per_step = (time.monotonic() - self._started) / (step - self._started_step)
            left = tqdm.format_interval(per_step * (self._steps - step))
            speed = f"{metrics['train/tokens_per_second']:,.0f} tokens/s"
            self.info(f"step {step}/{self._steps}  " + ", ".join([*shown, speed, f"{left} left"]))

    def info(self, text: str) -> None:
        """A line in log.txt and on the terminal."""
        if self.is_main:
            self._logger.info(text)

    def sync(self) -> None:
        """Waits until the metrics are on the disk, so that no checkpoint outlives them."""
        if self.is_main:
            os.fsync(self._metrics.fileno())

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Adds an error to log.txt, of whichever process it is, and closes the files."""
        if isinstance(error, Exception):
            with suppress(OSError):  # it may be about a full disk
                self._write_error(error)
            if not lost_process(error):
                self._process.named(error)  # the command says on every process what only one of them may know
        self.close(failed=error is not None)

    def _write_error(self, error: Exception) -> None:
        """In one write, so that the words of several processes don't mix."""
        who = f"process {self._process.rank}"
        if lost_process(error):
            text = f"{who} ended because another one did ({first_line(error)})"
        else:
            text = f"{who} ended with an error\n" + "".join(format_exception(error))
        with (self._run_dir / LOG).open("a") as file:
            file.write(f"{time.strftime(TIME)} {text.rstrip()}\n")

    def close(self, failed: bool = False) -> None:
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))
        self._open.close()


class _Terminal(logging.Handler):
    """Lines above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


class _File(logging.FileHandler):
    """Fails where it can't write, instead of going on without a log."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise


def _readable(metrics: Mapping[str, float]) -> list[str]:
    """What the bar shows of a step besides its speed."""
    shown = [f"loss {metrics['train/loss']:.3f}"] if "train/loss" in metrics else ["not finite"]
    shown.append(f"{metrics['train/memory_bytes'] / 1e9:.1f} GB")
    if "train/utilisation" in metrics:
        shown.append(f"{metrics['train/utilisation']:.0%} utilised")
    return shown


def read_metrics_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl, without a last line that a kill tore off. Raises ValueError naming a bad line."""
    if not path.exists():
        return []
    metrics = []
    lines = path.read_text(errors="replace").split("\n")[:-1]  # behind the last newline: empty or torn
    for number, line in enumerate(lines, start=1):
        try:
            metrics.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); remove that line") from error
        if not isinstance(metrics[-1], dict) or not isinstance(metrics[-1].get("step"), int):
            raise ValueError(f"{path}, line {number} is no object with a step; remove that line")
    return metrics


def _keep_metrics(path: Path, step: int, validated: bool) -> None:
    def is_kept(line: dict[str, Any]) -> bool:
        if line["step"] == step and not validated:
            return not any(key.startswith("val/") for key in line)
        return line["step"] <= step

    kept = [line for line in read_metrics_lines(path) if is_kept(line)] if step else []
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(partial, path)


def _open_logger(path: Path, stack: ExitStack) -> logging.Logger:
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    terminal, file = _Terminal(), _File(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s", TIME))
    for handler in (terminal, file):
        logger.addHandler(handler)
        stack.callback(handler.close)
        stack.callback(logger.removeHandler, handler)
    return logger


def _start_wandb(config: Any, run_dir: Path) -> Any:
    if config.wandb.mode == "disabled":
        return None
    import wandb  # takes a second to import, so only where it is used
    from wandb.errors import Error as WandbError

    try:
        return wandb.init(
            mode=config.wandb.mode,
            project=config.wandb.project,
            group=config.wandb.group,
            name=run_dir.name,
            id=config.wandb.id,
            resume="allow",
            dir=str(run_dir),
            config=OmegaConf.to_container(config),  # pyright: ignore[reportArgumentType]
        )
    except WandbError as error:
        raise ValueError(f"wandb.mode={config.wandb.mode}: {error}; use wandb.mode=offline or disabled") from error
