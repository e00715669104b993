"""Many documents encoded in one call, against each alone."""

import numpy as np
import pytest

from data.sharding import encode
from data.sources import Piece
from data.tokenizer import load_tokenizer

TEXTS = [
    "Hello world.",
    "  leading and trailing \n\n",
    "\n",
    "漢字 and ünïcode",
    "x" * 500,
    "it's 12345\r\n\t tabs",
    "<|endof",
    "text|>",
]


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
@pytest.mark.parametrize("literal", ["", "says <|endoftext|> itself", "<|endoftext|>"])
def test_documents_encoded_together_have_the_tokens_of_each_alone(tokenizer, literal):
    tokenizer = load_tokenizer(tokenizer)
    texts = [*TEXTS[:4], literal, *TEXTS[4:]]
    # the batch begins inside a document, and an empty one leaves nothing
    pieces = [Piece(" rest of it", False, False), *(Piece(text, True, False) for text in texts)]
    expected, starts = [tokenizer.encode(" rest of it")], []
    for text in filter(None, texts):
        starts.append(sum(part.size for part in expected))
        expected += [np.array([tokenizer.end_of_text]), tokenizer.encode(text)]
    ids, found = encode(pieces, tokenizer)
    np.testing.assert_array_equal(ids, np.concatenate(expected))
    np.testing.assert_array_equal(found, starts)
    assert ids.dtype == np.uint16


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_nothing_encodes_to_nothing(tokenizer):
    ids, starts = encode([Piece("", True, False)], load_tokenizer(tokenizer))
    assert ids.size == starts.size == 0
