"""The walk over everything that pickle would save, breadth first, so that each place gets its shortest path."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from nanscan import paddle_objects
from nanscan.pickling import byname, fleeting, light, lost, paddle_kinds, restore
from nanscan.pickling.fixes import (
    BARE_STORAGE,
    MEMMAP,
    PLAIN_TENSORS,
    plain_refusal,
    raised,
    refined,
    refused_type,
    rename,
    said,
    without_data,
)
from nanscan.pickling.kinds import FSDP, PICKLE_BUT_NO_MORE, SCRIPT, kind_of
from nanscan.pickling.naming import type_name
from nanscan.pickling.parts import ATOMS, CONTAINERS, NEW, Part, Saved, contents, parts, saved
from nanscan.pickling.places import Finding, Place
from nanscan.pickling.plain_forms import plain_form
from nanscan.pickling.trust import own_hook
from nanscan.pickling.weights_only import surely_plain

__all__ = ["Refused", "Walk"]

Refused = Callable[[Any], "tuple[str, str] | None"]
_PLAIN_DICTS = (collections.OrderedDict, collections.Counter, collections.defaultdict)
_MADE_IN_A_ROW = 10  # more is rare, and endless only in great numbers


class Walk:
    """One look at an object; `findings` and `unsettled` are what came of it.

    Args:
        for_process: judged by multiprocessing's reducers instead of pickle's.
        refused: asked about every value that isn't a plain container, where `weights_only` matters.
    """

    def __init__(self, for_process: bool = False, refused: Refused | None = None) -> None:
        byname.forget()
        self.findings: list[Finding] = []
        self.unsettled: list[Place] = []
        self._for_process = for_process
        self._refused = refused
        self._is_odd = None if refused is None else lambda value: type(value) in ATOMS and not surely_plain(value)
        self._table = light.dispatch_table(for_process)
        self._seen: dict[int, Any] = {}  # holds what it has seen: an id is not given twice meanwhile
        self._made: list[Saved] = []
        self._made_often = 0
        self._at_fault: dict[int, list[Finding]] = {}
        self._classes: dict[int, tuple[str, str, str] | None] = {}
        self._subclasses: set[type[torch.Tensor]] = set()

    def run(self, roots: Iterable[Place]) -> None:
        """Walk from the roots on."""
        queue = collections.deque(roots)
        while queue:
            place = queue.popleft()
            value = place.value
            if id(value) in self._seen:
                for finding in self._at_fault.get(id(value), ()):
                    finding.also.append(place)
                continue
            self._seen[id(value)] = value
            for steps, child in self.children(place):
                if (type(child) not in ATOMS and not _empty(child)) or (self._is_odd and self._is_odd(child)):
                    queue.append(place.child(child, steps))

    def skipped(self) -> frozenset[int]:
        """The ids of the values at fault."""
        return frozenset(self._at_fault)

    def children(self, place: Place) -> Iterable[Part]:
        """What a place holds, judged on the way."""
        if self._endless(place):
            return ()
        try:
            return list(self._look(place, place.value))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: B036  the user's code ran: what it raises, pickle would meet too
            self._report(place, *raised(place.value, error))
            return _inner_model(place.value)

    def _endless(self, place: Place) -> bool:
        """Whether reducers make new objects on and on; told once, of the object that it began with."""
        if place.made <= _MADE_IN_A_ROW:
            return False
        self._made_often += 1
        if place.made < 100 * _MADE_IN_A_ROW and self._made_often < 20_000:
            return False
        origin = next(p for p in place.upwards() if p.made == 0)
        if id(origin.value) not in self._at_fault:
            self._report(origin, "its reducer makes new objects without end", "return what the object holds")
        return True

    def _look(self, place: Place, value: Any) -> Iterator[Part]:
        kind = type(value)
        if kind in CONTAINERS:
            yield from self._container(place, value)
        elif kind in ATOMS:
            self._ask_weights_only(place)
        elif issubclass(kind, torch.Tensor):
            yield from self._tensor(place, value)
        elif paddle_objects.is_tensor(value):
            self._paddle_tensor(place, value)
        elif issubclass(kind, np.ndarray) and not own_hook(kind, "__reduce__", "__reduce_ex__"):
            yield from self._array(place, value, kind)
        elif issubclass(kind, (torch.UntypedStorage, torch.TypedStorage)):
            if kind is torch.UntypedStorage and not self._refused and not self._for_process:
                self._report(place, *BARE_STORAGE)
        elif self._by_name(value, kind):
            verdict = byname.refused_name(value, self._for_process)
            if verdict:
                self._report(place, *verdict)
            else:
                self._ask_weights_only(place)
        elif not self._known_bad(place, kind):
            yield from self._object(place, value, kind)

    def _by_name(self, value: Any, kind: type) -> bool:
        if kind in self._table:
            return False
        if kind is types.BuiltinFunctionType:
            return isinstance(value.__self__, types.ModuleType) or value.__self__ is None
        return kind is types.FunctionType or issubclass(kind, type)

    def _container(self, place: Place, value: Any) -> Iterator[Part]:
        if self._refused and not place.refused and type(value) is frozenset:
            self._ask_weights_only(place)
        if type(value) is dict:
            self._lost_functions(place, value)
        if type(value) in (dict, set) and restore.holds_itself_as_key(value):
            self.unsettled.append(list(place.upwards())[-1])  # it depends on where pickle came from
        yield from contents(value, None if place.refused else self._is_odd)

    def _lost_functions(self, place: Place, value: dict[Any, Any]) -> None:
        for key, position in lost.lost_function(value):
            lost_place = Place(None, place, (("item", key), ("item", position)), place.depth + 1)
            self.findings.append(
                Finding(
                    lost_place,
                    "function",
                    "a scheduler's state_dict holds None where its function was: lambdas and functions are not stored",
                    "the program makes the scheduler with the same functions before load_state_dict",
                    "loss",
                )
            )

    def _tensor(self, place: Place, value: torch.Tensor) -> Iterator[Part]:
        if self._for_process and value.requires_grad and not value.is_leaf and type(value) in self._table:
            grad = value.grad_fn and value.grad_fn.name()
            self._report(
                place,
                f"a tensor of shape {tuple(value.shape)} with a graph (grad_fn {grad}): PyTorch refuses to send it to "
                "another process",
                "send value.detach()",
            )
            return
        if self._for_process and place.made and fleeting.is_lost_on_the_way(place, self._table):
            origin = next(p for p in place.upwards() if p.made == 0)
            if id(origin.value) not in self._at_fault:
                self._report(origin, *fleeting.LOST)
            return
        opaque = without_data(value)
        if opaque:
            self._report(place, *opaque)
            return
        holder = None if place.parent is None else place.parent.value
        for reason, fix in lost.tensor_loss(value, holder, self._for_process):
            self._report(place, reason, fix, "loss")
        self._ask_weights_only(place)
        if type(value) in PLAIN_TENSORS:
            if not self._for_process:
                for name, held in value.__dict__.items():
                    yield (("attr", name),), held
        else:
            self._subclass(place, type(value))
            yield from self._object(place, value, type(value))

    def _subclass(self, place: Place, kind: type[torch.Tensor]) -> None:
        """Told of the first instance, where all of a class have it: a data set may hold thousands."""
        verdict = None if issubclass(kind, torch.nn.Parameter) else byname.refused_name(kind, self._for_process)
        if verdict:
            self._report(place, *verdict)
        elif kind not in self._subclasses:
            self._subclasses.add(kind)
            loss = lost.subclass_loss(kind, self._for_process)
            if loss:
                self._report(place, *loss, "loss")

    def _paddle_tensor(self, place: Place, value: Any) -> None:
        error = paddle_kinds.tensor_error(value)
        loss = paddle_kinds.tensor_loss(value)
        if error:
            self._report(place, *error)
        elif loss:
            self._report(place, *loss, "loss")
        if self._refused is not None and not place.refused:
            place.refused = True
            self._report(place, *paddle_kinds.OF_TORCH)

    def _array(self, place: Place, value: Any, kind: type) -> Iterator[Part]:
        verdict = None if kind is np.ndarray else byname.refused_name(kind, self._for_process)
        if verdict:
            self._report(place, *verdict)
        elif not self._ask_weights_only(place) and issubclass(kind, np.memmap):
            self._report(place, f"{value.nbytes} bytes of a mapped file go into the pickle", MEMMAP, "loss")
        if value.dtype.hasobject:
            if value.dtype != object and (error := light.failure(value, self._for_process)):
                self._report(place, f"a field of the array can't be pickled ({said(error)})", "convert that field")
            yield from contents(value)

    def _known_bad(self, place: Place, kind: type) -> bool:
        """A value of a type that the table knows, and that really does not pickle, is one place, not its insides."""
        known = kind_of(kind)
        if known is None or (issubclass(kind, torch.nn.Module) and known not in (SCRIPT, FSDP)):
            return False
        with light.spawning(self._for_process):
            error = light.failure(place.value, self._for_process)
        if error is None and (known not in PICKLE_BUT_NO_MORE or self._for_process):
            return False
        detail = "" if error is None or plain_refusal(error) else f" ({said(error)})"
        self._report(place, known.reason + detail, known.fix)
        return True

    def _object(self, place: Place, value: Any, kind: type) -> Iterator[Part]:
        with light.spawning(self._for_process):
            whole = saved(value, self._table)
        if isinstance(whole, str):
            with light.spawning(self._for_process):
                error = light.failure(value, self._for_process)
            if error is not None:
                self._report(
                    place, f"it is saved under the name '{whole}', which is not it ({said(error)})", rename(value)
                )
            elif not self._for_process and (error := light.failure_in_torch_save(value)):
                self._report(
                    place, f"torch.save, which uses pickle's protocol 2, fails on it ({said(error)})", plain_form(value)
                )
            else:
                self._ask_weights_only(place)
            return
        self._made.append(whole)
        if paddle_objects.is_layer(value) and not any(paddle_objects.is_layer(p.value) for p in _around(place)):
            self._report(place, *paddle_kinds.layer_loss(value), "loss")
        self._judge(place, value, kind, whole)
        yield from parts(value, whole)

    def _judge(self, place: Place, value: Any, kind: type, whole: Saved) -> None:
        verdict = self._class_verdict(whole)
        if verdict:
            self._report(place, *verdict)
        if kind not in _PLAIN_DICTS and self._ask_weights_only(place):
            return
        refusal = restore.refuses_to_load(value, whole)
        loss = lost.lost_with(value, whole, None if place.parent is None else place.parent.value)
        if refusal:
            self._report(place, *refusal)
        elif loss:
            self._report(place, *loss, "loss")
        elif (verdict is None or verdict[-1] == "loss") and restore.unsettled(value, whole):
            self.unsettled.append(place)
        copying = None if refusal or loss or self._for_process else restore.refuses_to_copy(value)
        if copying:
            self._report(place, *copying, "loss")

    def _class_verdict(self, whole: Saved) -> tuple[str, str, str] | None:
        maker = whole.args[0] if whole.func in NEW and whole.args else whole.func
        if not issubclass(type(maker), type):
            return None
        if id(maker) not in self._classes:
            self._classes[id(maker)] = byname.refused_name(maker, self._for_process)
        return self._classes[id(maker)]

    def _ask_weights_only(self, place: Place) -> bool:
        if self._refused is None or place.refused:
            return False
        verdict = self._refused(place.value) if light.failure(place.value) is None else refused_type(place.value)
        place.refused = verdict is not None
        if verdict:
            self._report(place, *verdict)
        return verdict is not None

    def _report(self, place: Place, reason: str, fix: str, severity: str = "error") -> None:
        reason, fix = refined(place, reason, fix, severity)
        finding = Finding(place, type_name(place.value), reason, fix, severity)
        self.findings.append(finding)
        self._at_fault.setdefault(id(place.value), []).append(finding)


def _around(place: Place) -> list[Place]:
    return list(place.upwards())[1:]


def _empty(value: Any) -> bool:
    """The hooks that a module does not have: most of what a model holds."""
    return type(value) is collections.OrderedDict and not value and not value.__dict__


def _inner_model(value: Any) -> list[Part]:
    """The model in a wrapper that refuses to be saved: it is what will be saved instead."""
    inner = vars(value).get("_modules", {}).get("module") if issubclass(type(value), torch.nn.Module) else None
    return [] if inner is None else [((("attr", "module"),), inner)]
