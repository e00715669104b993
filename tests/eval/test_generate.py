"""Cached decoding against whole forward passes, and the choice of tokens against its definition."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.functional import pad

from data.tokenizer import load_tokenizer
from eval.generate import Sampling, StopAt, generate
from model.gpt import GPT, Block

TRAIN_LENGTH, LIMIT = 16, 48  # the small model's, and the longest sequence here: far beyond it
SCHEMES = sorted((Path(__file__).resolve().parents[2] / "configs" / "position").glob("*.yaml"))
every_scheme = pytest.mark.parametrize("path", SCHEMES, ids=lambda path: path.stem)


def build(path: Path, small_gpt: Callable[..., GPT]) -> GPT:
    """A small model of a scheme, whose attention weighs most of all; an Infini-attention segment is 6 tokens."""
    position: Any = OmegaConf.to_container(OmegaConf.load(path))
    if "core" in position:
        position["core"]["segment_length"] = 6
    gpt = small_gpt(position).eval()
    for block in gpt.blocks:
        assert isinstance(block, Block)
        block.attention.out.weight.data *= 8  # else it says one token for ever, whatever it has read
    return gpt


def whole_logits(gpt: GPT, tokens: Tensor) -> Tensor:
    """Logits at each token of the sequence, from one forward pass at LIMIT tokens; what is behind them is not seen."""
    with torch.no_grad():
        return gpt(pad(tokens, (0, LIMIT - tokens.shape[1])))[:, : tokens.shape[1]]


def greedy(gpt: GPT, prompt: list[int], count: int, whole: bool = True) -> list[int]:
    """The most probable continuation, by a whole forward pass a token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(whole_logits(gpt, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(length).integers(31, size=length).tolist() for length in lengths]


@every_scheme
def test_cached_logits_equal_those_of_a_whole_pass_at_each_token(path: Path, small_gpt: Callable[..., GPT]):
    """In pieces that cross the training length and, for Infini-attention, segments in one and in several steps."""
    gpt = build(path, small_gpt)
    tokens = torch.randint(31, (2, LIMIT))
    expected, cache, stop = whole_logits(gpt, tokens), gpt.new_cache(2, LIMIT), 0
    for count in (1, 3, 9, 17, *[1] * 18):
        start, stop = stop, stop + count
        logits = gpt.extend(tokens[:, start:stop], [cache])
        torch.testing.assert_close(logits, expected[:, stop - 1], atol=2e-5, rtol=1e-4)
    assert stop == cache.length == LIMIT


@every_scheme
def test_greedy_decoding_equals_whole_passes_token_for_token_across_the_training_length(
    path: Path, small_gpt: Callable[..., GPT]
):
    gpt = build(path, small_gpt)
    (prompt,) = prompts(TRAIN_LENGTH - 5)
    count = LIMIT - len(prompt)
    new = generate(gpt, [prompt], count)
    assert new == [greedy(gpt, prompt, count)]
    assert len(set(new[0])) > 3  # so it does depend on what the cache holds


@every_scheme
def test_a_batch_of_any_lengths_gives_what_each_prompt_gives_alone(path: Path, small_gpt: Callable[..., GPT]):
    gpt = build(path, small_gpt)
    batch = prompts(3, 21, 3, 1, 14)
    sampling = Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=5)
    together = generate(gpt, batch, 12, sampling)
    for row, prompt in enumerate(batch):
        alone = Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=5 + row)
        assert generate(gpt, [prompt], 12, alone) == [together[row]]
    assert generate(gpt, batch, 12) == [generate(gpt, [prompt], 12)[0] for prompt in batch]


@every_scheme
def test_how_much_of_a_prompt_is_fed_at_a_time_does_not_matter(path: Path, small_gpt: Callable[..., GPT]):
    gpt = build(path, small_gpt)
    batch = prompts(29, 29, 8)
    whole = generate(gpt, batch, 8)
    for tokens in (1, 7, 16):
        assert generate(gpt, batch, 8, prefill_tokens=tokens) == whole


@pytest.mark.parametrize("name", ["rope_ntk", "yarn"])
def test_the_inference_length_is_fixed_at_the_start(name: str, small_gpt: Callable[..., GPT]):
    """A short sequence of a long-context deployment is computed as the start of a long one."""
    path = next(path for path in SCHEMES if path.stem == name)
    gpt = build(path, small_gpt)
    (prompt,) = prompts(5)
    long = generate(gpt, [prompt], 12, inference_length=LIMIT)
    assert long == [greedy(gpt, prompt, 12)]
    seen = []
    for length in (17, LIMIT):
        cache = gpt.new_cache(1, length)
        seen.append(gpt.extend(torch.tensor([prompt]), [cache]))
    assert not torch.allclose(*seen)


def test_an_infini_cache_does_not_grow_with_the_sequence(small_gpt: Callable[..., GPT]):
    gpt = build(next(path for path in SCHEMES if path.stem == "infini_rope"), small_gpt)
    assert [layer.capacity for layer in gpt.new_cache(1, 1000).layers] == [6, 6]


def test_a_cache_refuses_more_than_its_inference_length(small_gpt: Callable[..., GPT]):
    gpt = small_gpt()
    cache = gpt.new_cache(1, 4)
    gpt.extend(torch.zeros(1, 3, dtype=torch.long), [cache])
    with pytest.raises(ValueError, match="inference_length=4"):
        gpt.extend(torch.zeros(1, 2, dtype=torch.long), [cache])


