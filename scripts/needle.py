"""Needle in a haystack: python scripts/needle.py run_dir=runs/NAME

Fine-tunes a copy of the run on the task, in a run directory of its own that names its parent, and tests it; with
finetune=false tests the run as it is. Run again, it goes on where it was. Writes needle.json ({"accuracy": {"4096":
{"mean": share of needles, "needles": n, ...}, ...}, ...}), needle.png and .pdf (depth x length) and needle.jsonl (every
sample with its answer) into the tested run's directory, and a copy of needle.json into run_dir.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

import train
from configs.command import command, compose
from configs.schema import check, check_choices
from data.loader import open_split
from data.needle import NeedleBatches, NeedleSamples, NeedleTask
from data.tokenizer import Tokenizer
from eval.figures import save_figure
from eval.generate import run_tokenizer
from eval.memory import check_memory
from eval.needle import MARGIN, Outcome, answer_loss, find_needles, summarise
from eval.needle_figure import heat_map
from eval.runs import find_checkpoint, load_config, load_run
from model.gpt import GPT
from training.checkpoint_folder import checkpoint_step
from training.distributed import Process, start_process


@command("needle")
def main(config: Any) -> None:
    check_choices(config)
    parent = load_config(config.run_dir)
    for key in ("lengths", "samples", "micro_batch_tokens", "train.rows", "train.steps", "train.validation_samples"):
        value = OmegaConf.select(config, key)
        if (min(value, default=0) if key == "lengths" else value) < 1:
            raise ValueError(f"{key}={value} must be at least 1")
    if not 0 <= (fraction := config.train.first_fraction) <= 1:
        raise ValueError(f"train.first_fraction={fraction} must lie in [0, 1]")
    if (first_length := config.train.first_length) is not None and first_length < 1:
        raise ValueError(f"train.first_length={first_length} must be at least 1, or null for train.length")
    with start_process(config.device, config.precision) as process:
        tokenizer = run_tokenizer(parent, config.tokenizer)
        haystacks = Haystacks(config, parent, tokenizer)
        test = haystacks.samples("test")
        model, _ = load_run(config.run_dir, process.device, config.step)
        for length in config.lengths:
            test.check(length)
            rows = max(1, config.micro_batch_tokens // length)
            remedy = f"drop length={length}" if rows == 1 else f"lower micro_batch_tokens={config.micro_batch_tokens}"
            check_memory(model, rows, length + MARGIN, rows * length, process.precision, remedy)
        tested = Path(config.run_dir)
        if config.finetune:
            tested = finetune(config, parent, model, haystacks, process)
            model, _ = load_run(tested, process.device)
        outcomes = {
            length: find_needles(model, test, length, config.samples, process, config.micro_batch_tokens, progress=True)
            for length in config.lengths
        }
        if process.is_main:
            report(config, tested, outcomes, tokenizer, process)


class Haystacks:
    """The samples of each split, over the prepared shards of `data_dir`."""

    def __init__(self, config: Any, parent: Any, tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self.folder = config.data_dir or parent.data.dir
        self.vocab_size = parent.model.vocab_size
        self.task = NeedleTask(**config.needle)

    def samples(self, split: str) -> NeedleSamples:
        of_shards = "train" if split == "train" else "val"
        stream = open_split(self.folder, of_shards, self.vocab_size, key="data_dir")
        return NeedleSamples(stream, self.tokenizer, self.task, self.config.seed, split)


def finetune(config: Any, parent: Any, pretrained: GPT, haystacks: Haystacks, process: Process) -> Path:
    """Trains the answers into a copy of the run, or goes on with that; gives its run directory."""
    child = finetune_config(config, parent, haystacks.folder)
    check(child)
    length, rows = child.needle.length, config.train.rows
    first_length, first_steps = config.train.first_length, round(config.train.first_fraction * config.train.steps)

    def open_data(child: Any, process: Process) -> tuple[train.Batches, train.Measure]:
        made = haystacks.samples("train")
        batches = NeedleBatches(made, length, rows, process.rank, process.world_size, first_length, first_steps)
        held_out = haystacks.samples("val")
        held_out.check(length)

        def measure(model: GPT, between: Callable[[], None]) -> dict[int, float]:
            count, at_once = config.train.validation_samples, config.micro_batch_tokens
            return {length: answer_loss(model, held_out, length, count, process, at_once, between)}

        return batches, measure

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    train.run(child, process, open_data, lambda model: model.load_state_dict(pretrained.state_dict()))
    for number, handler in handlers.items():  # training ends by itself after a signal; testing is to end at once
        signal.signal(number, handler)
    return Path(child.run_dir)


def finetune_config(config: Any, parent: Any, data_dir: str) -> Any:
    """The config of the fine-tuning run: the parent's, but for what is trained, where and for how long."""
    folder = Path(config.run_dir)
    length = config.train.length or parent.train.length
    keys = ("rows", "validation_samples", "first_length", "first_fraction")
    needle = {**config.needle, **{key: config.train[key] for key in keys}, "length": length, "seed": config.seed}
    step = checkpoint_step(find_checkpoint(folder, config.step))
    changed = {
        "data": {"name": Path(data_dir).name, "dir": data_dir},
        "train": {
            "tokens_per_step": config.train.rows * length,
            "steps": config.train.steps,
            "micro_batch_tokens": config.micro_batch_tokens,
            "checkpoint_every": config.train.checkpoint_every,
        },
        "schedule": {
            "kind": "constant_then_linear",
            "warmup_fraction": config.train.warmup_fraction,
            "cooldown_fraction": config.train.cooldown_fraction,
        },
        "validation": {
            "lengths": [length],
            "tokens": config.train.validation_samples * length,
            "every": config.train.validate_every,
        },
        "wandb": config.wandb,
        "seed": config.seed,
        "run_dir": config.out_dir or f"{folder}-needle-seed{config.seed}",
        **{key: config[key] for key in ("device", "precision", "compile")},
        "attention": "auto",  # the parent's may not work on this machine
        "needle": {**needle, "parent": {"run_dir": str(folder), "step": step}},
    }
    defaults = OmegaConf.create(OmegaConf.to_container(compose("train", [])))  # of keys younger than the parent
    defaults.position = {}
    return OmegaConf.merge(defaults, parent, changed)


