"""Needle-in-a-haystack samples, by what they decode to."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.cities import CITIES
from data.loader import TokenStream
from data.needle import NeedleBatches, NeedleSamples, NeedleTask, training_rows
from data.shards import write_shard
from data.tokenizer import Tokenizer, load_tokenizer

TEXT = "We hold that work, bread & café life — naïve or not — are every citizen's due. " * 60


@pytest.fixture(params=["bytes", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(request.param)


def samples(
    folder: Path, tokenizer: Tokenizer, split: str = "train", seed: int = 0, task: NeedleTask | None = None
) -> NeedleSamples:
    path = folder / f"text_{split}_000000.bin"
    write_shard(path, np.concatenate([[tokenizer.end_of_text], tokenizer.encode(TEXT)]))
    return NeedleSamples(TokenStream([path]), tokenizer, task or NeedleTask(), seed, split)


def test_there_are_at_least_200_cities_in_plain_letters_each_once():
    assert len(CITIES) == len(set(CITIES)) >= 200
    assert all(re.fullmatch(r"[A-Z][A-Za-z]*( [A-Za-z]+)*", city) for city in CITIES)


@pytest.mark.parametrize("length", [250, 257, 600])
def test_a_sample_has_exactly_the_asked_length_with_its_answer(tmp_path: Path, tokenizer: Tokenizer, length: int):
    made = samples(tmp_path, tokenizer)
    for index in range(20):
        sample = made.sample(index, length)
        assert sample.tokens.shape == (length,)
        assert sample.tokens[-1] == tokenizer.end_of_text
        assert tokenizer.decode(sample.tokens[sample.prompt_length : -1]) == sample.answer


def test_needles_decode_to_exactly_their_sentence_where_the_sample_says(tmp_path: Path, tokenizer: Tokenizer):
    made = samples(tmp_path, tokenizer)
    for index in range(20):
        sample = made.sample(index, 300)
        cities = [needle.city for needle in sample.needles]
        assert len(set(cities)) == 3
        assert set(cities) <= set(CITIES)
        for needle in sample.needles:
            assert re.fullmatch(r"[1-9][0-9]{6}", needle.number)
            text = tokenizer.decode(sample.tokens[needle.start : needle.stop])
            assert text == f"The special magic {needle.city} number is {needle.number}."
            assert text in tokenizer.decode(sample.tokens)
        assert sample.answer == ";".join(f"{needle.city}={needle.number}" for needle in sample.needles)


def test_without_its_needles_the_prompt_is_a_stretch_of_the_haystack(tmp_path: Path, tokenizer: Tokenizer):
    made = samples(tmp_path, tokenizer)
    stream = made.stream.read(0, len(made.stream))
    cue = tokenizer.encode("\nAnswer: ")
    for index in range(20):
        sample = made.sample(index, 300)
        prompt = sample.tokens[: sample.prompt_length]
        assert np.array_equal(prompt[-len(cue) :], cue)
        kept = np.ones(len(prompt) - len(cue), bool)
        for needle in sample.needles:
            assert kept[needle.start : needle.stop].all()  # they do not overlap
            assert needle.depth == pytest.approx(kept[: needle.start].sum() / (kept.size - sum_of_needles(sample)))
            kept[needle.start : needle.stop] = False
        haystack = prompt[: len(kept)][kept]
        windows = np.lib.stride_tricks.sliding_window_view(stream, len(haystack))
        assert (windows == haystack).all(axis=1).any()


def sum_of_needles(sample) -> int:
    return sum(needle.stop - needle.start for needle in sample.needles)


def test_needles_appear_in_order_at_uniform_depths(tmp_path: Path):
    made = samples(tmp_path, load_tokenizer("bytes"))
    needles = [made.sample(index, 600).needles for index in range(400)]
    depths = np.array([[needle.depth for needle in of_sample] for of_sample in needles])
    assert (np.diff(depths) > 0).all()
    counts, _ = np.histogram(depths, bins=10, range=(0, 1))
    assert depths.min() < 0.01
    assert depths.max() > 0.99
    assert np.abs(counts - 120).max() < 4 * 120**0.5
    first_cities = Counter(of_sample[0].city for of_sample in needles)
    assert len(first_cities) > 150  # not in the order of the list


def test_a_sample_is_a_pure_function_of_seed_split_index_and_length(tmp_path: Path):
    coder = load_tokenizer("bytes")
    made = samples(tmp_path, coder)
    sample = made.sample(5, 300)
    made.sample(6, 300)
    again = samples(tmp_path, coder).sample(5, 300)
    assert np.array_equal(again.tokens, sample.tokens)
    assert again.needles == sample.needles
    others = [
        made.sample(6, 300),
        made.sample(5, 301),
        samples(tmp_path, coder, seed=1).sample(5, 300),
        *(samples(tmp_path, coder, split).sample(5, 300) for split in ("val", "test")),
    ]
    answers = {other.answer for other in others}
    assert len(answers | {sample.answer}) == 6


def test_every_needle_fits_in_the_shortest_length_that_is_allowed(tmp_path: Path, tokenizer: Tokenizer):
    made = samples(tmp_path, tokenizer)
    with pytest.raises(ValueError, match=r"length=1 is too short: 3 needles .* use at least (\d+)") as refusal:
        made.check(1)
    least = int(str(refusal.value).split("use at least ")[1].split(",")[0])
    made.check(least)
    for index in range(300):
        sample = made.sample(index, least)
        assert len(sample.tokens) - sample.prompt_length <= made.answer_limit
    with pytest.raises(ValueError, match="too short"):
        made.check(least - 1)


def test_a_haystack_with_too_few_tokens_is_refused(tmp_path: Path):
    made = samples(tmp_path, load_tokenizer("bytes"))
    made.check(len(made.stream))
    with pytest.raises(ValueError, match=r"has \d+ tokens .* split=train, fewer than length=9999"):
        made.check(9999)


def test_fewer_needles_and_digits_and_other_words(tmp_path: Path):
    coder = load_tokenizer("bytes")
    task = NeedleTask(template="{number} is what {city} says!", needles=2, digits=2, cue=" ?")
    sample = samples(tmp_path, coder, task=task).sample(0, 100)
    assert re.fullmatch(r"[A-Za-z ]+=[1-9]\d;[A-Za-z ]+=[1-9]\d", sample.answer)
    assert coder.decode(sample.prompt).endswith(" ?")
    first = sample.needles[0]
    assert coder.decode(sample.tokens[first.start : first.stop]) == f"{first.number} is what {first.city} says!"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"needles": 0}, "needles=0"),
        ({"needles": 9999}, "needles=9999"),
        ({"digits": 0}, "digits=0"),
        ({"template": "The number is {number}."}, "template=.*city"),
        ({"template": "{city} {city} {number}"}, "template=.*once"),
    ],
    ids=str,
)
def test_a_task_that_makes_no_sense_is_refused(keys: dict, words: str):
    with pytest.raises(ValueError, match=words):
        replace(NeedleTask(), **keys)


def test_an_unknown_split_is_refused(tmp_path: Path):
    coder = load_tokenizer("bytes")
    made = samples(tmp_path, coder)
    with pytest.raises(ValueError, match="split=exam"):
        NeedleSamples(made.stream, coder, NeedleTask(), 0, "exam")


# Training batches


def test_only_answer_tokens_are_targets(tmp_path: Path, tokenizer: Tokenizer):
    made = samples(tmp_path, tokenizer)
    batch = [made.sample(index, 300) for index in range(3)]
    tokens, targets = training_rows(batch)
    assert tokens.shape == targets.shape == (3, 300)
    for row, sample in enumerate(batch):
        assert np.array_equal(tokens[row], sample.tokens)
        wanted = targets[row][targets[row] >= 0]
        assert tokenizer.decode(wanted[:-1].numpy()) == sample.answer
        assert wanted[-1] == tokenizer.end_of_text
        at = torch.nonzero(targets[row] >= 0).flatten()
        assert torch.equal(tokens[row, at + 1], wanted)  # the target at a token is the one behind it


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_is_the_same_rows_however_many_processes_share_it(tmp_path: Path, world_size: int):
    made = samples(tmp_path, load_tokenizer("bytes"))
    whole = NeedleBatches(made, 256, 8).batch(3)
    parts = [NeedleBatches(made, 256, 8, rank, world_size).batch(3) for rank in range(world_size)]
    for all_rows, of_parts in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(of_parts), all_rows)
    assert not torch.equal(whole[0], NeedleBatches(made, 256, 8).batch(2)[0])


def test_no_training_sample_comes_twice(tmp_path: Path):
    batches = NeedleBatches(samples(tmp_path, load_tokenizer("bytes")), 256, 4)
    rows = torch.cat([batches.batch(step)[0] for step in range(10)])
    assert len(rows.unique(dim=0)) == 40


def test_the_first_steps_take_shorter_samples_and_as_many_tokens(tmp_path: Path):
    made = samples(tmp_path, load_tokenizer("bytes"), task=NeedleTask(needles=1))
    batches = NeedleBatches(made, 256, 4, first_length=128, first_steps=2)
    assert [tuple(batches.batch(step)[0].shape) for step in range(4)] == [(8, 128), (8, 128), (4, 256), (4, 256)]
    first = torch.cat([batches.batch(step)[0] for step in range(2)])
    expected = [made.sample(index, 128).tokens for index in range(16)]
    assert np.array_equal(first.numpy(), expected)
    halves = [NeedleBatches(made, 256, 4, rank, 2, first_length=128, first_steps=2).batch(1)[0] for rank in range(2)]
    assert torch.equal(torch.cat(halves), first[8:])


def test_first_samples_of_which_no_whole_number_fits_are_refused(tmp_path: Path):
    made = samples(tmp_path, load_tokenizer("bytes"), task=NeedleTask(needles=1))
    with pytest.raises(ValueError, match=r"train.first_length=100 must divide train.length=256"):
        NeedleBatches(made, 256, 4, first_length=100, first_steps=2)
    with pytest.raises(ValueError, match="length=64 is too short"):
        NeedleBatches(made, 256, 4, first_length=64, first_steps=2)


def test_processes_that_cannot_share_the_rows_are_refused(tmp_path: Path):
    made = samples(tmp_path, load_tokenizer("bytes"))
    with pytest.raises(ValueError, match=r"2 processes .* train.rows=3"):
        NeedleBatches(made, 256, 3, 0, 2)
