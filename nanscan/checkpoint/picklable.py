"""What pickling meets on its way: which tensor goes where, and whether `weights_only=True` will load all of it."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from nanscan import paddle_objects
from nanscan.checkpoint.taken_apart import taken_apart
from nanscan.checkpoint.tensors import Found
from nanscan.checkpoint.turns import give_way
from nanscan.checkpoint.views import WASTE, Views
from nanscan.engine.shards import is_dtensor
from nanscan.errors import CheckpointError
from nanscan.pickling.find import find_unpicklable
from nanscan.pickling.problem import PickleProblem, in_lines
from nanscan.pickling.safe_globals import allowed, allowed_objects
from nanscan.pickling.weights_only import refused

__all__ = ["PickleWatch", "problems_of", "refuse_paddle", "refuse_shards", "unpicklable"]

_TENSORS = (Tensor, nn.Parameter)
_GLOBALS = (type, FunctionType, BuiltinFunctionType)
_NO_STORAGES = frozenset({str, int, float, bool, type(None), tuple, list, dict, OrderedDict, *_TENSORS, *_GLOBALS[1:]})


class _Pickler(pickle.Pickler):
    """Spares torch, whose pickler is a class derived from this one, its question whether a plain value is a storage.

    It is asked in Python about every number and string, twenty for each tensor.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ask = vars(cls).get("persistent_id")
        if ask is not None:
            cls.persistent_id = lambda self, obj: None if type(obj) in _NO_STORAGES else ask(self, obj)  # type: ignore[method-assign]


class PickleWatch:
    """Watches one torch.save from inside its pickler, which costs next to nothing where all is well.

    Args:
        huge: the state's very large integers: pickle asks nobody about numbers.
        found: its tensors, of which small views are saved without the large memory behind them.

    Attributes:
        module: give it to torch.save as ``pickle_module``.
        suspects: what is not surely loadable with ``weights_only=True``, each type once, each function once.
    """

    def __init__(self, huge: Sequence[int] = (), found: Sequence[Found] = ()) -> None:
        self._views = Views(found)
        self.suspects: dict[Any, Any] = {number: number for number in huge}
        self._storages: dict[int, str] = {}  # StorageImpl -> the key that torch.save gives it
        self._keys: dict[int, str] = {}  # id of a tensor -> the key of its storage
        self._known = {id(value) for value in allowed_objects()}

        class Pickler(_Pickler):
            reducer_override = staticmethod(self._meet)

        self.module = SimpleNamespace(__name__="pickle", Pickler=Pickler)

    def _meet(self, obj: Any) -> Any:
        """Note an object that pickle is about to take apart; returns its parts, or leaves that to the object."""
        kind = type(obj)
        if kind in _TENSORS:
            return self._meet_tensor(obj, kind)
        if isinstance(obj, _GLOBALS):
            if id(obj) not in self._known and not allowed(f"{obj.__module__}.{obj.__qualname__}"):
                self.suspects.setdefault(obj, obj)
        elif kind is not OrderedDict and id(kind) not in self._known:
            self.suspects.setdefault(kind, obj)
        return NotImplemented

    def _meet_tensor(self, tensor: Tensor, kind: type) -> Any:
        give_way()
        if tensor.__dict__:
            self.suspects.setdefault(kind, tensor)
        if tensor.layout is not torch.strided or tensor.is_meta:
            return NotImplemented
        storage, name = tensor.untyped_storage(), id(tensor)
        if storage.nbytes() - tensor.nbytes > WASTE and tensor.is_cpu:
            tensor = self._views.alone(tensor)
            storage = tensor.untyped_storage()
        self._keys[name] = self._storages.setdefault(storage._cdata, str(len(self._storages)))
        parts = taken_apart(tensor, storage) if kind is Tensor else None
        return NotImplemented if parts is None else parts

    def is_loadable(self) -> bool:
        """True if ``torch.load(weights_only=True)`` will load everything that was pickled."""
        return all(refused(value) is None for value in self.suspects.values())

    def paths(self, found: Sequence[Found]) -> dict[str, list[str]]:
        """Key of a storage -> paths of the tensors in it, which are those that were pickled."""
        paths: dict[str, list[str]] = {}
        for item in found:
            key = self._keys.get(id(item.tensor))
            if key is not None:
                paths.setdefault(key, []).append(item.path)
        return paths


