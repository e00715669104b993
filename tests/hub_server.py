"""A small HTTP server with the layout of the Hugging Face hub, and its faults."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
ROOT = Path(__file__).resolve().parents[1]


class HubServer(ThreadingHTTPServer):
    """Serves `files` of data sets: {(repo, name): content}; `requests` lists (method, repo/name, range).

    `faults` are taken one at a time, by method and name: (status, headers) instead of the file, a number of bytes
    after which the connection breaks, ("stall", bytes) where no more come, ("short", bytes) where they are said to be
    all, "drip" for a few bytes ten times a second, "corrupt" for two wrong bytes, or in answer to a range "whole" for
    the file, "from 0" for its beginning as a range.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[tuple[str, str], bytes] = {}
        self.faults: dict[tuple[str, str], list[Any]] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.sent: Counter[str] = Counter()
        self.encodings: dict[str, str | None] = {}  # that the client accepts, by name
        self.stopped = threading.Event()
        self.dead = False
        self.commit = COMMIT  # the newest; every revision holds the same files
        self.url = f"http://127.0.0.1:{self.server_port}"

    def die(self) -> None:
        """From now on connections are refused, and those that are open are closed."""
        self.dead = True
        self.socket.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error."""

    def fault(self, method: str, name: str) -> Any:
        waiting = self.faults.get((method, name))
        return waiting.pop(0) if waiting else None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if self.server.dead:
            self.close_connection = True
            return
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        if found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._file(found[1], found[2])
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(/.*)?", path):
            self._api(found[1], found[2] or "", body)
        else:
            self._send(404, {})

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _file(self, repo: str, name: str) -> None:
        content = self.server.files.get((repo, name))
        if content is None:
            missing = "EntryNotFound" if any(known == repo for known, _ in self.server.files) else "RepoNotFound"
            return self._send(404, {"X-Error-Code": missing, "X-Repo-Commit": self.server.commit})
        fault = self.server.fault(self.command, name)
        if isinstance(fault, tuple) and isinstance(fault[0], int):
            return self._send(fault[0], fault[1])
        sha256 = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{sha256}"', "X-Repo-Commit": self.server.commit, "Accept-Ranges": "bytes"}
        self.server.encodings[name] = self.headers.get("Accept-Encoding")
        begin, end = 0, len(content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "") if fault != "whole" else "")
        if asked:
            begin, end = int(asked[1]) if fault != "from 0" else 0, min(end, int(asked[2] or end) + 1)
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        part = content[begin:end]
        if isinstance(fault, tuple) and fault[0] == "short":
            part, fault = part[: fault[1]], None
        self.send_response(206 if asked else 200)
        for key, value in {**headers, "Content-Length": str(len(part))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        if fault == "corrupt":
            part = bytes([part[0] ^ 1]) + part[1:-1] + bytes([part[-1] ^ 1])
        if isinstance(fault, int):
            part, self.close_connection = part[:fault], True
        if fault == "drip":
            return self._drip(part)
        stalls = isinstance(fault, tuple)
        if stalls:
            part = part[: fault[1]]
        self.server.sent[name] += len(part)
        self.wfile.write(part)
        if stalls:
            self.server.stopped.wait()
        return None

    def _drip(self, part: bytes) -> None:
        for begin in range(0, len(part), 1000):
            self.wfile.write(part[begin : begin + 1000])
            if self.server.stopped.wait(0.1):
                break

    def _api(self, repo: str, rest: str, body: bytes) -> None:
        files = {name: content for (known, name), content in self.server.files.items() if known == repo}
        if not files:
            return self._send(404, {"X-Error-Code": "RepoNotFound"})
        if re.fullmatch("(/revision/.*)?", rest):
            siblings = [{"rfilename": name} for name in files]
            return self._json(
                {"id": repo, "sha": self._revision(rest), "private": False, "tags": [], "siblings": siblings}
            )
        if found := re.fullmatch(r"/tree/[^/]+/?(.*)", rest):
            inside = {name for name in files if not found[1] or name.startswith(f"{found[1]}/")}
            recursive = "recursive=true" in urlsplit(self.path).query.lower()
            return self._json(listing(files, inside, found[1], recursive)) if inside else self._send(404, {})
        if rest.startswith("/paths-info/"):
            asked = re.findall(r"paths=([^&]+)", body.decode()) or json.loads(body or b"{}").get("paths", [])
            names = [unquote(name) for name in asked]
            found = [entry(name, files[name]) for name in names if name in files]
            folders = [n for n in names if n not in files and any(known.startswith(f"{n}/") for known in files)]
            return self._json([*found, *({"type": "directory", "path": n, "oid": "0" * 40} for n in folders)])
        return self._send(404, {})

    def _revision(self, rest: str) -> str:
        asked = re.search("[0-9a-f]{40}", rest)
        return asked[0] if asked else self.server.commit

    def _json(self, value: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def listing(files: dict[str, bytes], inside: set[str], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """The entries of a folder, those of its subfolders too if `recursive`."""
    depth = len(folder.split("/")) if folder else 0
    folders = {"/".join(name.split("/")[:k]) for name in inside for k in range(depth + 1, len(name.split("/")))}
    entries = [entry(name, files[name]) for name in sorted(inside)]
    entries += [{"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders)]
    return [found for found in entries if recursive or found["path"].count("/") == depth]


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()


def command(server_url: str, *words: object, **environment: str) -> dict[str, Any]:
    """What subprocess needs to prepare data from a server of that address."""
    return {
        "args": [sys.executable, "scripts/prepare_data.py", *map(str, words)],
        "cwd": ROOT,
        "env": {
            **os.environ,
            "HF_ENDPOINT": server_url,
            "USE_TORCH": "0",  # `datasets` imports faster, and asks no other server
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
            **environment,
        },
        "stderr": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
    }
