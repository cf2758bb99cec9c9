"""What torch.load(weights_only=True) refuses, told without writing: always what the installed torch really does."""

from __future__ import annotations

import argparse
import array
import builtins
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import io
import pathlib
import random
import re
import threading
import types
import uuid
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nanscan.pickling.weights_only import refused


@dataclasses.dataclass
class Config:
    lr: float = 0.1


@dataclasses.dataclass(frozen=True)
class Frozen:
    lr: float = 0.1


class Mode(enum.Enum):
    A = 1


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    y: int


class Settings(dict[str, Any]):
    pass


class Names(list[str]):
    pass


class Text(str):
    pass


class Count(int):
    pass


class Rate(float):
    pass


class Slotted:
    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = 1


class Outer:
    class Inner:
        pass


class MarkedTensor(torch.Tensor):
    pass


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)


def _tensor_with(**attributes: Any) -> torch.Tensor:
    tensor = torch.ones(2)
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def _recursive_tuple() -> Any:
    items: list[Any] = []
    pair = (items,)
    items.append(pair)
    return pair


def _recursive_dict() -> Any:
    state: dict[str, Any] = {}
    state["self"] = state
    return state


_counter = collections.Counter("abca")
_ordered = collections.OrderedDict(a=1)
_ordered_with_attribute = collections.OrderedDict(a=1)
_ordered_with_attribute._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as a state_dict has

