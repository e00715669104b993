"""Validation loss of a trained run by length: python scripts/evaluate.py run_dir=runs/NAME lengths=[4096,65536]

Writes eval.json into the run directory: {"loss": {"4096": {"mean": nats per token, "tokens": n}, ...}, "by_position":
{"4096": {"edges": [0, 1, 2, 4, ..., 4096], "mean": [...], "tokens": [...]}, ...}, ...}, where mean[k] is that of the
positions [edges[k], edges[k + 1]). plot=true draws the latter.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

from configs.command import command
from configs.schema import check_choices
from data.loader import check_validation, open_split
from eval.figures import position_curves, save_figure
from eval.loss import loss_by_length_and_position
from eval.runs import find_checkpoint, load_config, load_run
from training.checkpoint import checkpoint_step
from training.distributed import start_process


@command("evaluate")
def main(config: Any) -> None:
    run_dir, trained = Path(config.run_dir), load_config(config.run_dir)
    check_choices(config)
    lengths = list(trained.validation.lengths if config.lengths is None else config.lengths)
    n_tokens = trained.validation.tokens if config.tokens is None else config.tokens
    if not lengths or config.micro_batch_tokens < 1:
        raise ValueError(
            f"lengths={lengths} must hold one, micro_batch_tokens={config.micro_batch_tokens} be at least 1"
        )
    with start_process(config.device, config.precision) as process:
        stream = open_split(config.data_dir or trained.data.dir, "val", trained.model.vocab_size, key="data_dir")
        for length in lengths:
            check_validation(stream, length, n_tokens, prefix="")
        folder = find_checkpoint(run_dir, config.step)
        model, _ = load_run(run_dir, process.device, config.step)
        losses, by_position = loss_by_length_and_position(
            model, stream, lengths, n_tokens, process, micro_batch_tokens=config.micro_batch_tokens, progress=True
        )
        if not process.is_main:
            return
        result = {
            "loss": {str(length): {"mean": loss, "tokens": n_tokens} for length, loss in losses.items()},
            "by_position": {str(length): asdict(of_length) for length, of_length in by_position.items()},
            "step": checkpoint_step(folder),
            "data": str(config.data_dir or trained.data.dir),
            "precision": process.precision,
        }
        partial = run_dir / "eval.json.partial"
        partial.write_text(json.dumps(result, indent=2) + "\n")
        os.replace(partial, run_dir / "eval.json")
        for length, loss in losses.items():
            print(f"{length:>8} tokens  {loss:.4f} nats per token")
        print(f"written to {run_dir / 'eval.json'}")
        if config.plot:
            figure = position_curves(by_position, trained.train.length, run_dir.name)
            print(f"drawn in {save_figure(figure, run_dir / 'loss_by_position', ['png'])[0]}")


if __name__ == "__main__":
    main()
