"""What the attention of a trained model looks like: entropy, ranges, logits (arXiv:2505.17083, figures 1 and 9 to 14).

A few queries stand for all, each with all of its keys, so that nothing of size length x length is ever made. q and k
are taken where they enter a layer's attention, by a hook; the model runs as it always does.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from eval.ranges import logits_by_distance, range_statistics
from model.attention import DotProduct
from model.gpt import GPT, Block
from model.position import Plan
from training.distributed import Process

LAST = 100  # the nearest keys, the query's own token among them
NORMAL_QUANTILES = torch.linspace(-3.5, 3.5, 71, dtype=torch.float64)

Watch = Callable[[int, Tensor, Tensor, Plan], None]


@dataclass(frozen=True)
class Sampling:
    """What is looked at: at most `queries` positions of each sequence, and `pairs` of query and key for QQ plots."""

    queries: int
    pairs: int
    seed: int = 0


def attention_statistics(
    model: GPT, sequences: Int[Tensor, "rows T"], sampling: Sampling, process: Process, progress: bool = False
) -> dict[str, Any]:
    """Statistics of every layer and head, as plain numbers, the mean over the sequences; entropies in nats.

    Returns a dict of
        ranges: distances [start, stop) of each range: the token itself, then a decade each;
        queries: positions i, log-spaced in the number of keys i + 1;
        layers: for each the `query_statistics`, nested as head, query (, range);
        qq: `z`, quantiles of N(0, 1), and for each layer those of its scores at the same probabilities.

    Raises ValueError for Infini-attention and for sequences of one token.
    """
    check_softmax(model)
    rows, length = sequences.shape
    if length < 2:
        raise ValueError(f"length={length} must be at least 2: a single token has only itself to attend to")
    queries, ranges = query_positions(length, sampling.queries), distance_ranges(length)
    generator = torch.Generator().manual_seed(sampling.seed)
    totals: list[dict[str, Tensor]] = [{} for _ in model.blocks]
    scores: list[dict[str, list[Tensor]]] = [{"rotated": [], "unrotated": []} for _ in model.blocks]
    with tqdm(
        total=rows * len(model.blocks), desc="attention", unit="layer", disable=None if progress else True
    ) as bar:

        def watch(layer: int, q: Tensor, k: Tensor, plan: Plan) -> None:
            with torch.autocast(q.device.type, enabled=False):  # or these products, too, would be rounded to bf16
                count(layer, q, k, plan)
            bar.update()

        def count(layer: int, q: Tensor, k: Tensor, plan: Plan) -> None:
            turned = plan.rotate(q.float())[0], plan.rotate(k.float())[0]
            for name, value in query_statistics(*turned, plan, queries, ranges).items():
                totals[layer][name] = totals[layer].get(name, 0) + value / rows
            pairs = random_pairs(length, sampling.pairs, generator)
            scores[layer]["rotated"].append(pair_scores(*turned, *pairs))
            scores[layer]["unrotated"].append(pair_scores(q[0].float(), k[0].float(), *pairs))

        with torch.no_grad(), watched(model, watch), process.autocast():
            for row in sequences:
                model.hidden(row[None].to(process.device))
    return {
        "ranges": [list(edges) for edges in ranges],
        "queries": queries,
        "layers": [{name: value.tolist() for name, value in layer.items()} for layer in totals],
        "qq": {
            "z": NORMAL_QUANTILES.tolist(),
            "layers": [{kind: score_quantiles(torch.cat(drawn)) for kind, drawn in layer.items()} for layer in scores],
        },
    }


def check_softmax(model: GPT) -> None:
    """Raises ValueError for a model whose attention is no softmax over all keys."""
    for block in model.blocks:
        assert isinstance(block, Block)
        if not isinstance(block.attention.core, DotProduct):
            kind = model.config.position.get("core", {}).get("kind")
            raise ValueError(
                f"position.core.kind={kind}: its weights are no softmax over all keys, so entropy and ranges mean "
                "nothing there; choose a run with position.core.kind=none"
            )


@contextmanager
def watched(model: GPT, watch: Watch) -> Iterator[None]:
    """Calls watch(layer, q, k, plan) before each layer's attention; q and k, (B, H, T, d), are not rotated yet."""

    def hook(layer: int) -> Callable[[torch.nn.Module, tuple], None]:
        return lambda _core, arguments: watch(layer, arguments[0], arguments[1], arguments[3])

    cores = [block.attention.core for block in model.blocks if isinstance(block, Block)]
    handles = [core.register_forward_pre_hook(hook(layer)) for layer, core in enumerate(cores)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def query_positions(length: int, queries: int) -> list[int]:
    """At most `queries` positions i, log-spaced from 10 keys (i = 9) on; the last one is length - 1."""
    keys = np.geomspace(length, min(10, length), queries).round().astype(int)
    return sorted({int(n) - 1 for n in keys})


def distance_ranges(length: int) -> list[tuple[int, int]]:
    """[0, 1), [1, 10), [10, 100), ...: the ranges of distances that begin below `length`."""
    edges = [0, 1]
    while edges[-1] < length:
        edges.append(10 * edges[-1])
    return list(pairwise(edges))


def query_statistics(
    q: Float[Tensor, "H T d"],
    k: Float[Tensor, "H T d"],
    plan: Plan,
    queries: Sequence[int],
    ranges: Sequence[tuple[int, int]],
) -> dict[str, Float[Tensor, "H Q *R"]]:
    """Of one layer, from rotated q and k: what each query's attention p = softmax(L) over its keys is like, in fp64.

        S = <R_i q_i, R_j k_j> / sqrt(d),    L = scale[t] s[i] temperature S + shift[t]

    entropy = -sum p log p; range_mass, the sum of p over each range; range_entropy, the entropy of p within it
    (definition 3.3); last_100, the sum of p over the 100 nearest keys; mean and variance over all keys of the logits L
    and of the scores S. The last range of a query ends at its first key; those beyond are nan.
    """
    by_query = [_of_query(q[:, i], k[:, : i + 1], plan, i, ranges) for i in queries]
    return {name: torch.stack([each[name] for each in by_query], 1) for name in by_query[0]}


def _of_query(q: Tensor, k: Tensor, plan: Plan, i: int, ranges: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    scores = (k @ q[:, :, None])[..., 0].flip(-1).double() / q.shape[-1] ** 0.5  # by distance t = 0 .. i
    logits = logits_by_distance(scores, plan, i)
    moments = {
        f"{name}_{what}": value
        for name, x in {"logit": logits, "score": scores}.items()
        for what, value in {"mean": x.mean(-1), "variance": x.var(-1, correction=0)}.items()
    }
    return {**attention_by_distance(logits, ranges), **moments}


def attention_by_distance(
    logits: Float[Tensor, "rows keys"], ranges: Sequence[tuple[int, int]]
) -> dict[str, Float[Tensor, "rows *R"]]:
    """The first four of `query_statistics`, from the logits at the distances 0 .. keys - 1."""
    keys = logits.shape[-1]
    starts = [start for start, _ in ranges if start < keys]
    whole, inside = range_statistics(logits, [0, keys]), range_statistics(logits, [*starts, keys])
    last = range_statistics(logits, [0, min(LAST, keys)])
    beyond = (0, len(ranges) - len(starts))
    return {
        "entropy": whole.entropy[:, 0],
        "range_mass": F.pad(inside.share(), beyond, value=math.nan),
        "range_entropy": F.pad(inside.entropy, beyond, value=math.nan),
        "last_100": (last.log_total - whole.log_total).exp()[:, 0],
    }


def random_pairs(length: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` pairs of query i and key j, 1 <= j <= i < length, each with the same probability.

    The lower triangle without the first token's column, whose scores are those of an attention sink.
    """
    one = torch.randint(1, length + 1, (count,), generator=generator)
    other = (one + torch.randint(1, length, (count,), generator=generator) - 1) % length + 1  # any but `one`
    return torch.maximum(one, other) - 1, torch.minimum(one, other)


def pair_scores(
    q: Float[Tensor, "H T d"], k: Float[Tensor, "H T d"], i: Int[Tensor, " n"], j: Int[Tensor, " n"]
) -> Float[Tensor, " Hn"]:
    """<q_i, k_j> / sqrt(d) of all heads; head by head, so that memory stays bounded."""
    i, j = i.to(q.device), j.to(q.device)
    heads = [torch.linalg.vecdot(q[head, i], k[head, j]) for head in range(q.shape[0])]
    return torch.cat(heads).cpu() / q.shape[-1] ** 0.5


def score_quantiles(scores: Float[Tensor, " n"]) -> dict[str, Any]:
    """Mean, standard deviation, and the quantiles at the probabilities of NORMAL_QUANTILES."""
    values = scores.double().numpy()
    quantiles = np.quantile(values, torch.special.ndtr(NORMAL_QUANTILES).numpy())
    return {"mean": float(values.mean()), "deviation": float(values.std()), "quantiles": quantiles.tolist()}
