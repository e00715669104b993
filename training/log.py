"""What a run says: metrics.jsonl (one JSON object a line), log.txt, the terminal, and wandb where asked for."""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tqdm import tqdm

from training.distributed import Process

METRICS = "metrics.jsonl"


class RunLog:
    """The log of one run; on processes other than the main one it says nothing.

    A resumed run first drops from metrics.jsonl what lies beyond the step that it resumes from.

    Args:
        run_dir: the run's folder, which exists.
        config: the run's config; wandb.mode says whether wandb hears of it too.
        step: the step that the run goes on from.
        process: this process; only the main one writes.
    """

    def __init__(self, run_dir: Path, config: Any, step: int, process: Process):
        self._process = process
        self.is_main = process.is_main
        self._open = ExitStack()
        process.on_main(lambda: self._start(run_dir, config, step))

    def _start(self, run_dir: Path, config: Any, step: int) -> None:
        _keep_metrics(run_dir / METRICS, step)
        self._metrics = self._open.enter_context((run_dir / METRICS).open("a"))
        self._logger = _open_logger(run_dir / "log.txt", self._open)
        self._wandb = _start_wandb(config, run_dir)
        if self._wandb is not None:
            self._open.callback(self._wandb.finish)
        per_step = config.train.tokens_per_step
        self._bar = self._open.enter_context(
            tqdm(
                total=config.train.steps * per_step,
                initial=step * per_step,
                unit="tok",
                unit_scale=True,
                desc=run_dir.name,
                disable=None,  # quiet unless stderr is a terminal
                dynamic_ncols=True,
            )
        )

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl; must have "step" and "tokens"."""
        if not self.is_main:
            return
        self._metrics.write(json.dumps(metrics) + "\n")
        self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=int(metrics["step"]))
        if "train/loss" in metrics:
            self._bar.set_postfix(loss=f"{metrics['train/loss']:.3f}", refresh=False)
            self._bar.update(metrics["tokens"] - self._bar.n)

    def info(self, text: str) -> None:
        """A line in log.txt and on the terminal."""
        if self.is_main:
            self._logger.info(text)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Writes the traceback of an error into log.txt, and closes the files."""
        if isinstance(error, Exception):
            if self.is_main:
                self._logger.debug("the run ended with an error", exc_info=error)
            else:  # the command says on every process what only one of them may know
                error.add_note(f"(process {self._process.rank})")
        self.close()

    def close(self) -> None:
        self._open.close()


class _Terminal(logging.Handler):
    """Lines above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


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


def _keep_metrics(path: Path, step: int) -> None:
    kept = [line for line in read_metrics_lines(path) if line["step"] <= step] if step else []
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(partial, path)


def _open_logger(path: Path, stack: ExitStack) -> logging.Logger:
    logger = logging.getLogger("train")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    terminal, file = _Terminal(logging.INFO), logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
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
            id=hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16],  # one run a folder
            resume="allow",
            dir=str(run_dir),
            config=OmegaConf.to_container(config),  # pyright: ignore[reportArgumentType]
        )
    except WandbError as error:
        raise ValueError(f"wandb.mode={config.wandb.mode}: {error}; use wandb.mode=offline or disabled") from error