def test_a_finished_prompt_gets_no_more_tokens_and_leaves_the_others_as_they_are(small_gpt: Callable[..., GPT]):
    gpt = small_gpt()
    batch = prompts(4, 4, 9)
    free = generate(gpt, batch, 10)
    asked: Counter[int] = Counter()

    def done(row: int, tokens: list[int]) -> bool:
        asked[row] += 1
        return len(tokens) == {0: 2, 1: 99, 2: 1}[row]

    assert generate(gpt, batch, 10, done=done) == [free[0][:2], free[1], free[2][:1]]
    assert asked == {0: 2, 1: 10, 2: 1}


def test_ids_that_only_fill_up_the_output_layer_are_never_chosen(small_gpt: Callable[..., GPT]):
    gpt = small_gpt()
    hot = Sampling(temperature=50.0)
    assert max(generate(gpt, [[1, 2, 3, 4]], 200, hot)[0]) > 20
    assert max(generate(gpt, [[1, 2, 3, 4]], 200, hot, vocab_size=32 - 11)[0]) == 20


# Sampling

LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.0, 2.5])


def test_probabilities_are_the_softmax_over_the_temperature():
    expected = np.exp(np.array(LOGITS.tolist()) / 0.7)
    np.testing.assert_allclose(Sampling(0.7).probabilities(LOGITS), expected / expected.sum(), rtol=1e-6)


def test_top_k_and_top_p_keep_the_most_probable_tokens():
    p = Sampling(1.0).probabilities(LOGITS)  # about 0.05, 0.30, 0.01, 0.11, 0.50
    cases = [({"top_k": 2}, {1, 4}), ({"top_p": 0.6}, {1, 4}), ({"top_p": 0.4}, {4}), ({"top_p": 0.85}, {1, 3, 4})]
    for keys, kept in [*cases, ({"top_k": 9, "top_p": 1.0}, set(range(5))), ({"top_k": 3, "top_p": 0.5}, {4})]:
        got = Sampling(1.0, **keys).probabilities(LOGITS)
        assert set(got.nonzero().flatten().tolist()) == kept
        ratio = got[list(kept)] / p[list(kept)]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def test_top_k_keeps_k_of_equal_tokens():
    assert (Sampling(1.0, top_k=2).probabilities(torch.zeros(5)) > 0).sum() == 2


def test_draws_have_the_frequencies_of_the_probabilities():
    sampling = Sampling(1.0, top_k=4)
    (generator,) = sampling.generators(1)
    counts = np.bincount([sampling.choose(LOGITS, generator) for _ in range(4000)], minlength=5)
    p = sampling.probabilities(LOGITS).numpy()
    np.testing.assert_allclose(counts / 4000, p, atol=4 * 0.5 / 4000**0.5)
    assert counts[2] == 0


def test_a_seed_repeats_itself_and_another_one_does_not(small_gpt: Callable[..., GPT]):
    gpt, batch = small_gpt(), prompts(4, 6)
    first, again, other = (generate(gpt, batch, 20, Sampling(1.0, seed=seed)) for seed in (3, 3, 99))
    assert first == again != other


def test_equal_prompts_are_continued_differently(small_gpt: Callable[..., GPT]):
    (prompt,) = prompts(5)
    a, b = generate(small_gpt(), [prompt, prompt], 20, Sampling(1.0))
    assert a != b


@pytest.mark.parametrize(
    "keys",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1.5},
        {"seed": -1},
        {"top_k": 3},
    ],
    ids=str,
)
def test_bad_sampling_names_its_key(keys: dict[str, Any]):
    name = list(keys)[-1]
    with pytest.raises(ValueError, match=f"{name}={keys[name]}"):
        Sampling(**keys)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompts": []}, "no prompt"),
        ({"prompts": [[1], []]}, "prompt 1 holds no token"),
        ({"prompts": [[31]]}, "prompt 0 has ids 31 to 31, outside 0 to 30"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prefill_tokens": 0}, "prefill_tokens=0"),
        ({"inference_length": 5}, "inference_length=5 .* raise it to 6"),
    ],
    ids=str,
)
def test_generate_refuses(given: dict[str, Any], words: str, small_gpt: Callable[..., GPT]):
    with pytest.raises(ValueError, match=words):
        generate(small_gpt(), **{"prompts": [[1, 2, 3]], "max_new_tokens": 3, **given})


# Stopping


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_a_text_ends_at_the_first_stop_string_wherever_tokens_are_cut(name: str):
    tokenizer = load_tokenizer(name)
    stop = StopAt(tokenizer, ["fin é", "\n\n"])
    text = "the final fin ever, fin élan\n\nand so on"
    tokens = tokenizer.encode(text).tolist()
    ends = [end for end in range(1, len(tokens) + 1) if stop(0, tokens[:end])]
    first = next(end for end in range(1, len(tokens) + 1) if "fin é" in tokenizer.decode(tokens[:end]))
    assert ends[0] == first
    assert stop.text(tokens[:first]) == stop.text(tokens) == "the final fin ever, "


def test_a_text_ends_at_its_end_of_text_token():
    tokenizer = load_tokenizer("bytes")
    stop, tokens = StopAt(tokenizer), tokenizer.encode("done").tolist()
    assert not stop(0, tokens)
    assert stop(0, [*tokens, 256])
    assert stop.text([*tokens, 256]) == stop.text(tokens) == "done"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop="):
        StopAt(load_tokenizer("bytes"), [""])