def report(
    config: Any, tested: Path, outcomes: dict[int, list[Outcome]], tokenizer: Tokenizer, process: Process
) -> None:
    """needle.json, needle.jsonl and the heat map, in the tested run's directory; prints the accuracies."""
    accuracy = {str(length): summarise(of_length) for length, of_length in outcomes.items()}
    chosen = checkpoint_step(find_checkpoint(config.run_dir, config.step))
    result = {
        "accuracy": accuracy,
        "run_dir": str(tested),
        "step": checkpoint_step(find_checkpoint(tested)) if config.finetune else chosen,
        "finetuned_from": config.run_dir if config.finetune else None,
        "finetuned_from_step": chosen if config.finetune else None,
        "train": OmegaConf.to_container(config.train) if config.finetune else None,
        "task": OmegaConf.to_container(config.needle),
        "seed": config.seed,
        "data": config.data_dir or load_config(config.run_dir).data.dir,
        "precision": process.precision,
    }
    text = json.dumps(result, indent=2) + "\n"
    lines = [json.dumps(outcome.record(tokenizer)) for of_length in outcomes.values() for outcome in of_length]
    write(tested / "needle.jsonl", "\n".join(lines) + "\n")
    save_figure(heat_map(accuracy, title=f"Share of needles found by\n{tested.name}"), tested / "needle")
    for folder in {tested, Path(config.run_dir)}:
        write(folder / "needle.json", text)
    for length, entry in accuracy.items():
        error = "" if entry["stderr"] is None else f" +- {entry['stderr']:.4f}"
        forced = entry["teacher_forced"]["mean"]
        print(
            f"{length:>8} tokens  {entry['mean']:.4f}{error} of {entry['needles']} needles found "
            f"(teacher-forced: {forced:.4f})"
        )
    print(f"written to {tested / 'needle.json'}")


def write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


if __name__ == "__main__":
    main()
