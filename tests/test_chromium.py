"""The browser of the tests: a page that never answers ends by itself, and the next one is opened in a new browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chromium import Chromium, ChromiumWasSilent, needs_chromium
from tests.chromium import chromium as chromium  # a fixture


@needs_chromium
@pytest.mark.parametrize("script", ["(() => { while (true) {} })()", "new Promise(() => {})"])
def test_a_page_that_hangs_is_ended_and_the_next_one_opens(
    script: str, chromium: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_text("<p>here</p>")
    monkeypatch.setattr(chromium, "_patience", 3.0)
    with pytest.raises(ChromiumWasSilent, match="for 3 s"), chromium.open(page.as_uri(), lambda url: True) as opened:
        opened.evaluate(script)
    monkeypatch.undo()
    with chromium.open(page.as_uri(), lambda url: True) as opened:
        assert opened.locator("p").inner_text() == "here"


@needs_chromium
def test_what_goes_wrong_on_a_page_is_told(chromium: Chromium, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<script>console.warn('mind'); throw new Error('broken')</script><img src='other.png'>")
    with pytest.raises(AssertionError) as failed, chromium.open(page.as_uri(), lambda url: url == page.as_uri()):
        pass
    assert all(words in str(failed.value) for words in ("mind", "broken", "other.png"))
