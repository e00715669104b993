import copy
import math
from pathlib import Path

import pytest
import torch

from tests.tiny_run import VOCAB_SIZE, tiny_config
from training.distributed import ALONE, Process
from training.state import TrainState, build_state
from training.step import StepResult, micro_batch_rows, train_step, wrap


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (8, 32))


@pytest.fixture
def targets() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (8, 32))


def varied_state(folder: Path) -> TrainState:
    """A run whose weights are no longer the initial zeros, so that every parameter has a gradient."""
    state = build_state(tiny_config(folder, "position=logn_p_rope"))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.normal_(std=0.2)
    return state


def gradients_of_a_step(
    state: TrainState, tokens: torch.Tensor, targets: torch.Tensor, micro_rows: int
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """What one train_step gives, and the gradients that its optimizers see."""
    seen: dict[str, torch.Tensor] = {}

    def look(*_) -> None:
        for name, parameter in state.model.named_parameters():
            assert parameter.grad is not None
            seen[name] = parameter.grad.clone()

    state.optimizers[0].register_step_pre_hook(look)
    result = train_step(state, wrap(state.model, ALONE), tokens, targets, micro_rows, 1.0, ALONE)
    return result, seen


@pytest.mark.parametrize("micro_rows", [1, 2, 4, 8])
def test_accumulated_gradients_are_those_of_the_mean_loss_over_all_tokens(
    tmp_path: Path, tokens: torch.Tensor, targets: torch.Tensor, micro_rows: int
):
    reference = varied_state(tmp_path).model
    mean = reference(tokens, targets)
    mean.backward()
    result, gradients = gradients_of_a_step(varied_state(tmp_path), tokens, targets, micro_rows)
    assert result.loss == pytest.approx(mean.item() * tokens.numel(), rel=1e-5)
    assert result.grad_norm == pytest.approx(sum(g.double().square().sum().item() for g in gradients.values()) ** 0.5)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.any(), name
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_a_step_moves_every_parameter_counts_itself_and_forgets_its_gradients(
    tmp_path: Path, tokens: torch.Tensor, targets: torch.Tensor
):
    state = varied_state(tmp_path)
    before = {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}
    train_step(state, state.model, tokens, targets, 8, 1.0, ALONE)
    assert state.step == 1
    for name, parameter in state.model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
        assert parameter.grad is None


def test_a_step_at_factor_zero_moves_nothing(tmp_path: Path, tokens: torch.Tensor, targets: torch.Tensor):
    state = varied_state(tmp_path)
    before = {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}
    train_step(state, state.model, tokens, targets, 8, 0.0, ALONE)
    for name, parameter in state.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_bf16_keeps_the_weights_in_fp32_and_the_loss_close(tmp_path: Path, tokens: torch.Tensor, targets: torch.Tensor):
    process = Process(rank=0, world_size=1, device=torch.device("cpu"), precision="bf16")
    state, reference = varied_state(tmp_path), varied_state(tmp_path)
    loss = train_step(state, state.model, tokens, targets, 8, 1.0, process).loss
    exact = train_step(reference, reference.model, tokens, targets, 8, 1.0, ALONE).loss
    assert {parameter.dtype for parameter in state.model.parameters()} == {torch.float32}
    assert loss != exact  # autocast did something
    assert loss == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
def test_a_step_with_a_gradient_that_is_not_finite_counts_and_changes_nothing_else(
    tmp_path: Path, tokens: torch.Tensor, targets: torch.Tensor, spoilt: float
):
    state = varied_state(tmp_path)
    train_step(state, state.model, tokens, targets, 8, 1.0, ALONE)
    before = copy.deepcopy([state.model.state_dict(), [o.state_dict()["state"] for o in state.optimizers]])
    one = state.model.embedding.weight.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), spoilt))
    result = train_step(state, state.model, tokens, targets, 8, 1.0, ALONE)
    one.remove()
    assert result.nonfinite == ["gradient"]
    assert state.nonfinite == {"loss": 0, "gradient": 1}
    assert state.step == 2
    after = [state.model.state_dict(), [o.state_dict()["state"] for o in state.optimizers]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert train_step(state, state.model, tokens, targets, 8, 1.0, ALONE).nonfinite == []  # no trace of it


@pytest.mark.parametrize(
    ("rows", "length", "micro_batch_tokens", "expected"),
    [
        (128, 4096, 65536, 16),
        (8, 65536, 65536, 1),
        (1, 65536, 4096, 1),  # at least one sequence, however long
        (12, 256, 256 * 5, 4),  # a divisor of 12
        (7, 256, 256 * 6, 1),
        (8, 32, 1_000_000, 8),
    ],
)
def test_micro_batch_is_the_largest_divisor_that_fits(rows: int, length: int, micro_batch_tokens: int, expected: int):
    assert micro_batch_rows(rows, length, micro_batch_tokens) == expected
