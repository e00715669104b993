from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.loader import TokenStream
from data.shards import write_shard
from eval.loss import loss_by_length, loss_by_length_and_position, position_edges
from model.gpt import GPT
from training.distributed import ALONE, Process, Stopped

CPU = torch.device("cpu")
ROPE = {"rotary": {"kind": "rope"}}


class Share(Process):
    """One of several processes, whose part of the sum is looked at by itself."""

    def sum(self, x: Tensor) -> Tensor:
        return x


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 31, 500)


@pytest.fixture
def stream(tmp_path: Path, tokens: np.ndarray) -> TokenStream:
    write_shard(tmp_path / "a.bin", tokens[:210])
    write_shard(tmp_path / "b.bin", tokens[210:])
    return TokenStream([tmp_path / "a.bin", tmp_path / "b.bin"])


@pytest.fixture
def model(small_gpt: Callable[..., GPT]) -> GPT:
    return small_gpt(ROPE)


class Recorder(torch.nn.Module):
    """Stands in for a model, and keeps the batches that it is given."""

    def __init__(self):
        super().__init__()
        self.batches: list[tuple[Tensor, Tensor]] = []

    def forward(self, tokens: Tensor, targets: Tensor, reduction: str) -> Tensor:
        self.batches.append((tokens, targets))
        return torch.zeros(tokens.shape)


def by_hand(model: GPT, tokens: np.ndarray, length: int, n_tokens: int) -> float:
    """The mean over tokens, a sequence at a time, from the whole table of logits, in fp64."""
    return float(np.mean(table_by_hand(model, tokens, length, n_tokens)))


def table_by_hand(model: GPT, tokens: np.ndarray, length: int, n_tokens: int) -> np.ndarray:
    """The loss of every token, a row a sequence, a column a position."""
    losses = []
    for start in range(0, n_tokens, length):
        row = torch.from_numpy(tokens[start : start + length + 1])
        log_p = F.log_softmax(model(row[None, :-1])[0].double(), dim=-1)
        losses.append([-log_p[i, row[i + 1]].item() for i in range(length)])
    assert np.size(losses) == n_tokens
    return np.array(losses)


@torch.no_grad()
@pytest.mark.parametrize("length", [8, 24, 240])
def test_loss_is_the_mean_over_tokens_computed_by_hand(
    model: GPT, stream: TokenStream, tokens: np.ndarray, length: int
):
    loss = loss_by_length(model, stream, [length], 480, ALONE, micro_batch_tokens=72)
    assert loss == {length: pytest.approx(by_hand(model, tokens, length, 480), abs=1e-5)}


@pytest.mark.parametrize(
    ("length", "edges"),
    [(1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2, 3]), (24, [0, 1, 2, 4, 8, 16, 24]), (32, [0, 1, 2, 4, 8, 16, 32])],
)
def test_ranges_of_positions_begin_at_powers_of_two_and_end_at_the_length(length: int, edges: list[int]):
    assert position_edges(length) == edges


@torch.no_grad()
@pytest.mark.parametrize("length", [6, 24, 240])
def test_loss_by_position_is_the_mean_over_its_positions_computed_by_hand(
    model: GPT, stream: TokenStream, tokens: np.ndarray, length: int
):
    _, by_position = loss_by_length_and_position(model, stream, [length], 480, ALONE, micro_batch_tokens=72)
    found, table = by_position[length], table_by_hand(model, tokens, length, 480)
    assert found.edges == position_edges(length)
    for start, end, mean, count in zip(found.edges, found.edges[1:], found.mean, found.tokens, strict=False):
        assert mean == pytest.approx(table[:, start:end].mean(), abs=1e-5)
        assert count == table[:, start:end].size
    assert len(found.mean) == len(found.tokens) == len(found.edges) - 1
    assert sum(found.tokens) == 480


@pytest.mark.parametrize("micro_batch_tokens", [24, 100, 100_000])
def test_the_loss_by_length_beside_that_by_position_is_the_same_bit_for_bit(
    model: GPT, stream: TokenStream, micro_batch_tokens: int
):
    alone = loss_by_length(model, stream, [8, 24, 240], 480, ALONE, micro_batch_tokens)
    beside, by_position = loss_by_length_and_position(
        model, stream, [8, 24, 240], 480, ALONE, micro_batch_tokens=micro_batch_tokens
    )
    assert beside == alone
    for length, loss in alone.items():
        found = by_position[length]
        assert np.average(found.mean, weights=found.tokens) == pytest.approx(loss, rel=1e-12)


