from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.tiny_run import tiny_config
from training.run_config import check_same_run, first_difference, write_config


def test_the_written_config_names_every_key_of_every_slot(tmp_path: Path):
    write_config(tmp_path / "run", tiny_config(tmp_path, "position=scale_invariant_p_rope"))
    position = OmegaConf.load(tmp_path / "run" / "config.yaml").position
    assert position.logits.kind == "scale_invariant"
    assert position.logits.tau == 10.0
    assert position.logits.alpha is None
    assert position.rotary == {"kind": "p_rope", "base": 1024.0, "p": 0.5}
    assert position.query_scale == {"kind": "none"}
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_the_written_config_has_no_interpolations(tmp_path: Path):
    write_config(tmp_path / "run", tiny_config(tmp_path))
    assert "${" not in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(
    "word",
    [
        *("position.logits.tau=20", "position=alibi", "model.n_layer=2", "model.width=64", "train.length=64"),
        *("train.tokens_per_step=512", "seed=1", "optimizer.muon_lr=0.1", "schedule=cosine", "train.steps=24"),
    ],
)
def test_a_run_is_not_resumed_with_another_setting(tmp_path: Path, word: str):
    write_config(tmp_path / "run", tiny_config(tmp_path))
    with pytest.raises(ValueError, match=rf"run_dir={tmp_path / 'run'} was started with .*another run_dir"):
        check_same_run(tmp_path / "run", tiny_config(tmp_path, word))


def test_the_differing_key_is_named_with_both_values(tmp_path: Path):
    write_config(tmp_path / "run", tiny_config(tmp_path))
    with pytest.raises(ValueError, match=r"position\.logits\.tau=20.* was started with position\.logits\.tau=10"):
        check_same_run(tmp_path / "run", tiny_config(tmp_path, "position.logits.tau=20"))


@pytest.mark.parametrize(
    "word",
    [
        *("precision=bf16", "attention=dense", "train.micro_batch_tokens=32", "train.checkpoint_every=1"),
        *("wandb.mode=offline", "data.dir=elsewhere", "compile=true", "train.keep_checkpoints=9"),
        "position.logits.tau=10",  # the default, spelled out
    ],
)
def test_a_run_may_be_resumed_with_what_does_not_change_its_results(tmp_path: Path, word: str):
    write_config(tmp_path / "run", tiny_config(tmp_path))
    check_same_run(tmp_path / "run", tiny_config(tmp_path, word))


def test_checkpoints_without_a_config_are_not_resumed(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no config\.yaml; start in another run_dir"):
        check_same_run(tmp_path, tiny_config(tmp_path))


def test_a_free_key_frees_the_keys_under_it_but_not_those_that_begin_alike():
    one, other = OmegaConf.create({"wandb": {"mode": "a"}}), OmegaConf.create({"wandb": {"mode": "b"}})
    assert first_difference(one, other) is None
    one, other = OmegaConf.create({"wandbx": 1}), OmegaConf.create({"wandbx": 2})
    assert first_difference(one, other) == ("wandbx", 1, 2)
