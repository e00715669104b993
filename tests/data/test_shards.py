import errno
import struct

import numpy as np
import pytest

from data.shards import count_tokens, read_shard, write_shard


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "some_train_000001.bin"
    write_shard(path, np.arange(100))
    return path


def patch(path, byte, value):
    raw = bytearray(path.read_bytes())
    raw[byte : byte + 4] = struct.pack("<i", value)
    path.write_bytes(raw)


@pytest.mark.parametrize("seed", range(5))
def test_shard_written_here_reads_back_bit_for_bit(tmp_path, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 65536, rng.integers(1, 5000))
    write_shard(tmp_path / "x.bin", tokens)
    read = read_shard(tmp_path / "x.bin")
    assert read.dtype == np.uint16
    assert np.array_equal(read, tokens)
    assert count_tokens(tmp_path / "x.bin") == tokens.size


def test_bytes_are_those_of_the_public_format(tmp_path):
    write_shard(tmp_path / "x.bin", [50256, 1, 65535])
    header = struct.pack("<256i", 20240520, 1, 3, *[0] * 253)
    assert (tmp_path / "x.bin").read_bytes() == header + struct.pack("<3H", 50256, 1, 65535)


def test_the_public_reader_reads_what_is_written_here(tmp_path):
    """The reader of the public recipe, in its own terms: check the header, skip 1024 bytes, take the rest as uint16."""
    write_shard(tmp_path / "x.bin", np.array([50256, 7, 65535], np.uint32))
    raw = (tmp_path / "x.bin").read_bytes()
    assert struct.unpack("<3i", raw[:12]) == (20240520, 1, 3)
    assert struct.unpack("<3H", raw[1024:]) == (50256, 7, 65535)


def test_a_public_file_is_read_here(tmp_path):
    tokens = np.random.default_rng(3).integers(0, 50257, 1000)
    raw = struct.pack("<256i", 20240520, 1, 1000, *[0] * 253) + struct.pack("<1000H", *tokens)
    (tmp_path / "fineweb_val_000000.bin").write_bytes(raw)
    assert read_shard(tmp_path / "fineweb_val_000000.bin").tolist() == tokens.tolist()
    write_shard(tmp_path / "again.bin", read_shard(tmp_path / "fineweb_val_000000.bin"))
    assert (tmp_path / "again.bin").read_bytes() == raw


def test_ids_beyond_65535_make_a_shard_of_version_2(tmp_path):
    write_shard(tmp_path / "x.bin", [65536, 1, 2**32 - 1])
    header = struct.pack("<256i", 20240520, 2, 3, *[0] * 253)
    assert (tmp_path / "x.bin").read_bytes() == header + struct.pack("<3I", 65536, 1, 2**32 - 1)
    read = read_shard(tmp_path / "x.bin")
    assert read.dtype == np.uint32
    assert read.tolist() == [65536, 1, 2**32 - 1]
    assert count_tokens(tmp_path / "x.bin") == 3


def test_a_cut_wide_shard_is_refused(tmp_path):
    path = tmp_path / "x.bin"
    write_shard(path, [100_000, 1, 2])
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="truncated at byte 1034; 3 tokens need 1036 bytes"):
        read_shard(path)


def test_a_read_shard_cannot_be_changed(shard):
    with pytest.raises(ValueError, match="read-only"):
        read_shard(shard)[0] = 1


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone.bin: no such shard"):
        read_shard(tmp_path / "gone.bin")


@pytest.mark.parametrize(
    ("byte", "value", "message"),
    [
        (0, 20240521, "byte 0: not a token shard .magic 20240521, expected 20240520"),
        (4, 3, "byte 4: version 3 is newer than this code reads .2"),
        (4, 2, "truncated at byte 1224; 100 tokens need 1424 bytes"),
        (4, 0, "byte 4: version 0 is unknown"),
        (8, 0, "byte 8: a token count of 0"),
        (8, -5, "byte 8: a token count of -5"),
        (8, 101, "truncated at byte 1224; 101 tokens need 1226 bytes"),
        (8, 99, "trailing bytes from byte 1222 on; .* 99 tokens, 1222 bytes, but the file has 1224"),
    ],
)
def test_a_wrong_header_is_refused_with_file_and_byte(shard, byte, value, message):
    patch(shard, byte, value)
    for read in (count_tokens, read_shard):
        with pytest.raises(ValueError, match=f"some_train_000001.bin: {message}"):
            read(shard)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "ends at byte 0, within the header"),
        (1023, "ends at byte 1023, within the header"),
        (1200, "truncated at byte 1200; 100 tokens need 1224"),
    ],
)
def test_a_cut_shard_is_refused_with_expected_and_found_bytes(shard, size, message):
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(ValueError, match=message):
        read_shard(shard)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, 2**32], "token 2 has id 4294967296, outside 0 to 4294967295"),
        ([1, -1, 2**32], "token 1 has id -1"),
        ([], "1 to 2147483647 ids"),
        ([[1], [2]], "1 to 2147483647 ids"),
        ([1.5], "type float64; ids are integers"),
    ],
)
def test_ids_that_do_not_fit_are_refused_and_nothing_is_written(tmp_path, tokens, message):
    with pytest.raises(ValueError, match=message):
        write_shard(tmp_path / "x.bin", tokens)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_shard_and_no_other_file(shard, monkeypatch):
    before = shard.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*some_train_000001.bin'"):
        write_shard(shard, [1, 2, 3])
    assert shard.read_bytes() == before
    assert list(shard.parent.iterdir()) == [shard]