VALUES: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": 7,
    "negative": -(2**40),
    "int-128": 2**128,
    "int-255-bytes": 2**2030,
    "int-300-bytes": 2**2400,
    "float": 0.5,
    "nan": float("nan"),
    "complex": 1 + 2j,
    "str": "text",
    "str-surrogate": "\udc80",
    "str-empty": "",
    "bytes": b"ab\xff",
    "bytes-empty": b"",
    "bytearray": bytearray(b"ab"),
    "bytearray-empty": bytearray(),
    "list": [1, [2, [3]]],
    "tuple": (1, (2,), (1, 2, 3, 4)),
    "set": {1, 2},
    "frozenset": frozenset({1}),
    "frozenset-empty": frozenset(),
    "dict": {"a": {"b": 1}},
    "dict-recursive": _recursive_dict(),
    "tuple-recursive": _recursive_tuple(),
    "dict-key-tuple": {(1, "a"): 1},
    "dict-key-path": {pathlib.PurePosixPath("a"): 1},
    "dict-key-numpy": {np.int64(3): 1},
    "dict-key-enum": {Mode.A: 1},
    "dict-key-device": {torch.device("cpu"): 1},
    "nested-path": {"a": [1, (2, {"b": pathlib.Path("x")})]},
    "nested-numpy": [{"best": np.float64(0.5)}],
    "ordered": _ordered,
    "ordered-attributes": _ordered_with_attribute,
    "counter": _counter,
    "defaultdict": collections.defaultdict(int, a=1),
    "defaultdict-empty": collections.defaultdict(list),
    "deque": collections.deque([1, 2]),
    "deque-maxlen": collections.deque([1], maxlen=3),
    "chainmap": collections.ChainMap({"a": 1}),
    "userdict": collections.UserDict(a=1),
    "range": range(3),
    "slice": slice(1, 2),
    "ellipsis": ...,
    "np.float64": np.float64(0.1),
    "np.float32": np.float32(0.1),
    "np.int64": np.int64(1),
    "np.bool": np.bool_(True),
    "np.complex64": np.complex64(1j),
    "np.str": np.str_("a"),
    "np.bytes": np.bytes_(b"a"),
    "np.datetime64": np.datetime64("2026-01-01"),
    "np.timedelta64": np.timedelta64(3, "s"),
    "np.dtype": np.dtype("float32"),
    "np.array": np.zeros(2),
    "np.array-object": np.array([None, "a"], dtype=object),
    "np.array-str": np.array(["a", "b"]),
    "np.array-empty": np.zeros((0, 3), dtype=np.int8),
    "np.rng-state": np.random.get_state(),
    "np.RandomState": np.random.RandomState(0),
    "np.Generator": np.random.default_rng(0),
    "np.Generator-state": np.random.default_rng(0).bit_generator.state,
    "python-rng-state": random.getstate(),
    "python-random": random.Random(0),
    "Namespace": argparse.Namespace(lr=0.1),
    "SimpleNamespace": types.SimpleNamespace(lr=0.1),
    "path": pathlib.Path("x"),
    "purepath": pathlib.PurePosixPath("x/y"),
    "windowspath": pathlib.PureWindowsPath("x"),
    "dataclass": Config(),
    "dataclass-frozen": Frozen(),
    "dataclass-in-list": [Config()],
    "enum": Mode.A,
    "int-enum": Level.LOW,
    "namedtuple": Point(1, 2),
    "settings": Settings(a=1),
    "settings-empty": Settings(),
    "names": Names(["a"]),
    "names-empty": Names(),
    "str-subclass": Text("a"),
    "int-subclass": Count(3),
    "float-subclass": Rate(0.5),
    "slots": Slotted(),
    "nested-class": Outer.Inner(),
    "datetime": datetime.datetime(2026, 1, 2),
    "datetime-utc": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    "date": datetime.date(2026, 1, 2),
    "time": datetime.time(1, 2),
    "timedelta": datetime.timedelta(1),
    "Decimal": decimal.Decimal("0.1"),
    "Fraction": fractions.Fraction(1, 3),
    "UUID": uuid.UUID(int=5),
    "partial": functools.partial(sorted, reverse=True),
    "partial-of-eval": functools.partial(eval, "1"),
    "function": re.compile,
    "builtin": len,
    "class": Config,
    "builtin-class": int,
    "module-function": torch.nn.functional.relu,
    "regex": re.compile("a+"),
    "array.array": array.array("d", [1.0]),
    "exception": ValueError("x"),
    "os-error": FileNotFoundError(2, "x"),
    "lock": threading.Lock(),
    "lambda": lambda: 0,
    "generator": (i for i in ()),
    "module": io,
    "OmegaConf": OmegaConf.create({"a": {"b": 1}}),
    "OmegaConf-list": OmegaConf.create([1, 2]),
    "tensor": torch.ones(2),
    "tensor-grad": torch.ones(2, requires_grad=True),
    "tensor-nonleaf": torch.ones(2, requires_grad=True) * 2,
    "tensor-view": torch.arange(6).reshape(2, 3)[:, 1],
    "tensor-attribute": _tensor_with(label="a"),
    "tensor-attribute-path": _tensor_with(origin=pathlib.PurePosixPath("a")),
    "tensor-attribute-lock": _tensor_with(lock=threading.Lock()),
    "tensor-sparse": torch.eye(3).to_sparse(),
    "tensor-csr": torch.eye(3).to_sparse_csr(),
    "tensor-meta": torch.ones(2, device="meta"),
    "tensor-quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "tensor-complex": torch.ones(2, dtype=torch.complex64),
    "tensor-conj": torch.ones(2, dtype=torch.complex64).conj(),
    "tensor-float8": torch.ones(2).to(torch.float8_e4m3fn),
    "tensor-uint16": torch.ones(2, dtype=torch.uint16),
    "tensor-subclass": torch.ones(2).as_subclass(MarkedTensor),
    "tensor-large": torch.zeros(600_000),
    "tensor-sparse-large": torch.sparse_coo_tensor(torch.arange(200_000)[None], torch.ones(200_000)),
    "tensors-tied": [torch.ones(2)] * 2,
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "buffer": torch.nn.Buffer(torch.ones(2)),
    "storage": torch.ones(2).untyped_storage(),
    "dtype": torch.float32,
    "dtype-float8": torch.float8_e5m2,
    "dtype-bits": torch.bits8,
    "device": torch.device("cuda:1"),
    "Size": torch.Size([1, 2]),
    "layout": torch.strided,
    "memory_format": torch.channels_last,
    "qscheme": torch.per_tensor_affine,
    "torch.Generator": torch.Generator(),
    "torch-rng-state": torch.get_rng_state(),
    "finfo": torch.finfo(torch.float16),
    "module-object": Net(),
    "linear": torch.nn.Linear(2, 2),
    "state_dict": Net().state_dict(),
    "optimizer": torch.optim.SGD(Net().parameters(), lr=0.1),
    "optimizer-state_dict": torch.optim.Adam(Net().parameters()).state_dict(),
    "scheduler-state_dict": torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.SGD(Net().parameters(), lr=0.1), 0.1, 10
    ).state_dict(),
    "lambda-scheduler-state_dict": torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD(Net().parameters(), lr=0.1), lambda step: 1.0
    ).state_dict(),
    "multistep-state_dict": torch.optim.lr_scheduler.MultiStepLR(
        torch.optim.SGD(Net().parameters(), lr=0.1), [1, 2]
    ).state_dict(),
}
MODEL_OBJECTS = {"module-object", "linear", "optimizer"}


