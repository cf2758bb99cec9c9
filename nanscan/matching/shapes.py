"""Whether the saved state of a parameter can be that of the parameter it is to be loaded for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

__all__ = ["mismatches"]

# Entries that have the parameter's shape in every optimizer that has them.
_AS_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "grad_avg", "exp_inf"}
    | {"sum", "prev", "ax"}
)


def mismatches(params: Sequence[Tensor], saved: Mapping[str, Any], pairs: Mapping[int, Any]) -> list[tuple[int, str]]:
    """(position, why) of each parameter whose saved state has a shape that it can't have.

    Args:
        params: the optimizer's parameters.
        saved: the optimizer's state dict.
        pairs: position -> the state's id of that parameter.
    """
    state = saved["state"]
    if any("old_dirs" in entries for entries in state.values() if isinstance(entries, Mapping)):
        return _of_flat_state(params, saved, pairs)
    states = {place: state[key] for place, key in pairs.items() if isinstance(state.get(key), Mapping)}
    full = _AS_PARAMETER | _usually_full(params, states)
    found = []
    for place, entries in states.items():
        wrong = [_wrong(key, value, params[place], full) for key, value in entries.items() if isinstance(value, Tensor)]
        if any(wrong):
            found.append((place, "; ".join(filter(None, wrong))))
    return found


def _wrong(key: Any, value: Tensor, param: Tensor, full: frozenset[Any]) -> str:
    if is_lazy(param) or is_lazy(value):
        return ""
    expected = tuple(param.shape) if key in full else _factored(key, tuple(param.shape))
    if expected is None or expected == tuple(value.shape):
        return ""
    return f"has a saved {key} of shape {tuple(value.shape)}, the parameter's shape is {tuple(param.shape)}"


def _factored(key: Any, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of Adafactor's means over columns and rows."""
    if len(shape) < 2:
        return None
    known = {
        "row_var": (*shape[:-1], 1),
        "col_var": (*shape[:-2], 1, shape[-1]),
        "exp_avg_sq_row": shape[:-1],
        "exp_avg_sq_col": (*shape[:-2], shape[-1]),
    }
    return known.get(key)


def _usually_full(params: Sequence[Tensor], states: Mapping[int, Mapping[Any, Any]]) -> frozenset[Any]:
    """Entries of other optimizers that have the parameter's shape for most parameters: then they are to for all."""
    same: Counter[Any] = Counter()
    other: Counter[Any] = Counter()
    for place, entries in states.items():
        if not is_lazy(params[place]) and params[place].dim():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    (same if value.shape == params[place].shape else other)[key] += 1
    return frozenset(key for key in same if same[key] > other[key])


def _of_flat_state(
    params: Sequence[Tensor], saved: Mapping[str, Any], pairs: Mapping[int, Any]
) -> list[tuple[int, str]]:
    """LBFGS holds one vector over all parameters, in their order: it fits that order alone."""
    ids = [key for group in saved["param_groups"] for key in group["params"]]
    if [pairs.get(place) for place in range(len(params))] != ids:
        reason = "is not where it was: LBFGS keeps one vector over all parameters, which can't be put in another order"
        return [(place, reason) for place in pairs]
    numel = sum(p.numel() * (2 if p.is_complex() else 1) for p in params)
    entries = saved["state"].get(ids[0], {}) if ids else {}
    sizes = {key: entries[key].numel() for key in ("d", "prev_flat_grad") if isinstance(entries.get(key), Tensor)}
    wrong = [f"has a saved {key} of {size} elements" for key, size in sizes.items() if size != numel]
    if not wrong:
        return []
    return [(place, f"{wrong[0]}, the parameters have {numel}") for place in pairs]
