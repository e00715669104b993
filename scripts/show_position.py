"""The plan of a position scheme as one JSON object: python scripts/show_position.py position=yarn length=65536

plot=true draws it instead: rotation angles, query scale, and the scale and shift of the logits over distance.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from the root without installing

from configs.command import command
from model.attention import CORES
from model.position import Plan, build_position
from model.position.scheme import fill_defaults


@command("show_position")
def main(config: Any) -> None:
    for key in ("length", "train_length", "head_dim", "n_head"):
        if config[key] < 1:
            raise ValueError(f"{key}={config[key]} must be at least 1")
    if not 0 <= config.head < config.n_head:
        raise ValueError(
            f"head={config.head} must be one of the n_head={config.n_head} heads, 0 to {config.n_head - 1}"
        )
    scheme = build_position(
        config.position, head_dim=config.head_dim, n_head=config.n_head, train_length=config.train_length
    )
    fill_defaults("core", CORES, config.position.core)
    plan = scheme.plan(config.length)
    if config.plot:
        from eval.figures import save_figure
        from eval.position import position_figure

        out = Path(config.out or f"results/position/{config.position.name}.png")
        figure = position_figure(plan, config.position.name, config.train_length)
        print(*save_figure(figure, out.with_suffix("")), sep="\n")
    else:
        print(json.dumps(describe(plan, config)))


def describe(plan: Plan, config: Any) -> dict[str, Any]:
    """The numbers of the plan for one head, at the distances `t` and the query positions `i`."""
    t, i = (indices(key, config[key], config.length) for key in ("t", "i"))

    def by_distance(table: Any) -> dict[str, Any] | None:
        if table is None:
            return None
        head = config.head if table.shape[0] > 1 else 0
        return {"t": t, "head": config.head, "value": table[head, t].tolist()}

    s, transform = plan.query_scale, plan.transform
    return {
        "position": config.position.name,
        "length": config.length,
        "train_length": config.train_length,
        "angular_frequency": None if plan.angular_frequency is None else plan.angular_frequency.tolist(),
        "rotary_temperature": plan.temperature,
        "query_scale": None if s is None else {"i": i, "s": s[0, config.head, i].tolist()},
        "scale": by_distance(transform and transform.scale),
        "shift": by_distance(transform and transform.shift),
    }


def indices(key: str, given: Any, length: int) -> list[int]:
    """The asked-for indices, or 0 and the powers of two."""
    if given is None:
        return [0, *(2**k for k in range((length - 1).bit_length()))]
    for index in given:
        if not isinstance(index, int) or not 0 <= index < length:
            raise ValueError(f"{key}={list(given)}: {index} is not in 0 to length - 1 = {length - 1}")
    return list(given)


if __name__ == "__main__":
    main()
