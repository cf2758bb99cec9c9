"""What the outcome of a trial means: reason, fix and severity. Describes; starts nothing."""

from __future__ import annotations

import ast
import functools
import signal
from collections.abc import Iterator
from typing import Any

__all__ = ["MAINS", "judge"]

MAINS = ("__main__", "__mp_main__")
_PLAIN_STATE = "save its plain state instead (a state_dict, a dict of numbers and strings) and build it anew on loading"
_DELEGATION = ("__getattr__", "__getattribute__")
Verdict = tuple[str, str, str]  # reason, fix, severity


def judge(
    result: dict[str, Any], for_process: bool, main_file: str | None, time_limit: float, forked: bool = False
) -> list[Verdict]:
    """The (reason, fix, severity) of everything that went wrong in a trial.

    Args:
        result: of `trial.attempt`, or `{"died": "late" | "crashed", "exit_code": …}`.
        for_process: a started worker is meant, which imports the running script anew.
        main_file: the running script; None in a notebook.
        time_limit: seconds that the trial was given.
        forked: the process knew this one's `__main__`; locks that other threads hold may have stopped it.

    >>> judge({}, False, None, 60.0)
    []
    >>> judge({"missing": [{"module": "gone", "name": "Net", "error": "ModuleNotFoundError", "message": "…"}]},
    ...       False, None, 60.0)[0][0]
    "another process can't import gone.Net (ModuleNotFoundError: …)"
    """
    if "died" in result:
        return [] if forked and result["died"] == "late" else [_died(result, time_limit)]
    if "missing" in result:
        found = (_missing(entry, for_process, main_file) for entry in result["missing"])
        return list(dict.fromkeys(verdict for verdict in found if verdict is not None))
    if "raised" in result and not (for_process and _of_multiprocessing(result["raised"])):
        return [(*_raised(result["raised"]), "error")]
    return [(*_renewed(**result["new"]), "loss")] if "new" in result else []


def _renewed(names: list[str], of: int) -> tuple[str, str]:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return (
        f"loading it makes {len(names)} of {of} parameters anew ({shown}): what was saved of them is lost",
        "let __setstate__ put back the state that it is given (self.__dict__.update(state)) instead of calling "
        "__init__, or load_state_dict it afterwards; nanscan.TransientState drops and rebuilds named attributes alone",
    )


def _died(result: dict[str, Any], time_limit: float) -> Verdict:
    if result["died"] == "late":
        fix = f"look at its __setstate__, and at what importing its module does; or {_PLAIN_STATE}"
        return f"loading it is not over after {time_limit:g} s", fix, "error"
    code = result.get("exit_code", 0)
    how = f"with exit code {code}"
    if code < 0:
        how = f"by signal {-code}"
        if -code in {number.value for number in signal.Signals}:
            how = f"by {signal.Signals(-code).name}"
    return f"loading it ends the process {how}", _PLAIN_STATE, "error"


def _missing(entry: dict[str, str], for_process: bool, main_file: str | None) -> Verdict | None:
    module, name = entry["module"], entry["name"]
    if module not in MAINS:
        reason = f"another process can't import {module}.{name} ({entry['error']}: {entry['message']})"
        return reason, "move it into a module file that is installed or on sys.path there", "error"
    if main_file is None:
        reason = f"'{name}' is defined in a notebook or at a prompt, where another process can't import it"
        fix = "move it into a module file; a notebook can load it once the cell that defines it has run again"
        return reason, fix, "error" if for_process else "loss"
    if not for_process or name.partition(".")[0] in _importable_names(main_file):
        return None
    reason = f"a started process imports {main_file} anew and finds no '{name}' at its top level"
    return reason, 'define it at the top of the script, outside of if __name__ == "__main__", or in a module', "error"


@functools.lru_cache(maxsize=8)
def _importable_names(file: str) -> frozenset[str]:
    """What importing a script defines, read from its text without running it."""
    try:
        with open(file, "rb") as script:
            tree = ast.parse(script.read())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    return frozenset(_bound(tree.body))


def _bound(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.If):
            guarded = "__name__" in ast.unparse(statement.test)
            names |= _bound(statement.orelse) | (set() if guarded else _bound(statement.body))
        elif isinstance(statement, (ast.Try, ast.With)):
            names |= _bound(statement.body)
            names |= {name for handler in getattr(statement, "handlers", ()) for name in _bound(handler.body)}
        else:
            names |= set(_bound_by(statement))
    return names


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
    else:
        nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
        yield from (node.id for node in nodes if isinstance(node.ctx, ast.Store))


def _of_multiprocessing(raised: dict[str, Any]) -> bool:
    """Locks and queues rebuild only in a process that is really being started; that says nothing about them."""
    return any("multiprocessing" in call["file"] for call in raised["calls"])


def _raised(raised: dict[str, Any]) -> tuple[str, str]:
    said = f"{raised['error']}: {raised['message']}" if raised["message"] else raised["error"]
    calls = raised["calls"]
    delegating = next(
        (call for call in reversed(calls) if call["function"] in ("__getattr__", "__getattribute__")), None
    )
    if raised["error"] == "RecursionError" and delegating:
        return _recursion(delegating)
    restoring = next((call for call in calls if call["function"] == "__setstate__"), None)
    if restoring:
        return (
            f"{_call(restoring)} raises {said}",
            f"{restoring['owner']}.__setstate__ must take what __getstate__ gave",
        )
    if raised["error"] == "TypeError" and "argument" in raised["message"]:
        fix = "define __reduce__ that gives the arguments back (for an exception pickle knows its .args alone)"
        return f"its class can't be called to restore it: {said}", fix
    where = f" in {_call(calls[-1])}" if calls else ""
    return f"it pickles, but loading it raises {said}{where}", _PLAIN_STATE


def _recursion(call: dict[str, Any]) -> tuple[str, str]:
    """A delegating `__getattr__` that reads an attribute which unpickling has not set yet."""
    reason = (
        f"recursion in __getattr__ while restoring: {_call(call)} reads an attribute of its own, which is not set yet "
        "when pickle and copy.deepcopy make the object without __init__"
    )
    return reason, (
        f"let {call['owner']}.__getattr__ raise AttributeError for dunder names and while what it delegates to is "
        'unset: if name.startswith("__") or "inner" not in self.__dict__: raise AttributeError(name)'
    )


def _call(call: dict[str, Any]) -> str:
    owner = f"{call['owner']}." if call["owner"] else ""
    return f"{owner}{call['function']} ({call['file']}:{call['line']})"
