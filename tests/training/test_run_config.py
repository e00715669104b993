from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.tiny_run import tiny_config
from training.run_config import check_run_dir, first_difference, write_config


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
        *(
            "train.tokens_per_step=512",
            "seed=1",
            "optimizer.muon_lr=0.1",
            "schedule=cosine",
            "train.steps=24",
            "data.dir=elsewhere",
        ),
    ],
)
def test_a_run_is_not_resumed_with_another_setting(tmp_path: Path, word: str):
    write_config(tmp_path / "run", tiny_config(tmp_path))
    with pytest.raises(ValueError, match=rf"run_dir={tmp_path / 'run'} was started with .*another run_dir"):
        check_run_dir(tmp_path / "run", tiny_config(tmp_path, word))


def test_the_differing_key_is_named_with_both_values(tmp_path: Path):
    write_config(tmp_path / "run", tiny_config(tmp_path))
    with pytest.raises(ValueError, match=r"position\.logits\.tau=20.* was started with position\.logits\.tau=10"):
        check_run_dir(tmp_path / "run", tiny_config(tmp_path, "position.logits.tau=20"))


@pytest.mark.parametrize(
    "word",
    [
        *("precision=bf16", "attention=dense", "train.micro_batch_tokens=32", "train.checkpoint_every=1"),
        *("wandb.mode=offline", "compile=true", "train.keep_checkpoints=9"),
        "position.logits.tau=10",  # the default, spelled out
    ],
)
def test_a_run_may_be_resumed_with_what_does_not_change_its_results(tmp_path: Path, word: str):
    write_config(tmp_path / "run", tiny_config(tmp_path))
    check_run_dir(tmp_path / "run", tiny_config(tmp_path, word))


def test_a_new_folder_or_a_sweeps_is_free_but_not_one_that_holds_something_else(tmp_path: Path):
    config = tiny_config(tmp_path)
    check_run_dir(tmp_path / "new", config)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "child.log").touch()
    check_run_dir(tmp_path / "run", config)
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=rf"run_dir={tmp_path / 'run'} holds metrics\.jsonl but no config\.yaml"):
        check_run_dir(tmp_path / "run", config)
    with pytest.raises(ValueError, match="is a file; choose a folder"):
        check_run_dir(tmp_path / "run" / "child.log", config)


@pytest.mark.parametrize("text", ["{[:::", "", "[1, 2]", "seed: ${nope}", "x: !!python/name:os.system", "a: 1"])
def test_a_damaged_config_is_named(tmp_path: Path, text: str):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml is (damaged|not the config of a training run)"):
        check_run_dir(tmp_path, tiny_config(tmp_path))


def test_a_free_key_frees_the_keys_under_it_but_not_those_that_begin_alike():
    one, other = OmegaConf.create({"wandb": {"mode": "a"}}), OmegaConf.create({"wandb": {"mode": "b"}})
    assert first_difference(one, other) is None
    one, other = OmegaConf.create({"wandbx": 1}), OmegaConf.create({"wandbx": 2})
    assert first_difference(one, other) == ("wandbx", 1, 2)
