"""What the attention of a trained run looks like: python scripts/attention.py run_dir=runs/NAME length=65536

For every layer and head, at query positions spread over the length: the entropy of the attention (nats), its share on
and its entropy within each decade of distances, its share on the last 100 tokens, mean and variance of logits and
scores; and quantiles of each layer's scores against a Gaussian. Writes attention.json into the run directory, and draws
attention.png (entropy, shares) and attention_qq.png there.
"""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

from configs.command import command
from configs.schema import check_choices
from eval.attention_figures import qq_figure, run_figure
from eval.attention_run import FILE, AttentionSettings, last_query_table, measure_run
from eval.figures import save_figure
from eval.runs import load_config
from training.distributed import start_process, world_size


@command("attention")
def main(config: Any) -> None:
    check_choices(config)
    if world_size() > 1:
        raise ValueError("attention.py looks at one sequence at a time, in one process; start it without torchrun")
    run_dir = Path(config.run_dir)
    if config.length is None:
        config.length = max(load_config(run_dir).validation.lengths)
    settings = AttentionSettings(**{field.name: config[field.name] for field in fields(AttentionSettings)})
    with start_process(config.device, config.precision) as process:
        content = measure_run(run_dir, settings, process, progress=True)
    written = [run_dir / FILE]
    if config.plot:
        written += save_figure(run_figure(content, run_dir.name), run_dir / "attention")
        written += save_figure(qq_figure(content, run_dir.name), run_dir / "attention_qq")
    print(f"The last query of {content['made_with']['length']:,} tokens: entropy in nats, shares of its attention")
    print(last_query_table(content).to_string(index=False, float_format="{:.3f}".format))
    print("Written:", *written, sep="\n  ")


if __name__ == "__main__":
    main()
