"""Kills right before and after each change to the folders; the same command then ends with the same bytes.

What had been written or fetched before the kill is not done again.
"""

import json
import subprocess
import sys

import pytest

from data.prepare import prepare
from tests.data.test_fineweb import NAMES, REPO, shard
from tests.hub_server import ROOT, command

# Kills a preparation at its first change, at its second, and so on, each time from the same beginning, and starts it
# again; prints for each kill what it left, and what was done in both starts together. One process is imported and then
# forked.
KILLER = """
import json, os, shutil, signal, sys
from pathlib import Path
from data import hub, prepare, sharding

base, out, log, initial = (Path(word) for word in sys.argv[1:5])
arguments = json.loads(sys.argv[5])
hub.PARALLEL = 1  # so that no other download is broken off

def logged(function, name):
    def call(*args):
        done = name(*args)
        result = function(*args)
        if done:
            with log.open("a") as file:
                file.write(done + "\\n")
        return result
    return call

def fetched(self, remote, part, bar):
    return remote.name if hub._size(part) < remote.size else None

sharding.write_shard = logged(sharding.write_shard, lambda path, tokens: path.name)
hub.Hub._append = logged(hub.Hub._append, fetched)

def content():
    return {path.name: path.read_bytes().hex() for path in out.iterdir()} if out.exists() else {}

def die_at(moment):
    changes = [0]
    def dying(function):
        def call(*args, **kwargs):
            for _ in (function(*args, **kwargs) for _ in [die()]):
                die()
        return call
    def die():
        changes[0] += 1
        if changes[0] > moment:
            os.kill(os.getpid(), signal.SIGKILL)
    for name in ("replace", "rename", "unlink", "rmdir"):
        setattr(os, name, dying(getattr(os, name)))

def start(moment=None):
    if (child := os.fork()) == 0:
        sys.stderr = open(os.devnull, "w")
        if moment is not None:
            die_at(moment)
        prepare.prepare(out_dir=out, **arguments)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for moment in range(1000):
    shutil.rmtree(base)
    shutil.copytree(initial, base)
    log.write_text("")
    if (code := start(moment)) == 0:
        break
    assert code == -signal.SIGKILL, code
    killed = content()
    assert start() == 0
    print(json.dumps([killed, content(), log.read_text().split(), sorted(path.name for path in base.iterdir())]))
"""


def kill_everywhere(out, initial, arguments, environment=None):
    """The script above, whose lines are returned; `initial` is what the folder of `out` holds at first."""
    log = out.parent.parent / "log"
    words = ["-c", KILLER, *map(str, (out.parent, out, log, initial)), json.dumps(arguments)]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def contents(folder):
    return {path.name: path.read_bytes().hex() for path in folder.iterdir()}


@pytest.fixture
def initial(tmp_path):
    folder = tmp_path / "initial"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("overwrite", [False, True])
def test_text(tmp_path, out, initial, overwrite):
    lines = [json.dumps({"text": f"document {k} " * (k % 9)}) + "\n" for k in range(60)]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    arguments = {"source": "text", "path": str(tmp_path / "texts.jsonl"), "tokenizer": "bytes", "shard_tokens": 500}
    expected = prepare(out_dir=tmp_path / "whole", **arguments).folder
    out.parent.mkdir()
    if overwrite:  # something else is there
        arguments |= {"overwrite": True}
        prepare(out_dir=initial / out.name, **{**arguments, "shard_tokens": 2000})
    kills = kill_everywhere(out, initial, arguments)
    shards = sorted(name for name in contents(expected) if name.endswith(".bin"))
    assert len(kills) > 2 * len(shards)
    for killed, content, written, there in kills:
        assert content == contents(expected)
        assert there == [out.name]
        assert set(written) == set(shards)
        if not (overwrite and killed == content):  # else it was done, and is done again
            assert len(written) <= len(shards) + 1  # a shard may be there whose progress isn't


@pytest.mark.parametrize(
    ("first", "overwrite"),
    [
        (1, False),
        pytest.param(0, False, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
def test_public_shards(hub, tmp_path, out, initial, first, overwrite):
    """Fetched, added to a folder that has `first`, or in the place of others."""
    for seed, name in enumerate(NAMES):
        hub.files[REPO, name] = shard(tmp_path, seed, 1000)
    arguments = {"source": "fineweb10b", "shards": 3, "overwrite": overwrite}
    expected = prepare(out_dir=tmp_path / "whole", **arguments).folder
    out.parent.mkdir()
    if first:
        prepare("fineweb10b", initial / out.name, shards=first)
    kills = kill_everywhere(out, initial, arguments, command(hub.url)["env"])
    assert len(kills) >= 6
    for killed, content, fetched, there in kills:
        assert content == contents(expected)
        assert there == [out.name]
        if not (overwrite and killed == content):
            assert sorted(fetched) == sorted(NAMES[0 if overwrite or not first else first + 1 : 4])


def test_a_damaged_shard_is_replaced(hub, tmp_path, out, initial):
    for seed, name in enumerate(NAMES):
        hub.files[REPO, name] = shard(tmp_path, seed, 1000)
    arguments = {"source": "fineweb10b", "shards": 2}
    expected = prepare(out_dir=tmp_path / "whole", **arguments).folder
    out.parent.mkdir()
    prepare("fineweb10b", initial / out.name, shards=2)
    (initial / out.name / NAMES[1]).write_bytes(shard(tmp_path, 99, 1000))
    for _, content, fetched, there in kill_everywhere(out, initial, arguments, command(hub.url)["env"]):
        assert content == contents(expected)
        assert there == [out.name]
        assert fetched == [NAMES[1]]
