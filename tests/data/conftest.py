"""A hub on this machine, for the tests of downloads."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

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


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "shards" / "mine"
