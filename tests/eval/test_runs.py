import json
import shutil
from pathlib import Path

import pytest
import torch

import train
from eval.runs import load_config, load_run, read_metrics, run_status
from tests.tiny_run import run, tiny_config, tiny_words, write_tiny_data
from training.checkpoint import restore_checkpoint
from training.state import build_state


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of 12 steps that has the checkpoints of steps 8 and 12."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_data(folder / "data")
    assert run(train.main, tiny_words(folder, "position=logn_p_rope")) == 0
    return folder


def test_a_run_is_missing_then_interrupted_then_finished(tmp_path: Path, trained: Path):
    assert run_status(tmp_path / "run", 12) == "missing"
    (tmp_path / "run" / "checkpoints" / "step_000008").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    assert run_status(tmp_path / "run", 12) == "interrupted"
    assert run_status(trained / "run", 12) == "finished"
    assert run_status(trained / "run", 13) == "interrupted"


def test_a_half_written_last_checkpoint_does_not_finish_a_run(tmp_path: Path):
    (tmp_path / "checkpoints" / "step_000012.partial").mkdir(parents=True)
    (tmp_path / "config.yaml").touch()
    assert run_status(tmp_path, 12) == "interrupted"


def test_metrics_are_one_row_a_step_with_empty_cells(trained: Path):
    metrics = read_metrics(trained / "run")
    assert metrics["step"].tolist() == list(range(13))
    validated = metrics.dropna(subset="val/loss_32")
    assert validated["step"].tolist() == [0, 4, 8, 12]
    assert metrics.dropna(subset="train/loss")["step"].tolist() == list(range(1, 13))
    assert metrics["tokens"].tolist() == [256 * step for step in range(13)]


def test_metrics_of_a_run_that_has_not_begun_are_an_empty_table(tmp_path: Path):
    assert read_metrics(tmp_path).empty


def test_metrics_do_without_a_torn_last_line(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/loss": 2.0}) + '\n{"step": 2')
    assert read_metrics(tmp_path)["step"].tolist() == [1]


def test_a_loaded_run_computes_what_the_trained_model_did(trained: Path):
    model, config = load_run(trained / "run")
    state = build_state(tiny_config(trained, "position=logn_p_rope"))
    restore_checkpoint(trained / "run" / "checkpoints" / "step_000012", state)
    tokens = torch.randint(0, 257, (2, 48))
    assert torch.equal(model(tokens), state.model(tokens))
    assert not model.training
    assert config.model.n_layer == 1
    assert config.position.name == "logn_p_rope"


def test_a_run_is_evaluated_with_attention_that_works_here_whatever_it_was_trained_with(trained: Path, tmp_path: Path):
    shutil.copytree(trained / "run", tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace("attention: auto", "attention: flex"))
    assert load_config(tmp_path / "run").attention == "flex"
    model, config = load_run(tmp_path / "run")
    assert model.config.attention == config.attention == "auto"


def test_an_earlier_checkpoint_loads_by_its_step(trained: Path):
    newest, earlier = load_run(trained / "run")[0], load_run(trained / "run", step=8)[0]
    explicit = load_run(trained / "run", step=12)[0]
    assert not torch.equal(newest.output.weight, earlier.output.weight)
    assert torch.equal(newest.output.weight, explicit.output.weight)


def test_a_missing_run_checkpoint_or_step_is_named(tmp_path: Path, trained: Path):
    with pytest.raises(FileNotFoundError, match=r"holds no config\.yaml"):
        load_config(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint of step 4; it has those of the steps \[8, 12\]"
    ):  # no longer kept
        load_run(trained / "run", step=4)
    (tmp_path / "config.yaml").write_bytes((trained / "run" / "config.yaml").read_bytes())
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        load_run(tmp_path)


def test_damaged_weights_are_named(tmp_path: Path, trained: Path):
    folder = tmp_path / "checkpoints" / "step_000012"
    folder.mkdir(parents=True)
    (tmp_path / "config.yaml").write_bytes((trained / "run" / "config.yaml").read_bytes())
    (folder / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match=rf"{folder / 'model.safetensors'} is damaged"):
        load_run(tmp_path)
