"""A hub on this machine, for the tests of downloads."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub.constants
import pytest
from tqdm import tqdm

from data import hub as hub_module
from tests.hub_server import HubServer, hub_server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A server that the client of this process talks to, without waiting."""
    with hub_server() as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(hub_module, "FIRST_WAIT", 0.001)
        yield running


class Shown(tqdm):
    """A progress bar as on a terminal; `first` is where it started to move, `texts` what it said behind the rate."""

    bars: ClassVar[list["Shown"]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})
        self.first: float | None = None
        self.texts: list[str] = []
        self.bars.append(self)

    def update(self, n: float | None = 1) -> bool | None:
        if n and self.first is None:
            self.first = self.n + n
        return super().update(n)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        self.texts.append(s)
        super().set_postfix_str(s, refresh)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Shown]:
    """The progress bars from now on."""
    Shown.bars.clear()
    for module in ("data.hub", "data.sharding"):
        monkeypatch.setattr(f"{module}.tqdm", Shown)
    return Shown.bars


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "shards" / "mine"
