"""What every test gets: checked shapes, a seed, and a small model whose every part matters to its output."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook

# Before anything imports these packages: their annotated shapes and classes are checked at each call. Plain numbers and
# words are not: they come from a user's config, and to refuse a wrong one is the code's own work.
PLAIN = "beartype.FrozenDict({plain: object for plain in (bool, int, float, str)})"
install_import_hook(["model", "training"], f"beartype.beartype(conf=beartype.BeartypeConf(hint_overrides={PLAIN}))")

from model.attend.native_build import why_impossible  # noqa: E402
from model.gpt import GPT, GPTConfig  # noqa: E402
from tests.browser import NO_BROWSER, find_browser  # noqa: E402

torch.set_num_threads(1)  # the tensors are small, and the tests may run in several processes


def pytest_configure(config: pytest.Config) -> None:
    # omegaconf annotates with typing's old names
    config.addinivalue_line("filterwarnings", "ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a CUDA device, a browser or a compiler the tests that need it are deselected: no part of that suite."""
    marked = {item for item in items if item.get_closest_marker("browser")}
    lacking = set() if marked and find_browser() else marked
    if not torch.cuda.is_available():
        lacking |= {item for item in items if item.get_closest_marker("gpu")}
    if why_impossible():
        lacking |= {item for item in items if item.get_closest_marker("compiler")}
    config.hook.pytest_deselected(items=list(lacking))
    items[:] = [item for item in items if item not in lacking]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says that tests were left out for want of a browser or of a compiler."""
    if find_browser() is None:
        terminalreporter.write_line(NO_BROWSER, yellow=True)
    if reason := why_impossible():
        terminalreporter.write_line(f"without the tests of attention=native: {reason}", yellow=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in each test, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def small_gpt() -> Callable[..., GPT]:
    """small_gpt(position, **sizes): a seeded GPT that is past its initialisation.

    What starts at zero is redrawn, so that attention and every layer reach the output, and what a position scheme
    learns is moved, so that layers and heads differ.
    """

    def build(position: Any = None, seed: int = 0, **sizes: Any) -> GPT:
        torch.manual_seed(seed)
        defaults = {"n_layer": 2, "n_head": 2, "width": 32, "vocab_size": 31, "train_length": 16}
        model = GPT(GPTConfig(**{**defaults, **sizes}, position=position or {}))
        with torch.no_grad():
            for parameter in [model.output.weight, *(p for p in model.blocks.parameters() if not p.any())]:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            for parameter in model.position.parameters():
                parameter.mul_(torch.rand_like(parameter) + 0.5)
        return model

    return build
