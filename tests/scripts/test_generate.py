from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import train
from data.tokenizer import load_tokenizer
from eval.generate import Sampling, generate
from eval.runs import load_run
from scripts import generate as command
from tests.tiny_run import listing, refusal, run, tiny_words, write_tiny_data

BYTES = load_tokenizer("bytes")
AWKWARD = 'it\'s "50%", a=b (c) [d] {e} ${f} \\n \\${g} #h'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("generate")
    write_tiny_data(folder / "data")
    assert run(train.main, tiny_words(folder)) == 0
    return folder


def words(folder: Path, *more: str) -> list[str]:
    return [f"run_dir={folder / 'run'}", "tokenizer=bytes", "device=cpu", "precision=fp32", *more]


def printed(folder: Path, capsys: pytest.CaptureFixture, *more: str) -> str:
    capsys.readouterr()
    assert run(command.main, words(folder, *more)) == 0
    return capsys.readouterr().out


def expected(folder: Path, prompt: str, count: int, sampling: Sampling | None = None) -> str:
    model, _ = load_run(folder / "run")
    tokens = [256, *BYTES.encode(prompt).tolist()]
    (new,) = generate(
        model, [tokens], count, sampling or Sampling(), done=lambda row, new: new[-1] == 256, vocab_size=257
    )
    return BYTES.decode([token for token in new if token != 256])


@pytest.mark.parametrize("prompt", ["abc", "", AWKWARD, "naïve\n café "])
def test_any_prompt_is_printed_as_it_is_and_continued(folder: Path, capsys: pytest.CaptureFixture, prompt: str):
    text = printed(folder, capsys, f"prompt={prompt}", "max_new_tokens=20")
    assert text == prompt + expected(folder, prompt, 20) + "\n"


def test_sampling_follows_its_keys_and_seed(folder: Path, capsys: pytest.CaptureFixture):
    keys = ("prompt=ab", "max_new_tokens=30", "temperature=0.8", "top_k=50", "top_p=0.9", "seed=3")
    text = printed(folder, capsys, *keys)
    assert text == "ab" + expected(folder, "ab", 30, Sampling(0.8, 50, 0.9, 3)) + "\n"
    assert text == printed(folder, capsys, *keys)
    assert text != printed(folder, capsys, *keys[:-1], "seed=4")


def test_the_lines_of_a_file_are_continued_as_each_would_be_alone(folder: Path, capsys: pytest.CaptureFixture):
    lines = ["one", "two and a half", "", "six"]
    (folder / "prompts.txt").write_text("\n".join(lines) + "\n")
    text = printed(folder, capsys, f"prompts_file={folder / 'prompts.txt'}", "max_new_tokens=12")
    assert text == "".join(line + expected(folder, line, 12) + "\n" for line in lines)


def test_only_a_newline_ends_a_prompt_of_a_file(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    config = OmegaConf.create({"prompt": "", "prompts_file": str(path)})
    for text, prompts in {
        "one\u2028still one\ntwo\x85\x0c\x1c\rstill two\n": ["one\u2028still one", "two\x85\x0c\x1c\rstill two"],
        "of Windows\r\n\r\nlast\r\n": ["of Windows", "", "last"],
        "no end": ["no end"],
        "\n": [""],
    }.items():
        path.write_bytes(text.encode())
        assert command.read_prompts(config) == prompts
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is empty; write one prompt a line"):
        command.read_prompts(config)


def test_a_text_ends_before_its_stop_string(folder: Path, capsys: pytest.CaptureFixture):
    free = expected(folder, "abc", 40)
    inside = free[7:9]
    text = printed(folder, capsys, "prompt=abc", "max_new_tokens=40", f"stop=['{inside}']")
    assert text == "abc" + free[: free.index(inside)] + "\n"


def test_a_single_text_is_printed_as_it_comes(folder: Path, capsys: pytest.CaptureFixture, monkeypatch):
    seen: list[str] = []
    original = command.Printer._print
    monkeypatch.setattr(command.Printer, "_print", lambda self, text: (seen.append(text), original(self, text))[1])
    text = printed(folder, capsys, "prompt=abc", "max_new_tokens=25")
    assert "".join(seen) + "\n" == text
    assert sum(map(bool, seen)) > 5


def test_without_the_start_of_a_document_the_model_reads_the_prompt_alone(folder: Path, capsys: pytest.CaptureFixture):
    model, _ = load_run(folder / "run")
    (new,) = generate(model, [BYTES.encode("abc").tolist()], 9, vocab_size=257)
    text = printed(folder, capsys, "prompt=abc", "max_new_tokens=9", "start_of_document=false")
    assert text == "abc" + BYTES.decode(new) + "\n"


def test_the_tokenizer_is_that_of_the_run_s_data(folder: Path, capsys: pytest.CaptureFixture):
    (folder / "data" / "manifest.json").write_text('{"tokenizer": "bytes", "files": []}')
    try:
        assert run(command.main, [f"run_dir={folder / 'run'}", "device=cpu", "max_new_tokens=2"]) == 0
    finally:
        (folder / "data" / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["run_dir={}/nowhere"], ["run_dir=", "nowhere"]),
        (["step=3"], ["step 3"]),
        (["tokenizer=null"], ["tokenizer=null", "tokenizer=gpt2 or tokenizer=bytes"]),
        (["tokenizer=words"], ["tokenizer=words", "bytes, gpt2"]),
        (["tokenizer=gpt2"], ["tokenizer=gpt2", "50257", "model.vocab_size=264"]),
        (["start_of_document=false"], ["holds no token"]),
        (["max_new_tokens=0"], ["max_new_tokens=0"]),
        (["max_new_tokens=many"], ["max_new_tokens", "many"]),
        (["temperature=-1"], ["temperature=-1"]),
        (["top_k=5"], ["top_k=5", "temperature"]),
        (["temperature=1", "top_p=2"], ["top_p=2"]),
        (["stop=['']"], ["stop="]),
        (["inference_length=5"], ["inference_length=5"]),
        (["prompts_file=nowhere.txt"], ["nowhere.txt"]),
        (["prompt=a", "prompts_file=nowhere.txt"], ["prompt=a", "prompts_file=nowhere.txt"]),
        (["promt=a"], ["promt=a", "did you mean prompt"]),
        (["max_new_tokens=99999999"], ["100000000 tokens", "GiB", "keys and values"]),
    ],
    ids=lambda value: value[-1],
)
def test_generate_refuses(folder: Path, more: list[str], parts: list[str], capsys: pytest.CaptureFixture):
    before = listing(folder)
    line = refusal(command.main, words(folder, *(word.format(folder) for word in more)), capsys)
    for part in parts:
        assert part in line
    assert listing(folder) == before


def test_the_estimate_of_memory_grows_with_rows_and_length(folder: Path):
    from eval.memory import available_bytes, cache_bytes, decoding_bytes

    model, _ = load_run(folder / "run")  # 1 layer, width 32
    assert cache_bytes(model, 3, 1000, "fp32") == 3 * 1000 * 2 * 32 * 4
    assert cache_bytes(model, 3, 1000, "bf16") == 3 * 1000 * 2 * 32 * 2
    assert decoding_bytes(model, 1, 1000, 1000, "fp32") < decoding_bytes(model, 1, 2000, 1000, "fp32")
    assert decoding_bytes(model, 1, 1000, 10, "fp32") < decoding_bytes(model, 1, 1000, 1000, "fp32")
    free = available_bytes(torch.device("cpu"))
    assert free is None or free > 1 << 20
