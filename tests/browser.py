"""The browser that the tests open pages in: Chromium or Chrome of the system, or the one that Playwright installed."""

import os
import shutil
from functools import cache
from pathlib import Path

from playwright.sync_api import Browser, Playwright, sync_playwright

NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")
NO_BROWSER = (
    "No browser was found, so the tests marked browser were left out. To run them: apt-get install chromium, "
    "or .venv/bin/python -m playwright install chromium"
)
# Nothing of the browser's own that would go to the network.
QUIET = (
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


@cache
def find_browser() -> str | None:
    """The path of a browser, if there is one."""
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return found
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


def start_browser(playwright: Playwright) -> Browser:
    """A headless browser with a new, empty profile."""
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()  # root has none
    return playwright.chromium.launch(executable_path=find_browser(), args=[*QUIET, *sandbox])
