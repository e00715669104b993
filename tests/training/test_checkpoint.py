import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_run import VOCAB_SIZE, listing, tiny_config
from training.checkpoint import load_weights, restore_checkpoint, save_checkpoint
from training.checkpoint_folder import (
    awaits_validation,
    best_checkpoint,
    check_not_moved,
    checkpoint_path,
    latest_checkpoint,
    list_checkpoints,
    record_validation,
)
from training.distributed import ALONE
from training.state import TrainState, build_state
from training.step import train_step


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
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", "model.safetensors", "training.pt"]
    assert [path.name for path in folder.parent.iterdir()] == ["step_000125"]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, state: TrainState):
    for step in (1, 2, 10, 1_000_000, 3_000_000):  # by number, also beyond six digits
        state.step = step
        save_checkpoint(tmp_path, state, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1000000", "step_3000000"]
    assert latest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 3_000_000)


def names(run_dir: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run_dir)]


def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path: Path, state: TrainState):
    at_train_length = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.25, 5: 1.0, 6: 1.5, 7: 1.5}
    kept = []
    for step, loss in at_train_length.items():
        state.step = step
        save_checkpoint(tmp_path, state, keep=1, losses={64: 10.0 - loss, 32: loss})  # the longer length says otherwise
        kept.append(names(tmp_path))
        assert latest_checkpoint(tmp_path) == checkpoint_path(tmp_path, step)
    assert kept == [[f"step_{step:06d}" for step in steps] for steps in ([1], [2], [2, 3], [2, 4], [5], [5, 6], [5, 7])]
    assert best_checkpoint(tmp_path) == checkpoint_path(tmp_path, 5)


def test_without_a_validation_there_is_no_best_checkpoint(tmp_path: Path, state: TrainState):
    save_checkpoint(tmp_path, state)
    assert best_checkpoint(tmp_path) is None
    state.step = 4
    folder = save_checkpoint(tmp_path, state, validation_due=True)
    assert best_checkpoint(tmp_path) is None
    assert awaits_validation(folder)
    record_validation(folder, 32, {32: 2.0})
    assert not awaits_validation(folder)
    assert best_checkpoint(tmp_path) == folder
    restore_checkpoint(folder, state)  # the validation is no part of what the checksums protect


def test_a_run_that_is_not_validated_at_its_training_length_is_judged_at_the_closest(tmp_path: Path, state: TrainState):
    for step, losses in {1: {40: 2.0, 64: 1.0}, 2: {40: 1.0, 64: 2.0}}.items():
        state.step = step
        save_checkpoint(tmp_path, state, losses=losses)
    assert best_checkpoint(tmp_path) == checkpoint_path(tmp_path, 2)


