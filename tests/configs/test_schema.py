import pytest

from configs.command import compose
from configs.schema import check


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.steps=0", r"train\.steps=0 must be at least 1"),
        ("train.length=-4", r"train\.length=-4 must be at least 1"),
        ("train.checkpoint_every=0", r"train\.checkpoint_every=0 must be at least 1"),
        ("train.keep_checkpoints=0", r"train\.keep_checkpoints=0 must be at least 1"),
        ("validation.every=0", r"validation\.every=0 must be at least 1"),
        ("model.n_head=0", r"model\.n_head=0 must be at least 1"),
        ("validation.lengths=[]", r"validation\.lengths=\[\] must hold at least one length"),
        ("validation.lengths=[64,0]", r"validation\.lengths=\[64, 0\]"),
        ("validation.lengths=[64,32,64]", r"validation\.lengths=\[64, 32, 64\] holds a length twice"),
        ("seed=-1", "seed=-1 must be at least 0"),
        ("precision=fp16", r"precision=fp16 is unknown; choose one of: auto, fp32, bf16"),
        ("device=tpu", r"device=tpu is unknown; choose one of: auto, cpu, cuda"),
        ("wandb.mode=yes", r"wandb\.mode=.* is unknown; choose one of: disabled, offline, online"),
        ("compile=maybe", r"compile=maybe is unknown"),
        ("schedule.kind=warmup", r"schedule\.kind=warmup is unknown"),
        ("schedule.cooldown_fraction=1.5", r"schedule\.cooldown_fraction=1\.5 must lie in \[0, 1\]"),
        ("schedule.cooldown_fraction=null", r"schedule\.cooldown_fraction=None must lie in \[0, 1\]"),
        ("model.width=770", r"model\.width=770 is not divisible by model\.n_head=6; try model\.n_head=5"),
    ],
)
def test_a_value_that_no_run_can_have_is_refused(word: str, message: str):
    with pytest.raises(ValueError, match=message):
        check(compose("train", [word]))


@pytest.mark.parametrize("word", ["precision=BF16", "device=CPU", "wandb.mode=Disabled", "schedule.kind=Cosine"])
def test_a_choice_in_other_letters_is_refused_before_it_is_taken_for_something_else(word: str):
    key = word.split("=")[0]
    with pytest.raises(ValueError, match=rf"{key}=.* is unknown"):
        check(compose("train", [word]))


@pytest.mark.parametrize("word", ["compile=true", "compile=True", "compile=false", "compile=auto"])
def test_compile_takes_a_yaml_boolean_or_auto(word: str):
    check(compose("train", [word]))


def test_cosine_needs_no_cooldown():
    check(compose("train", ["schedule=cosine"]))


def test_the_defaults_are_valid():
    check(compose("train", []))
