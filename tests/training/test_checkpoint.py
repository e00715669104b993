import json
import os
from pathlib import Path

import pytest
import torch

from tests.tiny_run import VOCAB_SIZE, tiny_config
from training.checkpoint import (
    checkpoint_path,
    latest_checkpoint,
    list_checkpoints,
    load_weights,
    restore_checkpoint,
    save_checkpoint,
)
from training.distributed import Process
from training.state import TrainState, build_state
from training.step import train_step

ALONE = Process(rank=0, world_size=1, device=torch.device("cpu"), precision="fp32")


@pytest.fixture
def state(tmp_path: Path) -> TrainState:
    """A run three updates old, so that every optimizer has a state."""
    state = build_state(tiny_config(tmp_path, "position=logn_p_rope"))
    for _ in range(3):
        rows = torch.randint(0, VOCAB_SIZE, (2, 33))
        train_step(state, state.model, rows[:, :-1], rows[:, 1:], 2, 1.0, ALONE)
    return state


@pytest.fixture
def fresh(tmp_path: Path) -> TrainState:
    return build_state(tiny_config(tmp_path, "position=logn_p_rope", "seed=7"))


def tensors_of(node: object, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return {prefix: node}
    children = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
    return {name: x for key, child in children for name, x in tensors_of(child, f"{prefix}.{key}").items()}


def test_a_checkpoint_restores_weights_optimizers_and_step_bit_for_bit(
    tmp_path: Path, state: TrainState, fresh: TrainState
):
    folder = save_checkpoint(tmp_path, state)
    restore_checkpoint(folder, fresh)
    assert fresh.step == 3
    saved = tensors_of([state.model.state_dict(), state.state_dict()])
    restored = tensors_of([fresh.model.state_dict(), fresh.state_dict()])
    assert len(saved) > 2 * len(state.model.state_dict())  # the optimizers' tensors are among them
    assert saved.keys() == restored.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, restored[name]), name
    assert [group["lr"] for o in fresh.optimizers for group in o.param_groups] == [
        group["lr"] for o in state.optimizers for group in o.param_groups
    ]


def test_a_checkpoint_is_a_folder_named_by_step_and_leaves_no_partial_one(tmp_path: Path, state: TrainState):
    state.step = 125
    folder = save_checkpoint(tmp_path, state)
    assert folder == tmp_path / "checkpoints" / "step_000125" == checkpoint_path(tmp_path, 125)
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "training.pt"]
    assert [path.name for path in folder.parent.iterdir()] == ["step_000125"]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, state: TrainState):
    for step in (1, 2, 10, 1_000_000, 3_000_000):  # by number, also beyond six digits
        state.step = step
        save_checkpoint(tmp_path, state, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1000000", "step_3000000"]
    assert latest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 3_000_000)


def test_a_run_without_checkpoints_has_no_newest_one(tmp_path: Path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert list_checkpoints(tmp_path) == []


def test_a_save_that_was_interrupted_is_ignored_and_then_replaced(
    tmp_path: Path, state: TrainState, monkeypatch: pytest.MonkeyPatch
):
    complete = save_checkpoint(tmp_path, state)
    state.step = 4
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            save_checkpoint(tmp_path, state)
    assert (tmp_path / "checkpoints" / "step_000004.partial").is_dir()
    assert latest_checkpoint(tmp_path) == complete
    assert save_checkpoint(tmp_path, state).is_dir()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000003", "step_000004"]


@pytest.mark.parametrize("file", ["model.safetensors", "training.pt"])
@pytest.mark.parametrize("damage", ["truncated", "flipped_header", "empty", "missing"])
def test_a_damaged_checkpoint_file_is_named(
    tmp_path: Path, state: TrainState, fresh: TrainState, file: str, damage: str
):
    folder = save_checkpoint(tmp_path, state)
    path = folder / file
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"truncated": content[: len(content) // 2], "flipped_header": b"\xff" * 64 + content[64:], "empty": b""}[
                damage
            ]
        )
    with pytest.raises(ValueError, match=r"remove") as error:
        restore_checkpoint(folder, fresh)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_another_architecture_is_refused_in_one_line(tmp_path: Path, state: TrainState):
    folder = save_checkpoint(tmp_path, state)
    other = build_state(tiny_config(tmp_path, "position=logn_p_rope", "model.n_layer=2"))
    with pytest.raises(ValueError, match=str(folder)) as error:
        restore_checkpoint(folder, other)
    assert "\n" not in str(error.value)


class Code:
    """Pickles as a call of os.mkdir."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_is_refused_and_does_not_run(tmp_path: Path, state: TrainState, fresh: TrainState):
    folder = save_checkpoint(tmp_path, state)
    trap = tmp_path / "the code ran"
    torch.save({"step": 3, "optimizers": Code(trap)}, folder / "training.pt")
    with pytest.raises(ValueError, match=str(folder)):
        restore_checkpoint(folder, fresh)
    assert not trap.exists()


def test_a_pickle_in_place_of_the_weights_is_refused_and_does_not_run(tmp_path: Path, state: TrainState):
    folder = save_checkpoint(tmp_path, state)
    trap = tmp_path / "the code ran"
    torch.save(Code(trap), folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_weights(folder)
    assert not trap.exists()


def test_the_weights_are_plain_safetensors_that_other_tools_read(tmp_path: Path, state: TrainState):
    content = (save_checkpoint(tmp_path, state) / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header.keys() - {"__metadata__"} == state.model.state_dict().keys()
