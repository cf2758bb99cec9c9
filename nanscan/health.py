"""How a run is doing, in one line: what a progress bar or a print every hundred steps shows. A leaf: plain text."""

from __future__ import annotations

from nanscan.report import StepReport

__all__ = ["health", "trouble"]

MAX_NAME = 60  # characters


def health(last: StepReport | None, skipped: int, bad: tuple[int, str] | None, dropped: int = 0) -> str:
    """One line of ASCII, in the words of `nanscan report --follow`.

    Args:
        last: the report of the last step, None before the first.
        skipped: how many steps were skipped so far.
        bad: the last step on which something was wrong, and what; None if there is none.
        dropped: how many micro-batches were given up so far.

    >>> health(StepReport(True, 2.5, 2.5, 1.0, 0, 0, 9, (), (), step=119, clip_factor=0.4), 1, (57, "head.weight"))
    'step 119  norm 2.5  clipped x0.4  1 skipped so far  last bad: step 57 head.weight'
    """
    if last is None:
        return "no step yet"
    parts = [f"step {last.step}", f"norm {last.norm:.4g}"]
    parts += [] if last.loss is None else [f"loss {last.loss:.4g}"]
    parts += [f"clipped x{last.clip_factor:.3g}"] if last.clip_factor < 1 else []
    parts += [f"{skipped} skipped so far" if skipped else "none skipped"]
    parts += [f"{dropped} micro-batch{'es' if dropped > 1 else ''} dropped"] if dropped else []
    parts += [] if bad is None else [f"last bad: step {bad[0]} {bad[1]}"]
    return "  ".join(parts)


def trouble(report: StepReport) -> str:
    """What was wrong at a step, in a few words of ASCII; "" if nothing was.

    >>> trouble(StepReport(True, 1.0, 1.0, 1.0, 0, 0, 1, (), ()))
    ''
    """
    if report.finite and report.spike is None and not (report.skipped or report.parameters or report.dropped):
        return ""  # most steps: their rows are left alone
    names = list(dict.fromkeys(row.name for row in (*report.bad, *report.parameters)))
    if names:
        return f"{_ascii(names[0])}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
    if report.spike is not None:
        return f"spike of the {report.spike.what}"
    if report.dropped and not report.skipped:
        return f"micro-batch {', '.join(map(str, report.dropped[:3]))}{', ...' if len(report.dropped) > 3 else ''}"
    return f"action: {report.action}"


def _ascii(name: str) -> str:
    """A name that can't steer a terminal and that any encoding can print; its end says most.

    >>> _ascii("größe\\n"), _ascii("a" * 70 + ".weight")[-15:]
    ('gr\\\\xf6\\\\xdfe\\\\n', 'aaaaaaaa.weight')
    """
    text = name if name.isascii() and name.isprintable() else ascii(name)[1:-1]
    return text if len(text) <= MAX_NAME else f"...{text[3 - MAX_NAME :]}"
