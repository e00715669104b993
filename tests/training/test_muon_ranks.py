"""Muon on several processes: the result of one, with the momentum shared out, and a state that is whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from training.optimizer import Muon, share_out

SHAPES = [(16, 16), (64, 16), (16, 16), (16, 64), (16, 16), (64, 16), (8, 24)]
STEPS = 4


def starting_points() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in SHAPES]


def take_steps(optimizer: Muon, parameters: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        parameters[4].grad = None  # no process has a gradient for it
        optimizer.step()


def on_ranks(world_size: int, work: Callable[[], Any], folder: Path) -> list[Any]:
    """What `work` gives on each of `world_size` processes that are joined by gloo; forked, which costs no imports."""
    arguments = (world_size, work, str(folder))
    mp.start_processes(_one_rank, args=arguments, nprocs=world_size, start_method="fork")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world_size)]


def _one_rank(rank: int, world_size: int, work: Callable[[], Any], folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    torch.save(work(), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def trained(load: dict[str, Any] | None = None, steps: range = range(STEPS)) -> dict[str, Any]:
    """The weights after some steps, the whole state of the optimizer, and which momenta this process holds."""
    parameters = starting_points()
    optimizer = Muon(parameters, lr=0.1)
    if load is not None:
        with torch.no_grad():
            for parameter, weight in zip(parameters, load["weights"], strict=True):
                parameter.copy_(weight)
        optimizer.load_state_dict(load["optimizer"])
    take_steps(optimizer, parameters, steps)
    return {
        "weights": [parameter.detach().clone() for parameter in parameters],
        "optimizer": optimizer.state_dict(),
        "held": [index for index, parameter in enumerate(parameters) if optimizer.state[parameter]],
    }


def assert_close(ours: list[Tensor], alone: list[Tensor]) -> None:
    """Newton-Schulz rounds to bf16, and rounds batches of other sizes otherwise."""
    for a, b, start in zip(ours, alone, starting_points(), strict=True):
        assert (a - b).norm() <= 0.01 * (b - start.detach()).norm()


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_process_ends_with_the_weights_of_one_process_alone(world_size: int, tmp_path: Path):
    ranks = on_ranks(world_size, trained, tmp_path)
    assert_close(ranks[0]["weights"], trained()["weights"])
    for rank in ranks[1:]:
        assert all(map(torch.equal, rank["weights"], ranks[0]["weights"]))


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_momentum_lies_in_one_process_and_is_saved_whole_by_all(world_size: int, tmp_path: Path):
    ranks = on_ranks(world_size, trained, tmp_path)
    held = sorted(index for rank in ranks for index in rank["held"])
    assert held == [0, 1, 2, 3, 5, 6]
    alone = trained()["optimizer"]["state"]
    for rank in ranks:
        momenta = rank["optimizer"]["state"]
        assert sorted(momenta) == list(range(len(SHAPES)))
        for index, saved in alone.items():
            torch.testing.assert_close(momenta[index]["momentum"], saved["momentum"])
        assert not momenta[4]["momentum"].any()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2)])
def test_a_state_goes_on_with_another_number_of_processes(before: int, after: int, tmp_path: Path):
    def run(world_size: int, name: str, **arguments: Any) -> dict[str, Any]:
        if world_size == 1:
            return trained(**arguments)
        (tmp_path / name).mkdir()
        return on_ranks(world_size, lambda: trained(**arguments), tmp_path / name)[-1]

    half = run(before, "before", steps=range(STEPS // 2))
    resumed = run(after, "after", steps=range(STEPS // 2, STEPS), load=half)
    assert_close(resumed["weights"], trained()["weights"])
    if after > 1:
        assert 0 < len(resumed["held"]) < len(SHAPES) - 1


def test_the_162m_matrices_are_shared_out_evenly():
    shapes = 12 * [*4 * [(768, 768)], (3072, 768), (768, 3072)]
    for world_size in (2, 3, 4, 8):
        work = [0] * world_size
        for owner, shape in zip(share_out(shapes, world_size), shapes, strict=True):
            work[owner] += 3 if shape == (768, 768) else 9  # m^2 (2 n + m), in units of 768^3
        assert max(work) - min(work) <= 9
        assert max(work) < 1.05 * sum(work) / world_size


def test_more_processes_than_matrices_leave_some_without_work():
    assert sorted(share_out([(8, 8), (8, 8)], 4)) == [0, 1]
