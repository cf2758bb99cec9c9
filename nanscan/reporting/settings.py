"""How a guarded run was set up, as the first line of its log says it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanscan.policy import Policy

__all__ = ["settings"]

PLAIN = (str, int, float, bool, type(None))


def settings(optimizer: Any, policy: Policy, **more: bool) -> dict[str, Any]:
    """The optimizer's class, its learning rates and numeric options, and the guard's options, as plain data.

    Args:
        optimizer: the inner one.
        policy: the guard's options.
        more: those of its options that are no part of the policy, such as `find_origin`.
    """
    options = {item.name: getattr(policy, item.name) for item in dataclasses.fields(policy)} | more
    return {
        "optimizer": type(optimizer).__name__,
        "groups": [_plain(group) for group in list(getattr(optimizer, "param_groups", ()))[:8]],
        "guard": {name: value if isinstance(value, PLAIN) else _said(value) for name, value in options.items()},
    }


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if isinstance(value, PLAIN)}


def _said(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)[:200]
