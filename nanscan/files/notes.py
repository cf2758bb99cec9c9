"""What should be told about a pickle: that loading it would call code, and which."""

from __future__ import annotations

from nanscan.files.pickle_machine import Machine
from nanscan.files.rebuild import KNOWN

__all__ = ["code_note"]

_LISTED = 8
_HARMLESS = KNOWN | {
    "torch.Size", "torch.device", "torch.serialization._get_layout", "torch.storage._load_from_bytes",
    "torch.storage.TypedStorage", "torch.storage.UntypedStorage", "torch._utils._rebuild_wrapper_subclass",
    "torch.nn.parameter.Parameter", "torch.Tensor", "torch.nn.parameter.Buffer",
    "collections.OrderedDict", "collections.defaultdict", "collections.deque", "collections.Counter",
    "numpy.dtype", "numpy.ndarray", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
    "builtins.set", "builtins.frozenset", "builtins.dict", "builtins.list", "builtins.tuple", "builtins.complex",
    "builtins.slice", "builtins.range", "builtins.int", "builtins.float", "builtins.object", "builtins.str",
    "__builtin__.set", "__builtin__.object", "copy_reg._reconstructor", "copyreg._reconstructor",
    "argparse.Namespace", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.Path", "pathlib.PurePosixPath",
    "datetime.datetime", "datetime.date", "datetime.timedelta", "decimal.Decimal", "fractions.Fraction",
}  # fmt: skip


def code_note(machine: Machine) -> list[str]:
    """One sentence that names what unpickling would call beyond tensors and containers; none if there is nothing."""
    called = sorted(
        name
        for name in machine.called
        if name not in _HARMLESS and not name.startswith(("torch.nn.modules.", "__torch__."))
    )
    if not called:
        return []
    listed = ", ".join(name[:100] for name in called[:_LISTED])
    more = f" and {len(called) - _LISTED} more" if len(called) > _LISTED else ""
    return [f"loading it with pickle would call {listed}{more}; nothing was called here"]
