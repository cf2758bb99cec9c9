"""What goes back together: weights, buffers, optimizer, scheduler, scaler and random numbers, read and written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanscan.engine.shards import is_dtensor, local_of
from nanscan.guard import GuardedOptimizer
from nanscan.names import clean, names_of, unwrapped
from nanscan.rng import rng_state, set_rng_state
from nanscan.snapshot import nested_optimizers, optimizer_content, params_of, put_back
from nanscan.state_copy import StateCopy, copy_state, memory_id

__all__ = ["Named", "TrainingState"]

Named = tuple[tuple[str, ...], str, Tensor]
"""All names of a tensor, what it is ("parameter", "buffer", "state"), and the tensor."""


class TrainingState:
    """The live objects of a training run, read as nested state and written back.

    Args:
        model: its parameters (frozen ones too), all buffers, and extra state of modules that define it.
        optimizer: a plain optimizer, not the guard around it.
        schedulers: any number of objects with `state_dict` and `load_state_dict`.
        scaler: a gradient scaler, or None.
        guard: the guarded optimizer, whose adaptive limits go along, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[Any] = (),
        scaler: Any = None,
        guard: GuardedOptimizer | None = None,
    ) -> None:
        self.model = unwrapped(model)
        self.optimizer = optimizer
        self.schedulers = list(schedulers)
        self.scaler = scaler
        self.guard = guard

    # ---- read --------------------------------------------------------------------------------------------------------

    def content(self) -> dict[str, Any]:
        """Everything, live: to be copied, not kept."""
        params: dict[int, Tensor] = {id(p): p for p in self.model.parameters()}
        params.update((id(p), p) for p in params_of(self.optimizer))
        return {
            "params": {p: p for p in params.values()},
            "buffers": {(module, name): buffer for module, name, buffer in self._buffers()},
            "extra": {m: m.get_extra_state() for m in self.model.modules() if _has_extra_state(m)},
            "optimizer": optimizer_content(self.optimizer),
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "limits": self._limits_state(),
            "rng": rng_state(),
        }

    def _limits_state(self) -> Any:
        """What the guard's adaptive clip and its look-out for spikes remember; its counters go on counting."""
        limits = None if self.guard is None else self.guard._limits
        return None if limits is None else limits.state()

    def _buffers(self) -> Iterator[tuple[nn.Module, str, Tensor | None]]:
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                yield module, name, buffer

    def group_sizes(self) -> list[int]:
        """How many parameters each group has: differs after `add_param_group`."""
        return [len(group["params"]) for part in nested_optimizers(self.optimizer) for group in part.param_groups]

    def parameters(self) -> list[Named]:
        """Every parameter that can hold a NaN, named."""
        known = names_of(self.model)
        found = {id(p): ((*known[id(p)],), "parameter", p) for p in self.model.parameters()}
        for number, group in enumerate(self.optimizer.param_groups):
            own = group.get("param_names") or [f"group{number}.param{i}" for i in range(len(group["params"]))]
            for name, param in zip(own, group["params"], strict=True):
                found.setdefault(id(param), ((name,), "parameter", param))
        return [item for item in found.values() if _scannable(item[2])]

    def buffers(self) -> list[Named]:
        """Every buffer that can hold a NaN, named."""
        named = self.model.named_buffers()
        return [((clean(name),), "buffer", buffer) for name, buffer in named if _scannable(buffer)]

    def states(self) -> Iterator[Named]:
        """Every tensor of the optimizer's state that can hold a NaN, named: "exp_avg of 'fc.weight'"."""
        names = {id(param): name[0] for name, _, param in self.parameters()}
        for part in nested_optimizers(self.optimizer):
            for key, state in part.state.items():
                owner = f" of '{names.get(id(key), '?')}'" if isinstance(key, Tensor) else ""
                prefix = "" if isinstance(key, Tensor) else str(key)
                for path, tensor in _entries(state, prefix):
                    yield (f"{path}{owner}",), "state", tensor

    # ---- write -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self, saved: dict[str, Any], devices: dict[int, torch.device]) -> None:
        """Write a copy of `content()` back, bit for bit; the copy stays as it is and can be written again.

        Args:
            saved: the copy.
            devices: `memory_id` of a tensor in it -> the device that this came from, where that was another one.
        """
        for param, value in saved["params"].items():
            _write(param, value)
        for (module, name), value in saved["buffers"].items():
            self._write_buffer(module, name, value)
        for module, extra in saved["extra"].items():
            module.set_extra_state(copy_state(extra))
        live = optimizer_content(self.optimizer)
        put_back(self.optimizer, _into_live(saved["optimizer"], live, devices))
        self._restore_rest(saved)

    def restore_buffers(self, saved: dict[str, Any], names: Sequence[str]) -> bool:
        """Write only the buffers of these names back; False if one of them is not in the copy."""
        bad = {id(buffer) for (name,), _, buffer in self.buffers() if name in names}
        found = [(module, name) for module, name, buffer in self._buffers() if id(buffer) in bad]
        if not found or any(saved["buffers"].get(place) is None for place in found):
            return False
        for module, name in found:
            self._write_buffer(module, name, saved["buffers"][module, name])
        return True

    @torch.no_grad()
    def _write_buffer(self, module: nn.Module, name: str, value: Tensor | None) -> None:
        present = module._buffers.get(name)
        if value is not None and present is not None and _fits(present, value):
            present.copy_(value)
        else:
            module._buffers[name] = None if value is None else value.clone()

    def _restore_rest(self, saved: dict[str, Any]) -> None:
        for scheduler, state in zip(self.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(copy_state(state))
        if self.scaler is not None and saved["scaler"]:
            self.scaler.load_state_dict(copy_state(saved["scaler"]))
        if saved["limits"] is not None and self.guard is not None and self.guard._limits is not None:
            self.guard._limits.load(saved["limits"])
        self.reset_scaler()
        self.clear_grads()
        set_rng_state(saved["rng"])

    def reset_scaler(self) -> None:
        """A step that was left in the middle is not the scaler's step any more."""
        unfinished = getattr(self.scaler, "_per_optimizer_states", None)
        if unfinished is not None:
            unfinished.clear()

    def clear_grads(self) -> None:
        """Gradients of the moment left behind."""
        for param in [*self.model.parameters(), *params_of(self.optimizer)]:
            param.grad = None


def _into_live(saved: Any, live: Any, devices: dict[int, torch.device]) -> Any:
    """A copy of optimizer content in the live tensors where they fit, else on the device that it came from."""

    def place(tensor: Tensor) -> torch.device:
        return devices.get(memory_id(tensor), tensor.device)

    work = StateCopy(saved, live, place)
    work.run()
    return work.result


def _write(param: Tensor, value: Tensor) -> None:
    if is_dtensor(param) and is_dtensor(value):  # each rank its shard: no collective
        param, value = local_of(param), local_of(value)
    if _fits(param, value):
        param.copy_(value)
    else:  # it was given another shape or dtype meanwhile
        param.data = value.clone().to(param.device)


def _fits(live: Tensor, saved: Tensor) -> bool:
    return live.shape == saved.shape and live.dtype == saved.dtype and live.layout == saved.layout


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _scannable(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def _entries(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in one entry of an optimizer's state, by name: `exp_avg`, `old_dirs[3]`."""
    if _scannable(value):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _entries(item, f"{path}.{key}" if path else str(key))
    elif not isinstance(value, (str, bytes)) and isinstance(value, Sequence):
        for index, item in enumerate(value):
            yield from _entries(item, f"{path}[{index}]")
