"""Copies that look on the way: the same bits as torch's, and every NaN and Inf is noticed, whatever the engine."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor

from nanscan import engine
from nanscan.engine.native import NativeEngine
from nanscan.engine.torch_engines import EagerEngine

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
OTHERS = [torch.int64, torch.uint8, torch.bool, torch.int16]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["native", "eager"])
def copy_finite(request: pytest.FixtureRequest):
    if request.param == "eager":
        return EagerEngine().copy_finite
    native = engine.active_engine()
    assert isinstance(native, NativeEngine)
    return native.copy_finite


def made(dtype: torch.dtype, count: int) -> Tensor:
    if dtype in OTHERS:
        return torch.randint(0, 2, (count,)).to(dtype)
    return (torch.randn(count, dtype=torch.complex128 if dtype.is_complex else torch.float64) * 1e-3).to(dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 31, 33, 1000, 100_003, 700_001])
def test_copies_are_the_same_bits(copy_finite, dtype, count):
    source = made(dtype, count)
    target = torch.zeros_like(source)
    assert copy_finite([source], [target])
    assert bits(source) == bits(target)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1, 17, 65_535, 65_536, 131_071, 300_000])
def test_one_bad_element_is_noticed_and_copied(copy_finite, dtype, bad, place):
    good, source = made(dtype, 10), made(dtype, 300_001)
    source[place] = bad
    targets = [torch.zeros_like(good), torch.zeros_like(source)]
    assert not copy_finite([good, source], targets)
    assert bits(targets[1]) == bits(source)
    assert copy_finite([good], targets[:1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_and_smallest_numbers_are_finite(copy_finite, dtype):
    real = dtype.to_real() if dtype.is_complex else dtype
    info = torch.finfo(real)
    source = torch.tensor([info.max, info.min, info.tiny, info.smallest_normal, 0.0, -0.0], dtype=real)
    source = torch.cat([source, (source / 2).where(source.abs() < 1, source)])  # denormal
    source = torch.complex(source.double(), source.double()).to(dtype) if dtype.is_complex else source
    target = torch.zeros_like(source)
    assert copy_finite([source], [target])
    assert bits(source) == bits(target)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_left_to_the_framework_and_noticed_too(copy_finite, dtype):
    source = torch.tensor([1.0, 448.0]).to(dtype)
    target = torch.zeros(2).to(dtype)
    assert copy_finite([source], [target])
    assert target.float().tolist() == [1.0, 448.0]
    assert not copy_finite([torch.tensor([1.0, NAN]).to(dtype)], [target])


def test_layouts_that_are_not_flat_memory_are_copied_by_their_elements(copy_finite):
    base = torch.randn(6, 8)
    odd = torch.frombuffer(bytearray(4 * 5 + 1), dtype=torch.float32, offset=1, count=5).copy_(torch.arange(5.0))
    number = torch.tensor([1 + 2j, 3 - 4j])
    sources = [base.t(), base[::2, ::3], torch.ones(1).expand(4), number.conj(), number.conj().imag, odd]
    sources.append(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    targets = [torch.full_like(source.resolve_neg().resolve_conj().contiguous(), 7) for source in sources]
    assert copy_finite(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)
    base[4, 6] = NAN
    assert not copy_finite(sources, targets)


@pytest.mark.parametrize("made_by", [lambda: engine.active_engine(), EagerEngine], ids=["native", "eager"])
def test_a_copy_that_does_not_look_copies_the_same(made_by):
    number = torch.tensor([1 + 2j, NAN])
    sources = [torch.randn(1000), torch.randn(6, 8).t(), number.conj(), torch.tensor([1.0, 2.0]).to(torch.float8_e5m2)]
    targets = [torch.zeros_like(source.resolve_conj().contiguous()) for source in sources]
    made_by().copy_(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert bits(source.resolve_conj()) == bits(target)


@pytest.mark.parametrize("made_by", [lambda: engine.active_engine(), EagerEngine], ids=["native", "eager"])
def test_a_copy_of_nothing_is_no_error(made_by, copy_finite):
    made_by().copy_([], [])
    assert copy_finite([], [])


def test_a_parameter_and_its_gradient_history_are_left_alone(copy_finite):
    weight = torch.nn.Parameter(torch.randn(3))
    target = torch.zeros(3)
    assert copy_finite([weight], [target])
    assert torch.equal(weight.detach(), target) and not target.requires_grad and weight.grad_fn is None


def test_as_many_targets_as_sources_are_needed(copy_finite):
    with pytest.raises(ValueError):
        copy_finite([torch.ones(1)], [])


@pytest.fixture
def native() -> NativeEngine:

    found = engine.active_engine()
    assert isinstance(found, NativeEngine)
    return found


def test_layouts_tell_apart_what_a_copy_depends_on(native) -> None:
    memory = torch.zeros(24, dtype=torch.complex64)
    real = torch.view_as_real(memory)
    views = [
        memory[:12],
        memory[:12].view(3, 4),
        memory[:12].view(3, 4).t(),
        memory[:12].conj(),
        real[:6, :1],
        torch._neg_view(real[:6, :1]),
        real[:6, :1].view(torch.int32),
    ]
    layouts = [native.layouts_of([view]) for view in views]
    assert len({layout for _, layout, _ in layouts}) == len(views)
    assert {address for address, _, _ in layouts} == {memory.data_ptr().to_bytes(8, "little")}
    assert [lazy for _, _, lazy in layouts] == [False, False, False, True, False, True, False]


def test_layouts_are_equal_for_equal_lists_and_not_told_of_sparse_tensors(native) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    assert native.layouts_of([weight, weight]) == native.layouts_of([weight.detach(), weight.detach()])
    assert native.layouts_of([torch.eye(2).to_sparse()]) is None


def test_a_state_is_rebuilt_with_other_tensors_and_new_containers(native) -> None:
    met = [torch.nn.Parameter(torch.zeros(1)), torch.ones(2), torch.ones(3)]
    ordered = OrderedDict(weight=met[2])
    ordered._metadata = {"version": 1}  # type: ignore[attr-defined]
    value = {"a": [met[0], 1.5, None], "b": ({"c": met[1]}, "text"), "d": ordered, "other": {1, 2}}
    targets = [torch.full((1,), float(i)) for i in range(3)]
    made, sources = native.rebuild(value, targets, (float, type(None), str), lambda other: ("copied", other))
    assert all(one is other for one, other in zip(sources, met, strict=True))
    assert made["a"][0] is targets[0] and made["b"][0]["c"] is targets[1] and made["d"]["weight"] is targets[2]
    assert made["a"][1:] == [1.5, None] and made["b"][1] == "text" and made["other"] == ("copied", {1, 2})
    assert type(made["d"]) is OrderedDict and made["d"]._metadata == {"version": 1}
    assert made["a"] is not value["a"] and value["a"][0] is met[0] and ordered["weight"] is met[2]


def test_what_does_not_fit_is_said_and_not_rebuilt(native) -> None:
    shared = [torch.zeros(1)]
    with pytest.raises(LookupError, match="two places"):
        native.rebuild([shared, shared], [torch.zeros(1)] * 2, (), list)
    with pytest.raises(LookupError, match="more tensors than targets"):
        native.rebuild(shared, [], (), list)
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        native.rebuild(deep, [], (), list)


def test_planned_copies_are_made_again_from_where_the_sources_lie_then(native) -> None:
    sources = [
        torch.randn(5),
        torch.zeros(0),
        torch.arange(7),
        torch.nn.Parameter(torch.randn(3, 4)),
        torch.tensor(2.0),
    ]
    targets = [torch.empty_like(source) for source in sources]
    plan = native.plan_copies(sources, targets)
    assert plan is not None
    for _ in range(2):
        sources = [source.detach() * 3 for source in sources]  # elsewhere
        assert native.copy_planned(plan, native.layouts_of(sources)[0]) is True
        assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))
    sources[3][2, 1] = float("nan")
    assert native.copy_planned(plan, native.layouts_of(sources)[0]) is False
    assert torch.isnan(targets[3]).nonzero().tolist() == [[2, 1]]


def test_copies_that_addresses_do_not_describe_are_not_planned(native) -> None:
    ones = torch.ones(4, 6)
    assert native.plan_copies([ones], [torch.empty(4, 6)]) is not None
    for source in (ones.t(), ones[:, ::2], ones.expand(2, 4, 6), ones.to_sparse(), ones.to(torch.float8_e5m2)):
        assert native.plan_copies([ones, source], [torch.empty(4, 6), torch.zeros_like(source)]) is None
    assert native.plan_copies([ones], [torch.empty(6, 4)]) is None
    assert native.plan_copies([ones], [torch.empty(4, 6, dtype=torch.float64)]) is None
    assert native.plan_copies([ones], [ones]) is None  # they overlap


def test_nothing_is_copied_from_no_address_and_addresses_must_be_as_many(native) -> None:
    target = torch.zeros(3)
    plan = native.plan_copies([torch.ones(3), torch.ones(3)], [target, torch.zeros(3)])
    good = torch.ones(3).data_ptr().to_bytes(8, "little")
    assert native.copy_planned(plan, good + bytes(8)) is None
    assert target.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="address"):
        native.copy_planned(plan, good)
