"""The page of `nanscan report` in a real headless Chromium: found on PATH or by NANSCAN_CHROMIUM, else skipped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanscan.reporting.page import write_page
from nanscan.reporting.reading import read_log
from tests.chromium import Chromium, needs_chromium, once_more_if_silent
from tests.chromium import chromium as chromium  # a fixture
from tests.report_logs import EVIL, origin, skipped, step, train, write, write_long

pytestmark = [needs_chromium, once_more_if_silent]
STEPS = "echarts.getInstanceByDom(document.getElementById('steps'))"
ZOOM = f"(() => {{ const z = {STEPS}.getOption().dataZoom[0]; return [z.startValue, z.endValue]; }})()"
PIXEL = f"""([x, lane]) => {{ const r = document.getElementById('steps').getBoundingClientRect();
  const [px, py] = {STEPS}.convertToPixel({{ gridIndex: 1 }}, [x, lane]); return [r.left + px, r.top + py]; }}"""
SKIPS = f"{STEPS}.getOption().series.find((series) => series.name === 'skip').data.length"
DRAWN = f"""([x, lane]) => {{ const chart = {STEPS}, at = chart.convertToPixel({{ gridIndex: 1 }}, [x, lane]);
  return [...chart.getRenderedCanvas().getContext('2d').getImageData(at[0], at[1], 1, 1).data]; }}"""
COLOURS = """[...document.querySelectorAll('.chart')].map((chart) => chart.querySelector('canvas')).map((c) =>
  new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)"""
LUMINANCE = """(() => { const c = document.createElement('canvas').getContext('2d');
  return ['backgroundColor', 'color'].map((name) => {
    c.fillStyle = getComputedStyle(document.body)[name]; c.fillRect(0, 0, 1, 1);
    const [r, g, b] = c.getImageData(0, 0, 1, 1).data; return 0.2126 * r + 0.7152 * g + 0.0722 * b; }); })()"""


def until(page: Any, condition: str) -> None:
    """Wait for it to hold; the page's own policy forbids Playwright to wait inside it."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"after 10 s it still doesn't hold: {condition}")


@contextlib.contextmanager
def opened(chromium: Chromium, log: Path, **options: Any) -> Iterator[Any]:
    """The page of a log, opened from disk: small, and in want of nothing else."""
    file = log.with_suffix(".html")
    assert write_page(read_log(log), file) < 5_000_000
    options = {"viewport": {"width": 1100, "height": 1000}, **options}
    url = file.as_uri()
    with chromium.open(url, lambda asked: asked == url or asked.startswith("data:"), **options) as page:
        yield page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"))


def test_page_of_a_real_run_shows_all_its_parts_without_a_network(chromium: Chromium, run: Path) -> None:
    with opened(chromium, run) as page:
        heads = page.locator("h2").all_inner_texts()
        assert heads == [
            "The steps", "Events", "Where it came from", "Repeat offenders", "Gradient norm of each layer",
            "Ranges of activations and gradients", "Rollbacks", "Checkpoints", "Environment",
        ]  # fmt: skip
        assert page.locator("#verdict").inner_text() == "4 of 40 steps were skipped; 1 rollback."
        drawn = page.evaluate(COLOURS)
        assert len(drawn) == 3 and min(drawn) > 20, "each chart has colours on it"
        page.get_by_text("Parameters by name").click()
        assert "0.weight" in page.locator("main details").last.inner_text()
        advice = page.locator("#next").inner_text()
        assert "Mend input" in advice and "report_logs.py" in advice, "the head says what to do about the NaN"
        assert "The last checkpoint, of step 40, was refused." in advice and "step-00000030" in advice
        assert "rollback" in page.locator("#events tr.rollback, #events tr.checkpoint").first.get_attribute("class")
        assert "refused" in page.locator("#h-checkpoint ~ .scroll").inner_text()
        assert "report_logs.py" in page.locator(".origin").first.inner_text()


