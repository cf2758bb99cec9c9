"""A closer look at a Paddle training where something is wrong: buffers, parameters with their accumulators."""

from __future__ import annotations

from typing import Any

from nanscan.integrations.paddle.engine import scan_tensors
from nanscan.integrations.paddle.gradients import all_params
from nanscan.integrations.paddle.names import Names, buffers_of
from nanscan.integrations.paddle.tensors import label_of
from nanscan.report import Report, TensorReport

__all__ = ["bad_buffers", "bad_parameters"]


def bad_buffers(layer: Any) -> tuple[TensorReport, ...]:
    """The layer's floating-point buffers that hold a NaN or Inf."""
    buffers, labels = buffers_of(layer)
    return Report.from_scan(scan_tensors(buffers), labels).bad if buffers else ()


def bad_parameters(optimizer: Any, names: Names) -> tuple[TensorReport, ...]:
    """The parameters that hold a NaN or Inf, each followed by those of its accumulators and master weights that do."""
    params = [p for p in all_params(optimizer) if p._is_initialized() and not p.stop_gradient]
    scan = scan_tensors(params)
    if scan.finite:
        return ()
    labels = [label_of(p, n, "parameter") for p, n in zip(params, names.of(params), strict=True)]
    found: list[TensorReport] = []
    for engine_row, row in zip(scan.bad_rows(), Report.from_scan(scan, labels).bad, strict=True):
        found += [row, *_bad_state(optimizer, params[engine_row.position], row.name)]
    return tuple(found)


def _bad_state(optimizer: Any, param: Any, name: str) -> tuple[TensorReport, ...]:
    state = {key: by_name[param.name] for key, by_name in optimizer._accumulators.items() if param.name in by_name}
    if param.name in optimizer._master_weights:
        state["master weight"] = optimizer._master_weights[param.name]
        # Accumulators of a parameter with a master weight go by the latter's name.
        master = state["master weight"].name
        state |= {key: by_name[master] for key, by_name in optimizer._accumulators.items() if master in by_name}
    state = {key: value for key, value in state.items() if value._is_initialized() and value.is_floating_point()}
    labels = [label_of(value, (f"{key} of '{name}'",), "state") for key, value in state.items()]
    return Report.from_scan(scan_tensors(list(state.values())), labels).bad if state else ()
