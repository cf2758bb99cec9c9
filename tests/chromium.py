"""A real headless Chromium for tests of pages. One that stops answering is killed, and its test is run once more.

Playwright waits without a limit for a new page, a script and a turn of the wheel, and its own clean-up waits as well:
a browser that hangs would hold the whole run, past every time limit that pytest sets.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("NANSCAN_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE = 120.0  # seconds for all that one test does on its page; the slowest takes 5 on a busy machine
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium, or set NANSCAN_CHROMIUM to one"
)
# What a page does wrong fails its test at once; only a browser that was killed for its silence gives it a second one.
once_more_if_silent = pytest.mark.flaky(reruns=1, only_rerun=["ChromiumWasSilent"])


def is_bad(said: Any) -> bool:
    """Whether a line on the console is an error or a warning; one is about how tests read what was drawn."""
    return said.type in ("error", "warning") and not said.text.startswith("Canvas2D: Multiple readback")


class ChromiumWasSilent(Exception):
    """It was killed, as it did not answer."""


class Chromium:
    """Opens pages in one browser, and in a new one after that was killed."""

    def __init__(self, running: Any, patience: float = PATIENCE) -> None:
        self._running = running
        self._patience = patience
        self._browser: Any = None
        self._killed = False

    @contextlib.contextmanager
    def open(self, url: str, is_own: Callable[[str], bool], **options: Any) -> Iterator[Any]:
        """A page that nothing may go wrong on, and that may ask for nothing else than what `is_own`.

        Raises:
            ChromiumWasSilent: the block took longer than the patience.
        """
        problems: list[str] = []
        self._killed = False
        limit = threading.Timer(self._patience, self._kill)
        limit.start()
        try:
            page = self._alive().new_page(**options)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda said: is_bad(said) and problems.append(said.text))
            page.on("request", lambda asked: is_own(asked.url) or problems.append(asked.url))
            page.goto(url)
            yield page
            page.close()
        except BaseException as error:
            if self._killed:
                raise ChromiumWasSilent(f"for {self._patience:g} s: {error}") from error
            self.close()  # with whatever state this page left it in
            raise
        finally:
            limit.cancel()
        if problems:
            raise AssertionError(f"on the page: {problems}")

    def _alive(self) -> Any:
        if self._browser is None or not self._browser.is_connected():
            # Without a GPU, asking for one is what a new page is known to wait for.
            options = ["--no-sandbox", "--disable-gpu"]
            self._browser = self._running.chromium.launch(executable_path=CHROMIUM, args=options)
        return self._browser

    def _kill(self) -> None:
        self._killed = True
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "chrom" in process.name():
                    process.kill()

    def close(self) -> None:
        """End the browser, by force if it doesn't."""
        limit = threading.Timer(self._patience, self._kill)
        limit.start()
        try:
            if self._browser is not None:
                self._browser.close()
        finally:
            limit.cancel()
            self._browser = None


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    """One for the tests of a module."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as running:
        opened = Chromium(running)
        yield opened
        opened.close()