def test_a_checkpoint_that_is_being_removed_is_none(tmp_path: Path, state: TrainState, monkeypatch: pytest.MonkeyPatch):
    """Killed in the middle of a removal, a run keeps no folder that looks like a checkpoint and is half of one."""
    save_checkpoint(tmp_path, state)
    state.step = 4

    def killed(path: Path, **_) -> None:
        raise KeyboardInterrupt(path)

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt, match="step_000003"):
            save_checkpoint(tmp_path, state, keep=1)
    assert names(tmp_path) == ["step_000004"]
    state.step = 5
    save_checkpoint(tmp_path, state, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000005"]


def test_the_random_numbers_go_on_where_they_were(tmp_path: Path, state: TrainState, fresh: TrainState):
    torch.rand(7)
    folder = save_checkpoint(tmp_path, state)
    expected = torch.rand(9)
    restore_checkpoint(folder, fresh)
    assert torch.equal(torch.rand(9), expected)


def test_the_config_and_the_wandb_id_are_in_the_checkpoint(tmp_path: Path):
    state = build_state(tiny_config(tmp_path, "position=alibi", "wandb.id=abc123"))
    rest = torch.load(save_checkpoint(tmp_path, state) / "training.pt", weights_only=True)
    assert rest["config"]["wandb"]["id"] == "abc123"
    assert rest["config"]["position"]["logits"]["kind"] == "alibi"
    assert rest["config"]["train"]["length"] == 32


def test_a_run_that_another_process_has_trained_further_meanwhile_is_refused(tmp_path: Path):
    first = tmp_path / "checkpoints" / "step_000004"
    check_not_moved(tmp_path, None)
    first.mkdir(parents=True)
    check_not_moved(tmp_path, first)
    first.with_name("step_000008").mkdir()
    with pytest.raises(ValueError, match=rf"another process trained run_dir={tmp_path} while .* start this one again"):
        check_not_moved(tmp_path, first)


def test_a_run_without_checkpoints_has_no_newest_one(tmp_path: Path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert list_checkpoints(tmp_path) == []


def fail(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


FULL_AT = {
    "its_folder": ("pathlib.Path.mkdir", fail),
    "the_weights": ("training.checkpoint.save_file", fail),
    "the_rest": ("torch.save", fail),
    "a_small_file": ("pathlib.Path.write_text", fail),
    "the_flush": ("os.fsync", fail),
    "the_renaming": ("os.replace", fail),
}


@pytest.mark.parametrize("place", FULL_AT)
def test_a_disk_that_is_full_at_any_write_leaves_the_last_checkpoint_and_nothing_else(
    tmp_path: Path, state: TrainState, monkeypatch: pytest.MonkeyPatch, place: str
):
    complete = save_checkpoint(tmp_path, state)
    before = listing(tmp_path)
    state.step = 4
    with monkeypatch.context() as patch:
        patch.setattr(*FULL_AT[place])
        with pytest.raises(OSError, match=r"can't write .*step_000004 .*No space left on device"):
            save_checkpoint(tmp_path, state)
    assert listing(tmp_path) == before
    assert latest_checkpoint(tmp_path) == complete
    assert save_checkpoint(tmp_path, state).is_dir()


@pytest.mark.parametrize("share", [0.1, 0.9, 1.2, 1.6])
def test_a_file_that_the_system_cuts_short_is_noticed(tmp_path: Path, state: TrainState, share: float):
    """A limit that the kernel holds also against what is written outside Python, in the weights or in the rest."""
    complete = save_checkpoint(tmp_path, state)
    sizes = {path.name: path.stat().st_size for path in complete.iterdir()}
    assert sizes["training.pt"] > 1.61 * sizes["model.safetensors"]
    before = listing(tmp_path)
    state.step = 4
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * sizes["model.safetensors"]), unlimited[1]))
    try:
        with pytest.raises(OSError, match=r"can't write .*step_000004"):
            save_checkpoint(tmp_path, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert listing(tmp_path) == before
    assert save_checkpoint(tmp_path, state).is_dir()


def test_a_save_that_was_killed_is_ignored_and_then_cleared_away(tmp_path: Path, state: TrainState):
    complete = save_checkpoint(tmp_path, state)
    killed = complete.with_name("step_000004.partial")
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == complete
    state.step = 5
    assert save_checkpoint(tmp_path, state).is_dir()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000003", "step_000005"]


@pytest.mark.parametrize("file", ["model.safetensors", "training.pt"])
@pytest.mark.parametrize("damage", ["truncated", "flipped_header", "one_bit", "empty", "missing"])
def test_a_damaged_checkpoint_file_is_named(
    tmp_path: Path, state: TrainState, fresh: TrainState, file: str, damage: str
):
    folder = save_checkpoint(tmp_path, state)
    path = folder / file
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        half = len(content) // 2
        damaged = {
            "truncated": content[:half],
            "flipped_header": b"\xff" * 64 + content[64:],
            "one_bit": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
            "empty": b"",
        }
        path.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=rf"remove {folder} to start over, for there is none before it") as error:
        restore_checkpoint(folder, fresh)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("checksums", [True, False])
def test_the_checkpoint_before_a_damaged_one_is_offered_and_works(
    tmp_path: Path, state: TrainState, fresh: TrainState, checksums: bool
):
    save_checkpoint(tmp_path, state)
    state.step = 4
    folder = save_checkpoint(tmp_path, state)
    (folder / "training.pt").write_bytes(b"")
    if not checksums:  # as another tool may have left it
        (folder / "checksums.json").unlink()
    with pytest.raises(ValueError, match=rf"remove {folder} to go on from step_000003, the one before it"):
        restore_checkpoint(folder, fresh)
    shutil.rmtree(folder)
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    restore_checkpoint(newest, fresh)
    assert fresh.step == 3


@pytest.mark.parametrize(("name", "read"), [("checksums.json", load_weights), ("validation.json", awaits_validation)])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3"])
def test_a_damaged_small_file_is_named(
    tmp_path: Path, state: TrainState, name: str, read: Callable[[Path], object], text: str
):
    folder = save_checkpoint(tmp_path, state, losses={32: 1.0})
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{folder / name} is damaged"):
        read(folder)


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
    (folder / "checksums.json").unlink()  # whoever hides code in the one file would also write the other
    with pytest.raises(ValueError, match=str(folder)):
        restore_checkpoint(folder, fresh)
    assert not trap.exists()


def test_a_pickle_in_place_of_the_weights_is_refused_and_does_not_run(tmp_path: Path, state: TrainState):
    folder = save_checkpoint(tmp_path, state)
    trap = tmp_path / "the code ran"
    torch.save(Code(trap), folder / "model.safetensors")
    (folder / "checksums.json").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_weights(folder)
    assert not trap.exists()


def test_the_weights_are_plain_safetensors_that_other_tools_read(tmp_path: Path, state: TrainState):
    content = (save_checkpoint(tmp_path, state) / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header.keys() - {"__metadata__"} == state.model.state_dict().keys()
