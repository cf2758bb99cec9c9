"""The words on what was met during a walk: the exceptions of reducers, and what the surroundings add to a fix."""

from __future__ import annotations

from typing import Any

import torch

from nanscan import paddle_objects
from nanscan.pickling.kinds import COMPILED, kind_of
from nanscan.pickling.naming import type_name
from nanscan.pickling.places import Place
from nanscan.pickling.plain_forms import plain_form
from nanscan.pickling.restore import refuses_to_be_saved
from nanscan.pickling.safe_globals import allowed_objects

__all__ = [
    "BARE_STORAGE",
    "MEMMAP",
    "PLAIN_TENSORS",
    "plain_refusal",
    "raised",
    "refined",
    "refused_type",
    "rename",
    "said",
    "without_data",
]

_FUNCTIONS_OF_SCHEDULERS = ("lr_lambdas", "lr_lambda", "_scale_fn_custom", "_anneal_func")
MEMMAP = "what is loaded is an array in memory, without the file: keep the file's name and map it lazily"
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_special: Any = torch  # these are not typed
BARE_STORAGE = (
    "plain pickle does not take a bare storage; torch.save does",
    "keep a tensor of it: torch.tensor([], dtype=torch.uint8).set_(storage)",
)


def refined(place: Place, reason: str, fix: str, severity: str) -> tuple[str, str]:
    """Reason and fix with what the surroundings add."""
    owner = place.parent
    step = place.steps[-1] if place.steps else ("", None)
    around = place.path()
    if any(("attr", name) in around for name in _FUNCTIONS_OF_SCHEDULERS):
        return f"{reason}; the scheduler's state_dict() saves, and leaves the function out", (
            "save scheduler.state_dict() and make the scheduler with the same function before loading; or " + fix
        )
    if any(kind == "attr" and str(name).endswith("_hooks") for kind, name in around):
        fix = f"remove the hook (handle.remove()) before saving and register it again after loading; or {fix}"
    elif owner is not None and step[0] == "attr" and not isinstance(owner.value, torch.utils.data.DataLoader):
        reason = f"{reason} (attribute '{step[1]}' of a {type_name(owner.value)})"
        if severity == "error" and type(owner.value) in PLAIN_TENSORS:  # nobody can give these a __getstate__
            fix = f"delete the attribute before saving, and keep it beside the tensor, such as in a dict; or {fix}"
            fix = fix.partition("; or drop it in __getstate__")[0]
    if ("attr", "dynamo_ctx") in around:
        fix = COMPILED.fix
    elif severity == "error" and any(_is_model(p.value) for p in list(place.upwards())[1:]):
        holds = "holds its tensors" if _is_model(place.value) else "does not hold it"
        fix = f"{fix}; the model's state_dict() {holds} and can be saved"
    return reason, fix


def without_data(value: torch.Tensor) -> tuple[str, str] | None:
    """(reason, fix) of a tensor whose data nobody can take hold of."""
    if _special._C._functorch.is_functorch_wrapped_tensor(value):
        return "a tensor of torch.vmap or torch.func (grad, jvp …) that outlived its call: it has no data of its own", (
            "keep what the transformed function returns instead of a value from inside of it"
        )
    if value.layout is _special._mkldnn:
        return "a tensor in the layout of oneDNN, whose data can't be reached", "keep value.to_dense()"
    return None


def rename(value: Any) -> str:
    """What to do with a value that is saved under a name which is not its own."""
    if type(value).__name__ == "_lru_cache_wrapper":
        return (
            "put functools.lru_cache over a function at the top of a module; or drop the cache in __getstate__ and "
            "make it again in __setstate__ (nanscan.TransientState does both)"
        )
    return "keep it under that name at the top of its module"


def refused_type(value: Any) -> tuple[str, str] | None:
    """What `torch.load(weights_only=True)` says to the type of a value that can't be pickled yet."""
    if type(value) in allowed_objects():
        return None
    kind = type_name(value)
    return f"torch.load(weights_only=True) refuses {kind}: it allows no global {kind}", plain_form(value)


def raised(value: Any, error: BaseException) -> tuple[str, str]:
    text = _text(error)
    known = kind_of(type(value))
    if known is not None:
        return known.reason + ("" if plain_refusal(error) else f" ({said(error)})"), known.fix
    if plain_refusal(error):
        return f"{text[0].upper()}{text[1:]}" if text else "it can't be pickled", (
            "drop it in __getstate__ (nanscan.TransientState), or keep what it is made from"
        )
    if _is_model(value):
        return f"saving it raises {said(error)}", "save its state_dict()"
    asked = refuses_to_be_saved(value)
    if asked is not None:
        return asked
    return f"saving it raises {said(error)}", (
        "mend its __getstate__, __reduce__ or __reduce_ex__, or drop the object from what is saved"
    )


def _is_model(value: Any) -> bool:
    return issubclass(type(value), torch.nn.Module) or paddle_objects.is_layer(value)


def plain_refusal(error: BaseException) -> bool:
    text = _text(error).lower()
    return isinstance(error, TypeError) and ("cannot pickle" in text or "can't pickle" in text)


def said(error: BaseException) -> str:
    text = _text(error)
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())
    except Exception:
        return "(its message can't be shown)"