def test_skip_is_told_when_its_mark_is_clicked_or_reached_by_key(chromium: Chromium, tmp_path: Path) -> None:
    lines = [skipped(n, "head.bias", origin=origin()) if n in (20, 60) else step(n) for n in range(80)]
    with opened(chromium, write(tmp_path / "run.jsonl", *lines)) as page:
        details = page.locator("#details")
        assert not details.is_visible()
        page.mouse.click(*page.evaluate(PIXEL, [60, 0]))
        text = details.inner_text()
        assert "step 60: skipped: head.bias" in text and "2 NaN, 1 Inf, first at [0]" in text
        assert "train.py:7" in text and "y = x.log()" in text and "Hint: clamp the argument first" in text
        page.focus("#steps")
        page.keyboard.press("p")
        assert "step 20: skipped" in details.inner_text()
        details.get_by_role("button", name="Close").press("Enter")
        assert not details.is_visible()
        page.locator("[data-x]").last.press("Enter")
        assert "step 60: skipped" in details.inner_text()


def test_heat_map_is_read_with_the_arrow_keys_and_as_a_table(chromium: Chromium, run: Path) -> None:
    with opened(chromium, run) as page:
        page.focus("#layers")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        for _ in range(10):
            page.keyboard.press("ArrowRight")
        assert page.locator("#cell").inner_text() == "2, step 10: NaN or Inf"
        until(page, "document.getElementById('layers').innerText.includes('NaN or Inf')")
        page.get_by_text("In numbers").click()
        (row,) = [row for row in page.locator("#layers ~ details tr").all_inner_texts() if row.startswith("2")]
        assert row.split()[-1] == "4", "of its steps, so many held a NaN"


def test_runs_of_one_file_are_listed_with_how_they_ended(chromium: Chromium, tmp_path: Path) -> None:
    lines = [step(n, run_id="a") for n in range(5)]
    lines += [{"kind": "end", "run_id": "a", "steps": 5, "error": "TrainingDiverged: nanscan: 20 skips"}]
    finding = {"code": "NS101", "severity": "error", "where": EVIL, "message": "2 NaN", "fix": "Load another."}
    lines += [{"kind": "preflight", "run_id": "b", "findings": [finding]}]
    lines += [step(n, run_id="b") for n in range(3, 9)]
    with opened(chromium, write(tmp_path / "run.jsonl", *lines)) as page:
        first, second = page.locator("#h-runs ~ .scroll tbody tr").all_inner_texts()
        assert "0–4" in first and first.endswith("TrainingDiverged: 20 skips")
        assert "3–8" in second and second.endswith("not in the log: still running, or killed")
        assert "it was continued, or started again" in page.locator("#problems").inner_text()
        assert f"NS101 error {EVIL}: 2 NaN" in page.locator(".findings").inner_text()


def test_zoom_and_hover_by_mouse_wheel_buttons_and_keys(chromium: Chromium, tmp_path: Path) -> None:
    with opened(chromium, write(tmp_path / "run.jsonl", *[step(n, norm=1.0 + n) for n in range(200)])) as page:
        box = page.locator("#steps")
        place = box.bounding_box()
        page.mouse.move(place["x"] + 500, place["y"] + 100)
        until(page, "document.getElementById('steps').innerText.includes('norm: ')")
        assert "step " in box.inner_text()
        page.mouse.wheel(0, -400)
        until(page, f"{ZOOM}[1] - {ZOOM}[0] < 190")
        page.get_by_role("button", name="All steps").click()
        assert page.evaluate(ZOOM) == [0, 199]
        page.get_by_role("button", name="Zoom in").click()
        assert page.evaluate(ZOOM) == [49.75, 149.25]
        box.focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate(ZOOM)[0] > 70
        page.keyboard.press("0")
        assert page.evaluate(ZOOM) == [0, 199]


