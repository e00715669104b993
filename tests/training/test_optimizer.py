from pathlib import Path

import pytest
import torch

from configs.command import compose
from tests.tiny_run import tiny_config
from training.optimizer import Muon, orthogonalise, set_learning_rates
from training.state import build_state

SHAPES = [(32, 32), (64, 16), (16, 64)]


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def moved_by(optimizer_of, start: list[torch.Tensor], gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """How far each parameter is from its start after one step for each list of gradients."""
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    optimizers = optimizer_of(parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() - tensor for parameter, tensor in zip(parameters, start, strict=True)]


@pytest.fixture
def start() -> list[torch.Tensor]:
    return [torch.randn(*shape) for shape in SHAPES for _ in range(2)]


@pytest.fixture
def gradients(start: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [[torch.randn_like(tensor) for tensor in start] for _ in range(5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalise_keeps_the_singular_vectors_and_pushes_the_values_towards_one(shape: tuple[int, int]):
    matrices = torch.randn(3, *shape)
    u, _, vt = torch.linalg.svd(matrices.double(), full_matrices=False)
    x = orthogonalise(matrices).double()
    in_basis = u.mT @ x @ vt.mT
    values = in_basis.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.4  # the smallest of a square one starts near 0
    assert values.max() < 1.3
    assert (in_basis - torch.diag_embed(values)).abs().max() < 0.05
    assert relative_distance(x, u @ vt) < 0.35


def test_orthogonalise_does_not_depend_on_the_size_of_the_gradient():
    matrices = torch.randn(2, 16, 32)
    for factor in (2.0**-20, 2.0**20):
        assert relative_distance(orthogonalise(matrices * factor).float(), orthogonalise(matrices).float()) < 0.03


def test_orthogonalise_leaves_a_zero_gradient_at_zero():
    assert not orthogonalise(torch.zeros(1, 8, 8)).any()


def test_muon_agrees_with_torch(start: list[torch.Tensor], gradients: list[list[torch.Tensor]]):
    """torch's momentum is an average, ours a sum: the same direction, and orthogonalising drops the size."""
    ours = moved_by(lambda parameters: [Muon(parameters, lr=0.02, momentum=0.95)], start, gradients)
    theirs = moved_by(
        lambda parameters: [
            torch.optim.Muon(parameters, lr=0.02, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original")
        ],
        start,
        gradients,
    )
    for a, b in zip(ours, theirs, strict=True):
        assert relative_distance(a, b) < 0.03  # Newton-Schulz runs in bf16 in both


def test_muon_takes_nesterov_steps_of_the_orthogonalised_momentum():
    weight = torch.nn.Parameter(torch.zeros(64, 16))
    optimizer = Muon([weight], lr=0.1, momentum=0.9)
    buffer, expected = torch.zeros(64, 16), torch.zeros(64, 16)
    for _ in range(3):
        weight.grad = torch.randn(64, 16)
        buffer = 0.9 * buffer + weight.grad
        expected -= 0.1 * 2.0 * orthogonalise((weight.grad + 0.9 * buffer)[None])[0].float()  # sqrt(64 / 16) = 2
        optimizer.step()
    assert relative_distance(weight.detach(), expected) < 1e-3


def test_matrices_updated_as_a_batch_move_as_they_would_one_by_one(
    start: list[torch.Tensor], gradients: list[list[torch.Tensor]]
):
    together = moved_by(lambda parameters: [Muon(parameters)], start, gradients)
    alone = moved_by(lambda parameters: [Muon([parameter]) for parameter in parameters], start, gradients)
    for a, b in zip(together, alone, strict=True):
        assert relative_distance(a, b) < 1e-2


def test_muon_leaves_a_parameter_without_a_gradient_alone():
    used, unused = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    used.grad = torch.randn(4, 4)
    Muon([used, unused]).step()
    assert (unused == 1).all()
    assert not (used == 1).all()


def test_muon_refuses_what_is_not_a_matrix():
    with pytest.raises(ValueError, match=r"\(3,\).*Adam"):
        Muon([torch.nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize("position", ["rope", "logn_p_rope", "scale_invariant_p_rope"])
def test_every_parameter_is_in_exactly_one_group(tmp_path: Path, position: str):
    state = build_state(tiny_config(tmp_path, f"position={position}"))
    grouped = [p for optimizer in state.optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len({id(parameter) for parameter in grouped})
    assert {id(parameter) for parameter in grouped} == {id(parameter) for parameter in state.model.parameters()}


def test_every_parameter_starts_at_its_published_rate(tmp_path: Path):
    state = build_state(tiny_config(tmp_path, "position=logn_p_rope"))
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            for name in (names[id(parameter)] for parameter in group["params"]):
                if name.startswith("blocks."):
                    assert isinstance(optimizer, Muon)
                    assert (group["lr"], group["momentum"], group["newton_schulz_steps"]) == (0.02, 0.95, 5)
                else:
                    assert isinstance(optimizer, torch.optim.Adam)
                    assert group["lr"] == (0.3 if name.startswith("embedding.") else 0.002)
                    assert tuple(group["betas"]) == (0.9, 0.95)
                    assert group["weight_decay"] == 0


def test_the_config_holds_the_public_recipe():
    config = compose("train", [])
    optimizer = config.optimizer
    assert (optimizer.muon_lr, optimizer.muon_momentum, optimizer.newton_schulz_steps) == (0.02, 0.95, 5)
    assert (optimizer.embedding_lr, optimizer.output_lr, optimizer.position_lr) == (0.3, 0.002, 0.002)
    assert list(optimizer.betas) == [0.9, 0.95]
    assert (config.train.tokens_per_step, config.train.steps, config.train.length) == (524_288, 4578, 4096)
    assert list(config.validation.lengths) == [4096, 16384, 65536]
    assert (config.validation.tokens, config.validation.every) == (10_485_760, 125)


def test_the_schedule_multiplies_every_peak_rate(tmp_path: Path):
    optimizers = build_state(tiny_config(tmp_path)).optimizers
    for factor in (0.5, 0.25, 1.0):  # always of the peak, not of the last rate
        set_learning_rates(optimizers, factor)
        rates = {group["lr"] for optimizer in optimizers for group in optimizer.param_groups}
        assert rates == {0.02 * factor, 0.3 * factor, 0.002 * factor}