def loads(value: Any) -> bool:
    """The truth: torch.save, then torch.load(weights_only=True)."""
    buffer = io.BytesIO()
    try:
        torch.save({"value": value}, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("name", VALUES)
def test_refused_says_what_torch_really_does(name: str) -> None:
    assert (refused(VALUES[name]) is None) == loads(VALUES[name])


@pytest.mark.parametrize("name", VALUES)
def test_inside_containers_the_answer_is_the_same(name: str) -> None:
    assert (refused({"a": [VALUES[name], (VALUES[name],)]}) is None) == (refused(VALUES[name]) is None)


def _objects_of(fix: str) -> list[Any]:
    """The objects that the fix names, evaluated as a person would who imports what is needed."""
    code = re.search(r"add_safe_globals\((\[.*\])\)", fix)
    assert code, fix
    names: dict[str, Any] = {**vars(builtins), **globals()}
    for path in re.findall(r"[a-zA-Z_][\w.]*\.[\w.]*", code[1]):
        parts = path.split(".")
        for count in range(1, len(parts)):
            try:
                names.setdefault(parts[0], importlib.import_module(parts[0]))
                importlib.import_module(".".join(parts[:count]))
            except ImportError:
                break
    return list(eval(code[1], names))


@pytest.mark.parametrize(
    "name", [name for name, value in VALUES.items() if "add_safe_globals" in (refused(value) or ("",) * 2)[1]]
)
def test_what_the_fix_allows_really_loads_when_applied(name: str) -> None:
    value, (_, fix) = VALUES[name], refused(VALUES[name]) or ("", "")
    with torch.serialization.safe_globals(_objects_of(fix)):
        assert refused(value) is None
        assert loads(value)
    assert refused(value) is not None


def test_most_refused_kinds_can_be_allowed() -> None:
    allowable = {name for name, value in VALUES.items() if "add_safe_globals" in (refused(value) or ("",) * 2)[1]}
    assert allowable >= {
        "np.float64",
        "np.array",
        "Namespace",
        "path",
        "dataclass",
        "enum",
        "datetime",
        "Decimal",
        "UUID",
    }


@pytest.mark.parametrize(
    "name", ["settings", "names", "defaultdict", "tuple-recursive", "int-300-bytes", "partial-of-eval"]
)
def test_no_allowlist_is_advised_where_none_helps_or_none_is_safe(name: str) -> None:
    _, fix = refused(VALUES[name]) or ("", "")
    assert fix.startswith("store ") and "add_safe_globals" not in fix


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("np.float64", "float(x)"),
        ("np.int64", "int(x)"),
        ("np.bool", "bool(x)"),
        ("np.timedelta64", "astype"),
        ("np.array", "torch.from_numpy(x)"),
        ("np.array-str", "store x.tolist()"),
        ("np.rng-state", "x.tolist()"),
        ("Namespace", "vars(x)"),
        ("path", "str(x)"),
        ("nested-path", "str(x)"),
        ("dict-key-enum", "x.value"),
        ("dataclass", "dataclasses.asdict(x)"),
        ("namedtuple", "x._asdict()"),
        ("OmegaConf", "OmegaConf.to_container(x, resolve=True)"),
        ("settings", "dict(x)"),
        ("str-subclass", "str(x)"),
        ("frozenset", "set(x)"),
        ("bytes-empty", "bytearray(x)"),
        ("module-object", "x.state_dict()"),
        ("tensor-subclass", "as_subclass(torch.Tensor)"),
        ("timedelta", "x.total_seconds()"),
    ],
)
def test_the_fix_converts_as_the_type_needs_it(name: str, plain: str) -> None:
    _, fix = refused(VALUES[name]) or ("", "")
    assert plain in fix


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("np.float64", ["numpy.float64", "numpy._core.multiarray.scalar"]),
        ("Namespace", ["argparse.Namespace"]),
        ("nested-path", [f"{pathlib.PosixPath.__module__}.PosixPath"]),
        ("dataclass-in-list", ["Config"]),
        ("int-300-bytes", ["opcode LONG4"]),
        ("lock", ["_thread.lock", "can't be pickled at all"]),
    ],
)
def test_the_reason_names_the_type_and_the_global(name: str, words: list[str]) -> None:
    reason, _ = refused(VALUES[name]) or ("", "")
    assert all(word in reason for word in words), reason


_keys = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.binary(max_size=2), st.just(np.int8(1)))
_leaves = st.one_of(
    st.none(), st.floats(), _keys, st.sampled_from([np.float32(1), frozenset(), range(2), torch.ones(1)])
)
_trees = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_keys, inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@given(_trees)
def test_refused_agrees_with_torch_on_any_nested_state(state: Any) -> None:
    assert (refused(state) is None) == loads(state)


class Scaled:
    """An allowed class that changes its tensor in place when it is restored."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.weight.zero_()


@pytest.mark.parametrize("numel", [4, 600_000])
def test_judging_never_writes_into_the_callers_tensors(numel: int) -> None:
    value = Scaled(torch.ones(numel))
    with torch.serialization.safe_globals([Scaled]):
        assert refused(value) is None
    assert value.weight.sum() == numel


def test_the_data_of_large_tensors_and_arrays_is_never_copied() -> None:
    import tracemalloc

    state = {
        "w": np.zeros(20_000_000),
        "t": torch.zeros(50_000_000),
        "b": types.SimpleNamespace(w=np.zeros(20_000_000)),
    }
    tracemalloc.start()
    try:
        assert refused(state) is not None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_an_allowed_large_array_loads() -> None:
    _, fix = refused(np.zeros(10_000)) or ("", "")
    with torch.serialization.safe_globals(_objects_of(fix)):
        assert refused(np.zeros(10_000)) is None
        assert loads(np.zeros(10_000))


def test_nothing_of_torchs_own_checks_is_left_behind() -> None:
    before = list(torch._utils._sparse_tensors_to_validate)
    assert refused([torch.eye(3).to_sparse()]) is None
    assert torch._utils._sparse_tensors_to_validate == before
