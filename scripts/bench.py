"""Speed and memory, as ratios within one run: python scripts/bench.py KIND key=value ...

KIND attention: backends and position schemes against SDPA's plain causal attention. KIND model: a model under each
position scheme against one of them. KIND train: a whole training step against that of other libraries. KIND data: the
loader, from a warm page cache. KIND tokenize: text to shards against tiktoken alone. Prints a table and writes
results/bench/KIND.json: {"machine": {...}, "rows": [...]}.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

from configs.command import command, compose


def bench_attention(config: Any) -> dict[str, Any]:
    from eval.bench_attention import bench_attention as measure  # here, so that --help does not wait for torch

    return measure(config, {name: compose("train", [f"position={name}"]).position for name in config.positions})


def bench_model(config: Any) -> dict[str, Any]:
    from eval.bench_model import bench_model as measure

    shared = [f"model={config.model}", f"train.length={config.train_length}"]
    return measure(config, {name: compose("train", [*shared, f"position={name}"]) for name in config.positions})


def bench_data(config: Any) -> dict[str, Any]:
    from eval.bench_data import bench_data as measure

    return measure(config)


def bench_train(config: Any) -> dict[str, Any]:
    from eval.bench_train import bench_train as measure

    def train_config(model: str, position: str, length: int) -> Any:
        return compose("train", [f"model={model}", f"position={position}", f"train.length={length}"])

    return measure(config, train_config)


def bench_tokenize(config: Any) -> dict[str, Any]:
    from eval.bench_tokenize import bench_tokenize as measure

    return measure(config)


KINDS = {
    "attention": bench_attention,
    "data": bench_data,
    "model": bench_model,
    "tokenize": bench_tokenize,
    "train": bench_train,
}


def main() -> None:
    kind = "attention"
    if len(sys.argv) > 1 and sys.argv[1].isidentifier():
        kind = sys.argv.pop(1)
    if kind not in KINDS:
        print(f"error: kind={kind} is unknown; choose one of: {', '.join(KINDS)}", file=sys.stderr)
        sys.exit(2)
    # Hydra reads model=NAME as the choice of a group's file, and here it is a plain key
    models = [word for word in sys.argv[1:] if kind == "model" and word.startswith("model=")]
    sys.argv[1:] = [word for word in sys.argv[1:] if word not in models]

    @command(f"bench_{kind}")
    def run(config: Any) -> None:
        for word in models:
            config.model = word.removeprefix("model=")
        write(KINDS[kind](config), Path(config.out))

    run()


# Printed: a heading, and a row's figure as text, where the row has that figure.
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "ms": lambda row: f"{1e3 * row['seconds']:.2f}",
    "ratio": lambda row: f"{row.get('ratio', row.get('ratio_to_sdpa')):.2f}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:.0f}",
    "MB added": lambda row: f"{row['peak_bytes'] / 1e6:.0f}",
    "ratio MB": lambda row: f"{row['memory_ratio']:.2f}",
    "optimizer": lambda row: f"{row['optimizer_share']:.1%}",
    "utilised": lambda row: f"{row['utilisation']:.1%}",
}


def write(result: dict[str, Any], out: Path) -> None:
    """Writes the figures, all at once, and prints them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".json.partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(partial, out)
    print(" " * 50 + "".join(f"{heading:>10}" for heading in COLUMNS))
    for row in result["rows"]:
        print(f"{row['name']:50}" + "".join(f"{_cell(column, row):>10}" for column in COLUMNS.values()))
    print(f"written to {out}")


def _cell(column: Callable[[dict[str, Any]], str], row: dict[str, Any]) -> str:
    try:
        return column(row)
    except (KeyError, TypeError):  # this kind of row has no such figure, or the system could not tell it
        return ""


if __name__ == "__main__":
    main()