def test_the_loss_by_position_takes_one_forward_pass_a_batch(stream: TokenStream):
    recorder = Recorder()
    loss_by_length_and_position(recorder, stream, [24], 480, ALONE, micro_batch_tokens=240)  # pyright: ignore[reportArgumentType]
    assert len(recorder.batches) == 2


@pytest.mark.parametrize("micro_batch_tokens", [1, 24, 7 * 24, 100_000])
def test_the_batch_does_not_matter_even_where_the_last_one_is_smaller(
    model: GPT, stream: TokenStream, micro_batch_tokens: int
):
    whole = loss_by_length(model, stream, [24], 480, ALONE)  # 20 sequences
    assert loss_by_length(model, stream, [24], 480, ALONE, micro_batch_tokens)[24] == pytest.approx(whole[24], abs=1e-6)


def test_every_length_sees_the_same_tokens_and_targets(stream: TokenStream, tokens: np.ndarray):
    for length in (8, 24, 240):
        recorder = Recorder()
        loss_by_length(recorder, stream, [length], 480, ALONE, micro_batch_tokens=72)  # pyright: ignore[reportArgumentType]
        assert {inputs.shape[1] for inputs, _ in recorder.batches} == {length}
        seen = torch.cat([inputs.flatten() for inputs, _ in recorder.batches])
        wanted = torch.cat([targets.flatten() for _, targets in recorder.batches])
        assert seen.tolist() == tokens[:480].tolist()
        assert wanted.tolist() == tokens[1:481].tolist()


def test_a_longer_context_is_used(model: GPT, stream: TokenStream):
    losses = loss_by_length(model, stream, [8, 240], 480, ALONE)
    assert losses[8] != pytest.approx(losses[240], abs=1e-6)


@pytest.mark.parametrize("world_size", [2, 3, 30])
def test_the_shares_of_the_processes_add_up(model: GPT, stream: TokenStream, world_size: int):
    whole = loss_by_length(model, stream, [24, 240], 480, ALONE)
    shares = [
        loss_by_length(model, stream, [24, 240], 480, Share(rank, world_size, CPU, "fp32"))
        for rank in range(world_size)
    ]
    for length, loss in whole.items():
        assert sum(share[length] for share in shares) == pytest.approx(loss, abs=1e-6)


def test_what_is_called_between_batches_can_end_an_evaluation(model: GPT, stream: TokenStream):
    calls = []

    def between() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise Stopped

    with pytest.raises(Stopped):
        loss_by_length(model, stream, [24, 240], 480, ALONE, micro_batch_tokens=240, between=between)
    calls[:] = [0] * 10
    loss_by_length(model, stream, [24, 240], 480, ALONE, micro_batch_tokens=240, between=between)
    assert len(calls) == 10 + 2 + 2


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_process_is_called_between_as_many_batches(model: GPT, stream: TokenStream, rank: int):
    """Also one that has none left: what is called may wait for the others."""
    calls: list[int] = []
    loss_by_length(model, stream, [240], 480, Share(rank, 3, CPU, "fp32"), 240, between=lambda: calls.append(1))
    assert len(calls) == 1


def test_bf16_products_change_the_loss_a_little(model: GPT, stream: TokenStream):
    exact = loss_by_length(model, stream, [24], 480, ALONE)[24]
    rounded = loss_by_length(model, stream, [24], 480, Process(0, 1, CPU, "bf16"))[24]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)


def test_nothing_is_kept_for_a_gradient(model: GPT, stream: TokenStream):
    loss_by_length(model, stream, [24], 480, ALONE)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("length", "n_tokens"), [(24, 100), (500, 500), (24, 4800)])
def test_what_does_not_fit_the_tokens_is_refused(model: GPT, stream: TokenStream, length: int, n_tokens: int):
    with pytest.raises(ValueError, match=str(n_tokens)):
        loss_by_length(model, stream, [length], n_tokens, ALONE)