def unpicklable(obj: Any, path: str, problems: Sequence[PickleProblem], cause: BaseException | None) -> CheckpointError:
    """The error that lists every place that can't be saved so that it loads again."""
    whole = _whole(obj)
    if whole:
        text = f"cannot save to {path!r}: {whole}"
    elif problems:
        listed = in_lines(problems)
        text = (
            f"cannot save to {path!r}: {len(problems)} value(s) can't be saved so that they load again without running "
            f'code. Change them as said, or leave them out with on_unpicklable="drop":\n  {listed}'
        )
    else:
        text = f"cannot save to {path!r}: {type(cause).__name__}: {cause}"
    error = CheckpointError(text)
    error.problems = list(problems)  # type: ignore[attr-defined]
    error.__cause__ = cause
    return error


def refuse_paddle(obj: Any, found: Sequence[Found], path: str) -> None:
    """Raise if a tensor of PaddlePaddle would go into a file that only PyTorch's tensors can be loaded from."""
    theirs = [item.path for item in found if paddle_objects.is_tensor(item.tensor)]
    if paddle_objects.is_layer(obj) or paddle_objects.is_optimizer(obj):
        raise unpicklable(obj, path, (), None)
    if theirs:
        more = f" and {len(theirs) - 3} more" if len(theirs) > 3 else ""
        raise CheckpointError(
            f"cannot save to {path!r}: {', '.join(theirs[:3])}{more} are tensors of PaddlePaddle. Use a suffix of "
            "Paddle's files, .pdparams (weights), .pdopt (optimizer) or .pdtensors (any): paddle.load opens them too"
        )


def refuse_shards(found: Sequence[Found], path: str) -> None:
    """Raise if a tensor is a DTensor: the file would hold one rank's shard, and opens in the same group only."""
    shards = [item.path for item in found if is_dtensor(item.tensor)]
    if shards:
        more = f" and {len(shards) - 3} more" if len(shards) > 3 else ""
        raise CheckpointError(
            f"cannot save to {path!r}: {', '.join(shards[:3])}{more}: sharded tensors (DTensor), of which this process "
            "holds a part. Every rank together: nanscan.CheckpointManager(folder).save(step, model=model, "
            "optimizer=optimizer). One file: tensor.full_tensor() of each on all ranks, then save on one"
        )


def _whole(obj: Any) -> str | None:
    """What to do instead of saving a whole model or optimizer."""
    if paddle_objects.is_layer(obj):
        return (
            f"a whole layer ({type(obj).__name__}) loads only by running code. Save its state: "
            "nanscan.save(layer.state_dict(), 'model.pdparams'), for layer.set_state_dict(nanscan.load(path))"
        )
    if paddle_objects.is_optimizer(obj):
        return (
            f"a whole optimizer ({type(obj).__name__}) can't be pickled. Save its state: "
            "nanscan.save(optimizer.state_dict(), 'model.pdopt'), for optimizer.set_state_dict(nanscan.load(path))"
        )
    for kind, what in ((nn.Module, "model"), (torch.optim.Optimizer, "optimizer")):
        if issubclass(type(obj), kind):
            name = type(obj).__name__
            return (
                f"a whole {what} ({name}) loads only by running code (weights_only=False). Save its state: "
                f"nanscan.save({what}.state_dict(), path), for {what}.load_state_dict(nanscan.load(path))"
            )
    return None


def problems_of(obj: Any, name: str, suspects: Sequence[Any]) -> list[PickleProblem]:
    """Every place in ``obj``, which the caller calls ``name``, that pickling or loading refuses."""
    found = find_unpicklable(obj, name=name, weights_only=True, check_loading=False)
    errors = [problem for problem in found if problem.severity == "error"]
    return errors or _without_path(suspects)


def _without_path(suspects: Sequence[Any]) -> list[PickleProblem]:
    judged = ((value, refused(value)) for value in suspects)
    return [
        PickleProblem("(somewhere inside)", f"{type(value).__module__}.{type(value).__qualname__}", *judgement)
        for value, judgement in judged
        if judgement is not None
    ]
