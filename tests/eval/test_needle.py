"""What counts as found, and the accuracies that come of it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch.nn.functional import cross_entropy

import eval.needle as needle_module
from data.loader import TokenStream
from data.needle import NeedleSamples, NeedleTask, Sample
from data.shards import write_shard
from data.tokenizer import load_tokenizer
from eval.figures import save_figure
from eval.needle import MARGIN, Outcome, answer_loss, find_needles, parse_answer, summarise
from eval.needle_figure import heat_map
from model.gpt import GPT
from training.distributed import Process

LENGTH = 180
TASK = NeedleTask(needles=2, digits=3)
ALONE = Process(rank=0, world_size=1, device=torch.device("cpu"), precision="fp32")
BYTES = load_tokenizer("bytes")


@pytest.fixture
def samples(tmp_path: Path) -> NeedleSamples:
    path = tmp_path / "text_val_000000.bin"
    write_shard(path, BYTES.encode("The state of the union is strong; so it was said, and said again. " * 20))
    return NeedleSamples(TokenStream([path]), BYTES, TASK, seed=0, split="test")


@pytest.fixture
def gpt(small_gpt: Callable[..., GPT]) -> GPT:
    return small_gpt({"rotary": {"kind": "yarn"}}, vocab_size=264, train_length=64).eval()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Rome=1234567;Salt Lake City=7654321", {"Rome": "1234567", "Salt Lake City": "7654321"}),
        ("Salt Lake City=7654321;Rome=1234567", {"Rome": "1234567", "Salt Lake City": "7654321"}),
        (" Rome = 1234567 ; Oslo=7654321\n", {"Rome": "1234567", "Oslo": "7654321"}),
        ("Rome=12345678", {"Rome": "12345678"}),
        ("Rome=1234567 or so;Oslo=7654321", {"Oslo": "7654321"}),
        ("Rome=1234567;Rome=7654321;Rome=1234567", {"Rome": "1234567"}),
        ("Rome=1,234,567;Oslo=-7654321;Bern=7654321.0;Lima=", {}),
        ("Rome=Oslo=1234567", {}),
        ("=1234567", {}),
        ("Rome=١٢٣٤٥٦٧", {}),
        ("", {}),
        ("the answer is 1234567", {}),
    ],
)
def test_an_answer_is_parsed_strictly(text: str, named: dict[str, str]):
    assert parse_answer(text) == named


def answer_with(monkeypatch: pytest.MonkeyPatch, write: Callable[[Sample], str], samples: NeedleSamples) -> None:
    """Lets the model's own answers be what `write` gives for a sample."""

    def generate(model, prompts, max_new_tokens, **kwargs):
        by_prompt = {tuple(s.prompt): s for s in (samples.sample(index, LENGTH) for index in range(6))}
        return [BYTES.encode(write(by_prompt[tuple(p)])).tolist()[:max_new_tokens] for p in prompts]

    monkeypatch.setattr(needle_module, "generate", generate)


@pytest.mark.parametrize(
    ("write", "accuracy"),
    [
        (lambda sample: sample.answer, 1.0),
        (lambda sample: ";".join(sample.answer.split(";")[::-1]), 1.0),
        (lambda sample: f"{sample.answer};{sample.answer}", 1.0),
        (lambda sample: sample.answer + "0", 0.5),
        (lambda sample: sample.answer.split(";")[0], 0.5),
        (lambda sample: sample.answer.lower(), 0.0),
        (lambda sample: sample.answer.replace("=", ""), 0.0),
        (lambda sample: "", 0.0),
    ],
    ids=["right", "other order", "twice", "longer number", "one of two", "lower case", "no sign", "nothing"],
)
def test_accuracy_is_the_share_of_needles_with_city_and_number_right(
    write: Callable[[Sample], str],
    accuracy: float,
    gpt: GPT,
    samples: NeedleSamples,
    monkeypatch: pytest.MonkeyPatch,
):
    answer_with(monkeypatch, write, samples)
    result = summarise(find_needles(gpt, samples, LENGTH, 6, ALONE))
    assert result["mean"] == accuracy
    assert result["needles"] == 12
    assert result["samples"] == 6


@torch.no_grad()
def test_answers_are_the_greedy_ones_and_teacher_forcing_reads_the_true_ones(gpt: GPT, samples: NeedleSamples):
    """Both by whole forward passes; the weights are moved until some tokens are right and some are not."""
    limit = samples.answer_limit + MARGIN
    for outcome in find_needles(gpt, samples, LENGTH, 3, ALONE, tokens_at_once=200):
        sample = outcome.sample
        tokens = sample.prompt
        for _ in range(limit):
            whole = torch.tensor([tokens + [0] * (len(sample.prompt) + limit - len(tokens))])
            tokens.append(int(gpt(whole)[0, len(tokens) - 1, : BYTES.vocab_size].argmax()))
            if tokens[-1] == BYTES.end_of_text:
                tokens.pop()
                break
        assert outcome.answer == BYTES.decode(tokens[len(sample.prompt) :])


