"""Scans and changes Paddle tensors: natively through their own DLPack table, else with Paddle's operators.

PyTorch is not imported. A tensor that the compiled module does not read (one on a GPU) sends the whole call to the
operators, so that one call has one answer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import paddle

from nanscan.config import load_config
from nanscan.engine.result import EngineScan, Row
from nanscan.integrations.paddle import operators
from nanscan.integrations.paddle.tensors import resolve_at

__all__ = ["name", "scale_", "scan_tensors", "zero_nonfinite_"]

_native: ModuleType | None = None
_chosen = False
_choosing = threading.Lock()


def _module() -> Any:
    """The compiled module, taught Paddle's types; None: there is none, or `NANSCAN_ENGINE` names another engine."""
    global _native, _chosen
    if not _chosen:
        with _choosing:
            if not _chosen:
                _native = _load() if load_config().engine not in ("eager", "reference") else None
                _chosen = True
    return _native


def _load() -> ModuleType | None:
    from nanscan.engine.build import load_native

    module = load_native()
    if module is not None:
        module.set_row_type(Row)
        for kind in (paddle.Tensor, paddle.base.framework.EagerParamBase):
            module.register_tensor_type(kind, None, dense="is_dense")
    return module


def name() -> str:
    """`"native"` or `"eager"`: which engine reads Paddle's tensors."""
    return "eager" if _module() is None else "native"


def scan_tensors(tensors: Sequence[Any], extra: Sequence[Any] = ()) -> EngineScan:
    """Scan Paddle tensors; None is skipped, the same tensor given twice counts once.

    Args:
        tensors: `paddle.Tensor` of any floating or complex dtype and layout, with sparse rows, or sparse.
        extra: have rows and join the NaN/Inf counts, but not the norms and ``numel``; their positions continue after
            ``tensors``.

    Raises:
        nanscan.engine.result.BadInput: something is not a tensor whose elements can be read.

    >>> scan = scan_tensors([paddle.to_tensor([3.0, 4.0]), paddle.to_tensor([float("nan")])])
    >>> scan.nan_count, round(scan.finite_norm, 6), scan.bad_rows()[0].position
    (1, 5.0, 1)
    """
    module = _module()
    if module is None:
        return operators.scan(tensors, extra)
    try:
        answer: EngineScan = module.scan(tensors, extra, resolve_at, None)
    except module.Unserved:
        return operators.scan(tensors, extra)
    return answer


def scale_(tensors: Sequence[Any], factor: float, clip_value: float | None = None) -> None:
    """Multiply dense tensors by ``factor``, then clamp them to ±``clip_value``; in place, each once.

    Autograd does not hear of it: for gradients.
    """
    module = _module()
    if module is not None:
        try:
            if module.scale_tensors(tensors, factor, math.inf if clip_value is None else clip_value, resolve_at):
                return
        except module.Unserved:
            pass
    operators.scale_(tensors, factor, clip_value)


def zero_nonfinite_(tensors: Sequence[Any]) -> None:
    """Set the NaN and Inf elements of dense tensors to 0 and leave the others as they are; in place."""
    operators.zero_nonfinite_(tensors)
