"""Speed and memory of attention against SDPA: python scripts/bench.py attention lengths=[1024,4096] dtype=fp32

Prints a table and writes results/bench/attention.json: {"machine": {...}, "rows": [{"name", "seconds", ...}, ...]}.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

from configs.command import command

KINDS = ("attention",)


@command("bench")
def main(config: Any) -> None:
    if config.kind not in KINDS:
        raise ValueError(f"kind={config.kind} is unknown; choose one of: {', '.join(KINDS)}")
    from eval.bench_attention import bench_attention

    result = bench_attention(config)
    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".json.partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(partial, out)
    print(table(result["rows"]))
    print(f"written to {out}")


def table(rows: list[dict[str, Any]]) -> str:
    """One line a row: median time, ratio to SDPA, tokens per second and memory added."""
    lines = [f"{'':46}{'ms':>10}{'of SDPA':>9}{'tokens/s':>12}{'MB added':>10}"]
    for row in rows:
        megabytes = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
        lines.append(
            f"{row['name']:46}{1e3 * row['seconds']:10.2f}{row['ratio_to_sdpa']:9.2f}"
            f"{row['tokens_per_second']:12.0f}{megabytes:>10}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isidentifier():  # the kind may stand first, as a bare word
        sys.argv[1] = f"kind={sys.argv[1]}"
    main()