@torch.no_grad()
def test_teacher_forcing_asks_for_each_token_behind_the_true_ones(gpt: GPT, samples: NeedleSamples):
    batch = [samples.sample(index, LENGTH) for index in range(4)]
    gpt.output.weight[BYTES.end_of_text] += 3 * gpt.output.weight.abs().max()  # right at the very end, now and then
    right = needle_module.teacher_forced(gpt, batch, BYTES.vocab_size, ALONE.autocast)
    seen = set()
    for row, sample in enumerate(batch):
        best = gpt(torch.from_numpy(sample.tokens)[None])[0, :, : BYTES.vocab_size].argmax(-1).numpy()
        for place in range(LENGTH):
            expected = place >= sample.prompt_length and best[place - 1] == sample.tokens[place]
            assert right[row, place] == expected
            seen.add(bool(expected))
    assert seen == {True, False}


def outcome(sample: Sample, found: tuple[bool, bool], forced: tuple[bool, bool] = (False, False)) -> Outcome:
    return Outcome(sample, 0, "", found, forced)


def test_the_standard_error_is_over_samples(samples: NeedleSamples):
    sample = samples.sample(0, LENGTH)
    found = [(True, True), (True, False), (False, False), (True, True)]
    result = summarise([outcome(sample, one, (one[1], one[0])) for one in found])
    shares = np.array([1, 0.5, 0, 1])
    assert result["mean"] == shares.mean()
    assert result["stderr"] == pytest.approx(shares.std(ddof=1) / 2)
    assert result["teacher_forced"]["mean"] == shares.mean()
    assert summarise([outcome(sample, (True, False))])["stderr"] is None


def test_needles_are_counted_by_their_depth(samples: NeedleSamples):
    outcomes = [outcome(samples.sample(index, LENGTH), (True, False)) for index in range(40)]
    by_depth = summarise(outcomes)["by_depth"]
    needles = [(n.depth, right) for o in outcomes for n, right in zip(o.sample.needles, o.found, strict=True)]
    assert sum(part["needles"] for part in by_depth) == 80
    for part in by_depth:
        inside = [right for depth, right in needles if part["from"] <= depth < part["to"] or depth == part["to"] == 1.0]
        assert part["needles"] == len(inside)
        assert part["mean"] == (pytest.approx(np.mean(inside)) if inside else None)


def test_a_record_says_what_was_asked_and_answered(samples: NeedleSamples):
    sample = samples.sample(2, LENGTH)
    record = json.loads(json.dumps(Outcome(sample, 2, "Rome=1", (True, False), (False, True)).record(BYTES)))
    assert record["index"] == 2
    assert record["length"] == LENGTH
    assert record["expected"] == sample.answer
    assert record["answer"] == "Rome=1"
    assert [needle["found"] for needle in record["needles"]] == [True, False]
    assert [needle["teacher_forced"] for needle in record["needles"]] == [False, True]
    assert [needle["start"] for needle in record["needles"]] == [needle.start for needle in sample.needles]
    assert record["end_of_prompt"].endswith("\nAnswer: ")


@torch.no_grad()
@pytest.mark.parametrize("tokens_at_once", [1, 400, 65536])
def test_answer_loss_is_the_mean_over_answer_tokens(gpt: GPT, samples: NeedleSamples, tokens_at_once: int):
    losses = []
    for index in range(5):
        sample = samples.sample(index, LENGTH)
        tokens = torch.from_numpy(sample.tokens)
        logits = gpt(tokens[None])[0]
        losses.append(
            cross_entropy(logits[sample.prompt_length - 1 : -1], tokens[sample.prompt_length :], reduction="none")
        )
    expected = torch.cat(losses).mean().item()
    assert answer_loss(gpt, samples, LENGTH, 5, ALONE, tokens_at_once) == pytest.approx(expected, rel=1e-5)


def test_the_heat_map_shows_each_length_and_leaves_empty_depths_white(samples: NeedleSamples, tmp_path: Path):
    accuracy = {
        "64": summarise([outcome(samples.sample(0, LENGTH), (True, True))]),
        "256": summarise([outcome(samples.sample(index, LENGTH), (index % 2 == 0, False)) for index in range(30)]),
    }
    figure = heat_map(accuracy, "Needles found")
    axes = figure.axes[0]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["64\n1.00", "256\n0.25"]
    grid = np.ma.asarray(axes.images[0].get_array()).filled(np.nan)
    assert grid.shape == (10, 2)
    assert np.isnan(grid[:, 0]).sum() >= 8
    png, _ = save_figure(figure, tmp_path / "needle")
    assert imread(png).std() > 0.05
