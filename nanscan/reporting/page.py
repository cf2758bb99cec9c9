"""The page: one HTML file with everything in it, that opens from disk without a network."""

from __future__ import annotations

import datetime
import json
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from nanscan._version import __version__
from nanscan.reporting.advice import ending
from nanscan.reporting.data import page_data
from nanscan.reporting.reading import Log
from nanscan.reporting.summary import summary
from nanscan.reporting.values import as_list, as_mapping, as_text

__all__ = ["page", "write_page"]

ECHARTS = "6.1.0"
MAX_FINDINGS = 100


def write_page(log: Log, path: Path) -> int:
    """Write the page of a log; returns its size in bytes.

    Raises:
        OSError: it can't be written.
    """
    content = page(log).encode("utf-8", "replace")  # a name in a log may hold half a surrogate pair
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return len(content)


def page(log: Log) -> str:
    """The page as text. Every name that comes from the log is escaped, in HTML and in the data for the charts."""
    loader = PackageLoader("nanscan.reporting", "templates")
    safe = select_autoescape(default=True)
    environment = Environment(loader=loader, autoescape=safe, trim_blocks=True, finalize=_shown)
    environment.filters.update(
        count=_count, number=_number, when=_when, duration=_duration, ending=ending, items=as_list
    )
    data = page_data(log)
    has = {name: bool(data[name]) for name in ("layers", "ranges")} | {"charts": bool(data["series"])}
    events, left_out, layer_table = (data.pop(name) for name in ("groups", "left_out", "layer_table"))
    return environment.get_template("page.html").render(
        data=htmlsafe_json_dumps(data, dumps=_dumps),
        echarts=Markup(_file("vendor", "echarts", "echarts.min.js")),
        style=Markup(_file("templates", "style.css")),
        script=Markup(_file("templates", "charts.js")),
        events=events,
        left_out=left_out,
        layer_table=layer_table,
        findings=_findings(log),
        log=log,
        name=log.path.name,
        made=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        summary=summary(log),
        version=__version__,
        echarts_version=ECHARTS,
        has=has,
    )


def _findings(log: Log) -> list[dict[str, Any]]:
    """What `nanscan.preflight` has found, of the last run that was looked at."""
    notes = [note for run in log.runs for note in run.notes["preflight"]]
    return [as_mapping(item) for item in as_list(notes[-1].get("findings"))[:MAX_FINDINGS]] if notes else []


def _dumps(value: Any, **options: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"), **options)


def _file(*parts: str) -> str:
    return resources.files("nanscan.reporting").joinpath(*parts).read_text("utf-8")


def _shown(value: Any) -> Any:
    """What is put into the page: our own parts as they are, anything else as text of bounded length."""
    return value if isinstance(value, Markup) else as_text(value)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "–"


def _when(value: Any) -> str:
    try:
        return datetime.datetime.fromtimestamp(value).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (TypeError, ValueError, OverflowError, OSError):
        return "–"


def _duration(seconds: Any) -> str:
    """Seconds as people say them.

    >>> _duration(3725.2), _duration(9.96), _duration(0.04), _duration(None)
    ('1 h 2 min', '10.0 s', '0.04 s', '–')
    """
    if not isinstance(seconds, (int, float)):
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.1g} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
