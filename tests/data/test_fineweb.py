"""Against a local server with the hub's layout, which breaks off, corrupts, and answers 404, 429 and 503."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from data import hub as hub_module
from data.loader import open_split
from data.prepare import prepare
from data.shards import write_shard
from tests.hub_server import command

REPO = "kjj0/fineweb10B-gpt2"
NAMES = ["fineweb_val_000000.bin", *(f"fineweb_train_{k:06d}.bin" for k in range(1, 6))]
N_TOKENS = 50_000


def shard(folder, seed, n_tokens=N_TOKENS, largest=50256):
    ids = np.random.default_rng(seed).integers(0, largest, n_tokens, dtype=np.uint16)
    ids[:: n_tokens // 10] = largest
    write_shard(folder / "shard.bin", ids)
    return (folder / "shard.bin").read_bytes()


@pytest.fixture
def server(hub, tmp_path):
    """The public shards, 50,000 tokens each."""
    for seed, name in enumerate(NAMES):
        hub.files[REPO, name] = shard(tmp_path, seed)
    return hub


def stored(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".bin"}


def published(server, shards):
    return {name: server.files[REPO, name] for name in NAMES[: shards + 1]}


def fetched(server):
    """The files that were asked for, with what was asked of them."""
    gets = [(path.split("/")[-1], part) for method, path, part in server.requests if method == "GET"]
    return [get for get in gets if get[0].endswith(".bin")]


def test_public_shards_become_a_prepared_folder(server, out):
    done = prepare("fineweb10b", out, shards=3)
    assert stored(out) == published(server, 3)
    assert sorted(path.name for path in out.iterdir()) == sorted([*NAMES[:4], "manifest.json"])
    assert [entry["name"] for entry in done.manifest["files"]] == NAMES[:4]
    assert {entry["tokens"] for entry in done.manifest["files"]} == {N_TOKENS}
    assert {entry["documents"] for entry in done.manifest["files"]} == {10}
    assert (done.manifest["vocab_size"], done.manifest["shards"]) == (50257, 3)
    assert len(open_split(out, "train", vocab_size=50257)) == 3 * N_TOKENS
    assert [path.name for path in out.parent.iterdir()] == ["mine"]


def test_a_later_run_verifies_without_the_hub(server, out):
    prepare("fineweb10b", out, shards=2)
    server.requests.clear()
    again = prepare("fineweb10b", out, shards=2)
    assert not again.fresh
    assert server.requests == []


def test_a_later_run_names_corrupt_and_missing_files_and_fetches_only_those(server, out, capsys):
    first = prepare("fineweb10b", out, shards=4)
    raw = bytearray((out / NAMES[2]).read_bytes())
    raw[5000] ^= 1
    (out / NAMES[2]).write_bytes(raw)
    (out / NAMES[4]).unlink()
    server.requests.clear()
    again = prepare("fineweb10b", out, shards=4)
    assert again.manifest == first.manifest
    assert stored(out) == published(server, 4)
    assert sorted(name for name, _ in fetched(server)) == [NAMES[2], NAMES[4]]
    said = capsys.readouterr().err
    assert f"{NAMES[2]}: its SHA-256 is" in said
    assert f"{NAMES[4]}: listed in manifest.json but missing; fetching it again" in said
    assert [path.name for path in out.parent.iterdir()] == ["mine"]


def test_more_shards_are_added_to_those_that_are_there_and_fewer_are_a_part_of_them(server, out):
    prepare("fineweb10b", out, shards=2)
    server.requests.clear()
    assert prepare("fineweb10b", out, shards=4).manifest["shards"] == 4
    assert sorted(name for name, _ in fetched(server)) == NAMES[3:5]
    assert stored(out) == published(server, 4)
    server.requests.clear()
    assert not prepare("fineweb10b", out, shards=1).fresh
    assert server.requests == []
    with pytest.raises(ValueError, match="prepared with source=fineweb10b, now asked for source=fineweb100b"):
        prepare("fineweb100b", out, shards=1)


def test_broken_connections_go_on_where_they_broke(server, out, capsys):
    server.faults["GET", NAMES[1]] = [3000, 40_000, 0]
    prepare("fineweb10b", out, shards=1)
    assert stored(out) == published(server, 1)
    parts = [part for name, part in fetched(server) if name == NAMES[1]]
    assert parts == [None, "bytes=3000-", "bytes=43000-", "bytes=43000-"]
    assert server.sent[NAMES[1]] == len(server.files[REPO, NAMES[1]])
    assert capsys.readouterr().err.count(f"download {NAMES[1]}: RemoteProtocolError") == 3


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_busy_servers_are_asked_again(server, out, status):
    for method in ("HEAD", "GET"):
        server.faults[method, NAMES[1]] = [(status, {})] * hub_module.RETRIES
    prepare("fineweb10b", out, shards=1)
    assert stored(out) == published(server, 1)


def test_the_waits_double_or_last_as_long_as_the_server_asks(server, out, monkeypatch, capsys):
    monkeypatch.setattr(hub_module, "FIRST_WAIT", 0.25)
    server.faults["GET", NAMES[1]] = [(503, {}), (503, {}), (429, {"Retry-After": "2"})]
    begin = time.monotonic()
    prepare("fineweb10b", out, shards=1)
    assert 0.25 + 0.5 + 2 < time.monotonic() - begin < 10
    assert f"download {NAMES[1]}: HTTP 429; again in 2 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([(429, {})] * 9, r"HTTP 429\); run the same command again later: it goes on where it stopped"),
        ([(503, {})] * 9, r"HTTP 503\); run the same command again later: it goes on where it stopped"),
        ([(429, {"Retry-After": "9999"})], r"HTTP 429\); run the same command again later"),
        ([(403, {})], r"HTTP 403\); it isn't there, or not for you: .*the same command then goes on where it stopped"),
    ],
)
def test_after_some_tries_there_is_one_error_and_the_next_start_fetches_only_the_rest(server, out, faults, message):
    server.faults["GET", NAMES[2]] = [5000, *faults]
    with pytest.raises(ConnectionError, match=rf"could not download {NAMES[2]} of {REPO} .*{message}"):
        prepare("fineweb10b", out, shards=2)
    assert not out.exists()
    server.faults.clear()
    server.requests.clear()
    before = dict(server.sent)
    prepare("fineweb10b", out, shards=2)
    assert stored(out) == published(server, 2)
    assert (NAMES[2], "bytes=5000-") in fetched(server)
    assert server.sent[NAMES[2]] - before[NAMES[2]] == len(server.files[REPO, NAMES[2]]) - 5000
    assert [path.name for path in out.parent.iterdir()] == ["mine"]


def test_a_file_that_arrives_corrupt_is_named_and_fetched_again(server, out, capsys):
    server.faults["GET", NAMES[1]] = ["corrupt", "corrupt"]
    prepare("fineweb10b", out, shards=1)
    assert stored(out) == published(server, 1)
    assert capsys.readouterr().err.count(f"{NAMES[1]}: its SHA-256 is") == 2


def test_a_file_that_always_arrives_corrupt_ends_in_one_error(server, out):
    server.faults["GET", NAMES[1]] = ["corrupt"] * 9
    with pytest.raises(ConnectionError, match=rf"{NAMES[1]} of {REPO} arrived damaged 3 times; .*SHA-256"):
        prepare("fineweb10b", out, shards=1)
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda tmp_path: b"<html>" * 500, "byte 0: not a token shard"),
        (lambda tmp_path: shard(tmp_path, 0)[:-2], "truncated at byte"),
        (lambda tmp_path: shard(tmp_path, 0) + b"xx", "trailing bytes from byte"),
        (lambda tmp_path: shard(tmp_path, 0, largest=50257), "token 0 has id 50257, outside the 50257 ids of gpt2"),
    ],
)
def test_what_the_hub_has_must_be_a_whole_shard_of_gpt2_tokens(server, out, tmp_path, content, message):
    server.files[REPO, NAMES[1]] = content(tmp_path)
    with pytest.raises(ConnectionError, match=f"{NAMES[1]} .*{message}"):
        prepare("fineweb10b", out, shards=1)
    assert not out.exists()


def test_a_file_that_the_hub_replaced_meanwhile_is_not_mixed_with_the_old_one(server, out, tmp_path):
    for content in (server.files[REPO, NAMES[1]], shard(tmp_path, 99)):
        server.files[REPO, NAMES[1]] = content
        server.faults["GET", NAMES[1]] = [5000, *[(403, {})]]
        with pytest.raises(ConnectionError):
            prepare("fineweb10b", out, shards=1)
        (part,) = out.with_name(".mine.partial").glob(f"{NAMES[1]}.*")  # the old one is gone
        assert content.startswith(part.read_bytes())
    prepare("fineweb10b", out, shards=1)
    assert stored(out) == published(server, 1)


@pytest.fixture
def begun(server, out):
    """The first 5000 bytes of the first training shard."""
    server.faults["GET", NAMES[1]] = [5000, (403, {})]
    with pytest.raises(ConnectionError):
        prepare("fineweb10b", out, shards=1)
    (part,) = out.with_name(".mine.partial").glob(f"{NAMES[1]}.*")
    assert part.stat().st_size == 5000
    return part


@pytest.mark.parametrize("answer", ["whole", "from 0"])
def test_a_server_that_sends_another_range_is_believed_in_what_it_says(server, out, begun, answer, capsys):
    server.faults["GET", NAMES[1]] = [answer]
    prepare("fineweb10b", out, shards=1)
    assert stored(out) == published(server, 1)
    assert "fetching it again" not in capsys.readouterr().err


def test_a_part_that_is_longer_than_the_file_is_dropped(server, out, begun, capsys):
    begun.write_bytes(bytes(len(server.files[REPO, NAMES[1]]) + 1))
    prepare("fineweb10b", out, shards=1)
    assert stored(out) == published(server, 1)
    assert "fetching it again" not in capsys.readouterr().err


def test_a_connection_that_breaks_ever_again_is_gone_on_with_as_long_as_something_comes(server, out):
    server.faults["GET", NAMES[1]] = [1000] * (hub_module.RETRIES + 3)
    prepare("fineweb10b", out, shards=1)
    assert stored(out) == published(server, 1)


def test_an_answer_that_ends_early_in_good_order_is_gone_on_with(server, out, capsys):
    server.faults["GET", NAMES[1]] = [("short", 4000)]
    prepare("fineweb10b", out, shards=1)
    assert (NAMES[1], "bytes=4000-") in fetched(server)
    assert "fetching it again" not in capsys.readouterr().err


def test_a_disk_needs_room_only_for_what_is_still_to_come(server, out, begun, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=len(server.files[REPO, NAMES[1]]) - 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    prepare("fineweb10b", out, shards=1)
    assert stored(out) == published(server, 1)


def test_a_file_that_waits_for_another_try_is_not_tried_when_another_has_failed(server, out, monkeypatch):
    monkeypatch.setattr(hub_module, "FIRST_WAIT", 30.0)
    server.faults["GET", NAMES[2]] = [(503, {})]
    append = hub_module.Hub._append

    def fail(self, remote, part, bar):
        if remote.name == NAMES[1]:
            time.sleep(0.5)
            raise OSError(errno.EIO, "the disk is broken")
        append(self, remote, part, bar)

    monkeypatch.setattr(hub_module.Hub, "_append", fail)
    begin = time.monotonic()
    with pytest.raises(OSError, match="the disk is broken"):
        prepare("fineweb10b", out, shards=2)
    assert time.monotonic() - begin < 10
    assert [name for name, _ in fetched(server)].count(NAMES[2]) == 1


def test_bytes_are_asked_for_as_they_are(server, out):
    prepare("fineweb10b", out, shards=1)
    assert server.encodings[NAMES[1]] == "identity"


def test_one_file_that_fails_stops_the_others_which_keep_what_they_have(server, out):
    server.faults["GET", NAMES[1]] = [(403, {})]
    server.faults["GET", NAMES[2]] = ["drip"]  # would take ten seconds
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match=rf"download {NAMES[1]} .*HTTP 403"):
        prepare("fineweb10b", out, shards=2)
    assert time.monotonic() - begin < 5
    server.requests.clear()
    prepare("fineweb10b", out, shards=2)
    assert stored(out) == published(server, 2)


def test_a_missing_file_and_a_missing_data_set_say_so_at_once(server, out):
    del server.files[REPO, NAMES[2]]
    with pytest.raises(ConnectionError, match=rf"could not find {NAMES[2]} of {REPO} .*HTTP 404.*it isn't there"):
        prepare("fineweb10b", out, shards=3)
    with pytest.raises(ConnectionError, match=r"of kjj0/fineweb100B-gpt2 .*HTTP 404.*it isn't there"):
        prepare("fineweb100b", out, shards=1)
    assert all(method == "HEAD" for method, _, _ in server.requests)


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_is_refused_is_not_tried_again(server, out, method, status):
    server.faults[method, NAMES[1]] = [(status, {})] * 9
    with pytest.raises(
        ConnectionError, match=rf"{NAMES[1]} of {REPO} .*\(HTTP {status}\); it isn't there, or not for you: check .*"
    ):
        prepare("fineweb10b", out, shards=1)
    assert len(server.faults[method, NAMES[1]]) == 8


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(server, out, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=3 * len(server.files[REPO, NAMES[0]]))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"GB are still to come, but the disk has .* ask for fewer shards"):
        prepare("fineweb10b", out, shards=3)
    assert fetched(server) == []


def test_a_disk_that_fills_up_while_shards_are_added_leaves_what_there_is(server, out, monkeypatch):
    prepare("fineweb10b", out, shards=2)
    before = stored(out)

    def full(self, remote, part, bar):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))

    with monkeypatch.context() as patch:
        patch.setattr(hub_module.Hub, "_append", full)
        with pytest.raises(OSError, match=r"\.mine\.partial: the disk is full; free some space and run"):
            prepare("fineweb10b", out, shards=4)
    assert stored(out) == before
    assert len(open_split(out, "train", vocab_size=50257)) == 2 * N_TOKENS
    prepare("fineweb10b", out, shards=4)
    assert stored(out) == published(server, 4)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(("call", "at"), [("mkdir", ".mine.partial"), ("open", "lock"), ("write_text", ".manifest")])
@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_is_told_wherever_it_shows(server, out, monkeypatch, number, call, at, there):
    if there:
        prepare("fineweb10b", out, shards=1)
    real = getattr(Path, call)

    def full(self, *args, **kwargs):
        if self.name.startswith(at):
            raise OSError(number, os.strerror(number), str(self))
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, full)
        with pytest.raises(OSError, match=r"\.mine\.partial: the disk is full; free some space and run"):
            prepare("fineweb10b", out, shards=2)
    assert stored(out) == published(server, 1) if there else not out.exists()
    prepare("fineweb10b", out, shards=2)
    assert stored(out) == published(server, 2)
    assert [path.name for path in out.parent.iterdir()] == ["mine"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_that_is_not_ours_is_left_alone_and_refused_where_it_is_in_the_way(server, out, tmp_path, whole):
    first = prepare("fineweb10b", out, shards=1)
    strange = shard(tmp_path, seed=77) if whole else b"not a shard"
    (out / NAMES[2]).write_bytes(strange)
    again = prepare("fineweb10b", out, shards=1)
    assert (again.fresh, again.manifest) == (False, first.manifest)
    with pytest.raises(ValueError, match=f"{NAMES[2]}: manifest.json doesn't list it, .*; move it away"):
        prepare("fineweb10b", out, shards=2)
    assert (out / NAMES[2]).read_bytes() == strange
    assert [path.name for path in out.parent.iterdir()] == ["mine"]
    (out / NAMES[2]).unlink()
    prepare("fineweb10b", out, shards=2)
    assert stored(out) == published(server, 2)


@pytest.fixture
def half_merged(server, out, monkeypatch):
    """A folder of one shard whose second has been moved in by a start that ended before the third."""
    prepare("fineweb10b", out, shards=1)
    replace = os.replace

    def end(source, target):
        if Path(target) == out / NAMES[3]:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", end)
        with pytest.raises(KeyboardInterrupt):
            prepare("fineweb10b", out, shards=3)
    assert stored(out) == published(server, 2)
    assert json.loads((out / "manifest.json").read_text())["shards"] == 1
    server.requests.clear()
    return out


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_moving_shards_in_is_finished_without_the_hub(server, half_merged, shards):
    done = prepare("fineweb10b", half_merged, shards=shards)
    assert done.manifest["shards"] == 3
    assert server.requests == []
    assert stored(half_merged) == published(server, 3)
    assert [path.name for path in half_merged.parent.iterdir()] == ["mine"]


def test_a_half_merged_folder_is_told_from_others_and_can_be_prepared_anew(server, half_merged):
    with pytest.raises(ValueError, match=f"{NAMES[2]}: not listed in manifest.json; .*run it again"):
        open_split(half_merged, "train")
    prepare("fineweb10b", half_merged, shards=1, overwrite=True)
    assert stored(half_merged) == published(server, 1)
    assert [path.name for path in half_merged.parent.iterdir()] == ["mine"]


def test_a_whole_folder_that_waits_to_take_the_place_of_another_is_not_mixed_with_it(server, out, tmp_path):
    prepare("fineweb10b", out, shards=3)
    prepare("fineweb10b", tmp_path / "other", shards=1)
    (tmp_path / "other").rename(out.with_name(".mine.partial"))  # as a kill before its last rename leaves it
    server.requests.clear()
    prepare("fineweb10b", out, shards=1, overwrite=True)
    assert server.requests == []
    assert stored(out) == published(server, 1)
    assert [path.name for path in out.parent.iterdir()] == ["mine"]


@pytest.mark.parametrize("left", [".mine.old/x.bin", ".mine.partial/.progress.json.tmp", ".mine.partial/lock"])
def test_what_kills_leave_is_removed_by_the_next_start(server, out, left):
    prepare("fineweb10b", out, shards=1)
    (out.parent / left).parent.mkdir()
    (out.parent / left).write_bytes(b"")
    prepare("fineweb10b", out, shards=1)
    assert [path.name for path in out.parent.iterdir()] == ["mine"]


def test_shards_are_not_moved_in_where_one_is_lost(server, half_merged):
    partial = half_merged.with_name(".mine.partial")
    (partial / NAMES[3]).unlink()
    with pytest.raises(ValueError, match=f"{NAMES[2]}: manifest.json doesn't list it"):
        prepare("fineweb10b", half_merged, shards=3)
    assert json.loads((half_merged / "manifest.json").read_text())["shards"] == 1


def test_shards_are_downloaded_side_by_side(server, out, monkeypatch):
    together = threading.Barrier(3, timeout=20)  # broken, an error, where fewer than three come at once
    append = hub_module.Hub._append

    def meet(self, remote, part, bar):
        together.wait()
        append(self, remote, part, bar)

    monkeypatch.setattr(hub_module.Hub, "_append", meet)
    prepare("fineweb10b", out, shards=2)
    assert stored(out) == published(server, 2)


def test_a_download_shows_its_bytes_and_those_that_were_there_before(server, out, shown):
    server.faults["GET", NAMES[2]] = [5000, (403, {})]
    with pytest.raises(ConnectionError):
        prepare("fineweb10b", out, shards=2)
    server.faults.clear()
    shown.clear()
    prepare("fineweb10b", out, shards=2)
    (bar,) = [bar for bar in shown if bar.desc == "fineweb10b"]
    assert (bar.n, bar.total, bar.unit) == (sum(map(len, published(server, 2).values())),) * 2 + ("B",)
    assert bar.first >= 5000


@pytest.mark.parametrize("faults", [["corrupt"], [5000, "whole"]])
def test_what_comes_twice_is_shown_once(server, out, shown, faults):
    server.faults["GET", NAMES[1]] = faults
    prepare("fineweb10b", out, shards=1)
    (bar,) = [bar for bar in shown if bar.desc == "fineweb10b"]
    assert bar.n == bar.total == sum(map(len, published(server, 1).values()))


def test_a_killed_download_goes_on_where_it_was(server, out):
    server.faults["GET", NAMES[2]] = [("stall", 3000)]  # less than a buffer of a file
    words = ["source=fineweb10b", "shards=3", f"out_dir={out}"]
    with subprocess.Popen(**command(server.url, *words)) as process:
        deadline = time.monotonic() + hub_module.READ_TIMEOUT - 5  # a timeout would close the file
        part = out.with_name(".mine.partial")
        while not any(path.stat().st_size == 3000 for path in part.glob(f"{NAMES[2]}.*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    server.requests.clear()
    done = subprocess.run(**command(server.url, *words), check=False)
    assert done.returncode == 0, done.stderr
    assert stored(out) == published(server, 3)
    assert (NAMES[2], "bytes=3000-") in fetched(server)


@pytest.mark.parametrize("words", [("fineweb10b", "shards=1"), ("fineweb", "tokenizer=bytes")])
@pytest.mark.parametrize("offline", [{}, pytest.param({"HF_HUB_OFFLINE": "1"}, marks=pytest.mark.slow)])
def test_without_a_network_the_command_ends_in_seconds_and_says_what_to_do(tmp_path, words, offline):
    begin = time.monotonic()
    words = (f"source={words[0]}", words[1], f"out_dir={tmp_path / 'out'}")
    failed = subprocess.run(**command("http://127.0.0.1:9", *words, **offline), check=False)
    assert time.monotonic() - begin < 30  # most of it is the start of Python on a busy machine
    assert failed.returncode == 2
    assert failed.stderr.startswith(f"error: {words[0]}: could not find ")
    assert failed.stderr.count("\n") == 1
    assert ("HF_HUB_OFFLINE" if offline else "check the network") in failed.stderr


@contextmanager
def silent_address(accepts):
    """An address that takes connections and never answers, or doesn't even take them."""
    with socket.socket() as listening, ExitStack() as waiting:
        listening.bind(("127.0.0.1", 0))
        listening.listen(100 if accepts else 0)
        for _ in range(0 if accepts else 4):  # more than wait in the queue
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("accepts", [True, False])
def test_a_network_that_swallows_everything_is_given_up_on(server, out, accepts, monkeypatch):
    monkeypatch.setattr(hub_module, "HEAD_TIMEOUT", 0.2)
    monkeypatch.setattr(hub_module, "CONNECT_TIMEOUT", 0.2)
    with silent_address(accepts) as url:
        monkeypatch.setattr(hub_module, "hf_hub_url", lambda repo, name, repo_type: f"{url}/{name}")
        with pytest.raises(ConnectionError, match=r"Timeout.*\); check the network \(or HF_ENDPOINT\)"):
            prepare("fineweb10b", out, shards=1)


@pytest.mark.slow
@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize("words", [("source=fineweb10b", "shards=1"), ("source=fineweb", "tokenizer=bytes")])
def test_the_command_gives_a_silent_network_up_within_seconds(tmp_path, words, accepts):
    with silent_address(accepts) as url:
        begin = time.monotonic()
        failed = subprocess.run(**command(url, *words, f"out_dir={tmp_path / 'out'}"), check=False)
    assert time.monotonic() - begin < 40  # HEAD_TIMEOUT, and the start of Python on a busy machine
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 1
    assert "check the network" in failed.stderr