def test_names_that_are_markup_are_shown_and_do_nothing(chromium: Chromium, tmp_path: Path) -> None:
    evil = f"</script>{EVIL}\u2028{{{{7*7}}}}'\"" + "x" * 3000
    facts = {"program": evil, "settings": {"optimizer": evil, "guard": {evil: evil}}, "parameters": [[evil, [1], evil]]}
    facts |= {"packages": {evil: evil}, "engine": {"engine": evil}, "devices": [evil], "gpus": [evil]}
    range_row = {"module": evil, "kind": evil, "min": 0.0, "max": 1.0, "rms": 0.5, "zero_fraction": 0.0}
    log = write(
        tmp_path / "run.jsonl",
        step(0, run=facts, layer_norms={evil: 1.0}, run_id=evil),
        skipped(
            1, evil, origin=origin(op=evil, module=evil, file=evil, code=evil, hint=evil), run_id=evil, scale_note=evil
        ),
        {"kind": "ranges", "step": 1, "rows": [range_row]},
        {"kind": "out_of_range", "step": 1, "module": evil, "tensor": evil, "reason": evil},
        {"kind": "rollback", "step": 1, "to_step": evil, "reason": evil, "source": evil},
        {"kind": "checkpoint", "step": 1, "path": evil, "error": evil, "refused": True},
        step(2, layer_norms={evil: 2.0}, run_id=evil),
    )
    with opened(chromium, log) as page:
        page.locator("[data-x]").first.click()
        assert EVIL in page.locator("#details").inner_text() and EVIL in page.locator("#events").inner_text()
        for chart in ("#steps", "#layers", "#ranges"):
            page.locator(chart).scroll_into_view_if_needed()
            place = page.locator(chart).bounding_box()
            page.mouse.move(place["x"] + place["width"] * 0.6, place["y"] + 20)
            page.mouse.move(place["x"] + place["width"] * 0.61, place["y"] + 24)
        until(page, "document.getElementById('ranges').innerText.includes('script')")
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a long name doesn't widen the page"
        assert page.locator("img").count() == 0 and page.locator("script").count() == 3


def test_dark_mode_paper_and_narrow_screens_are_readable(chromium: Chromium, run: Path) -> None:
    with opened(chromium, run, color_scheme="dark") as page:
        background, text = page.evaluate(LUMINANCE)
        assert background < 40 and text > 200
        page.emulate_media(color_scheme="light")
        background, text = page.evaluate(LUMINANCE)
        assert background > 240 and text < 60
        page.emulate_media(color_scheme="dark", media="print")
        assert page.evaluate(LUMINANCE)[0] > 240, "paper is white"
        assert len(page.pdf()) > 20_000
        wraps = "getComputedStyle(document.querySelector('.origin pre')).whiteSpace"
        assert page.evaluate(wraps).startswith("pre-wrap"), "a long line of code is not cut off on paper"
        page.emulate_media(color_scheme="dark", media="screen")
        assert page.locator("canvas.paper").count() == 0, "the copies for paper are gone"
        page.set_viewport_size({"width": 360, "height": 700})
        until(page, "document.scrollingElement.scrollWidth <= innerWidth")


def test_100_000_steps_load_in_two_seconds_with_every_skip_marked(chromium: Chromium, tmp_path: Path) -> None:
    bad = frozenset([*range(37, 100_000, 31), *range(50_000, 50_400)])
    log = write_long(tmp_path / "run.jsonl", 100_000, bad)
    times = []
    with opened(chromium, log) as page:
        marked = page.evaluate("JSON.parse(document.getElementById('data').textContent).marks.skip")
        assert {first + i for first, count in marked for i in range(count)} == set(bad)
        assert page.evaluate(SKIPS) == len(bad)
        for place in (min(bad), 50_200, max(bad)):
            red, green, _, shown = page.evaluate(DRAWN, [place, 0])
            assert shown > 150 and red > 150 > green, f"the mark at {place} is drawn at once"
        for _ in range(5):  # one load that isn't disturbed by what else the machine does
            times.append(int(page.evaluate("document.documentElement.dataset.ready")))
            if times[-1] <= 2000:
                break
            page.reload()
    assert min(times) <= 2000, f"milliseconds until it is drawn: {times}"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "There is no step in this log"),
        ([step(0), '{"step": 1, "norm": NaN}', step(5), "Epoch 3/10", '{"step": 6, "no'], "4 steps missing"),
        ([step(n, run_id=name) for n in range(3) for name in ("a", "b")], "The log holds 2 runs"),
        ([skipped(n, "w") for n in range(5)], "The environment is unknown"),
    ],
    ids=["empty", "broken", "two runs", "nothing finite"],
)
def test_broken_logs_still_open_and_say_what_is_missing(
    lines: list[Any], words: str, chromium: Chromium, tmp_path: Path
) -> None:
    with opened(chromium, write(tmp_path / "run.jsonl", *lines)) as page:
        assert words in page.locator("#problems").inner_text()
        assert page.locator("#events").is_visible()
        if lines:
            page.get_by_role("button", name="Zoom in").click()
