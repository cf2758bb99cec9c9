"""Copies of nested state: own memory, the same structure, and memory used again."""

from __future__ import annotations

import argparse
import copy
import gc
import pickle
import weakref
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from nanscan import engine, state_copy
from nanscan.state_copy import StateCopy, copy_state
from tests.guarded import bits

Pair = namedtuple("Pair", "first second")


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors_of(item)] if isinstance(value, (list, tuple, deque)) else []


def exact(value: Any) -> Any:
    """As `bits`, with deques as lists."""
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    return [exact(item) for item in value] if isinstance(value, (list, tuple, deque)) else bits(value)


def nested() -> dict[str, Any]:
    return {
        "tensor": torch.randn(3, 4),
        "ordered": OrderedDict(a=torch.ones(2), b=[torch.zeros(1), 5, "text", None]),
        "tuple": (torch.arange(3), 1.5),
        "pair": Pair(torch.ones(1), 2),
        "deque": deque([torch.ones(2), torch.zeros(2)], maxlen=7),
        "set": {1, 2},
        "bool": True,
    }


def test_copy_equals_the_source_and_keeps_types() -> None:
    source = nested()
    copied = copy_state(source)
    assert exact(copied) == exact(source)
    for key, value in source.items():
        assert type(copied[key]) is type(value)
    assert copied["deque"].maxlen == 7


def test_copy_shares_no_memory() -> None:
    source = nested()
    before = exact(source)
    for tensor in tensors_of(copied := copy_state(source)):
        tensor.fill_(7)
    copied["ordered"]["b"].append("more")
    copied["set"].add(3)
    assert exact(source) == before


def test_parameters_come_out_as_plain_detached_tensors() -> None:
    copied = copy_state({"p": nn.Parameter(torch.ones(2))})
    assert type(copied["p"]) is Tensor and not copied["p"].requires_grad


def test_state_dict_keeps_its_metadata() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    assert copy_state(state)._metadata == state._metadata


def test_tied_tensors_stay_tied() -> None:
    tied = torch.ones(3)
    copied = copy_state({"a": tied, "b": [tied], "alias": tied.detach()})
    assert copied["a"] is copied["b"][0] is copied["alias"]


def test_overlapping_views_stay_views_of_one_memory() -> None:
    base = torch.arange(10.0)
    copied = copy_state({"whole": base, "row": base[2:6], "even": base[::2]})
    copied["whole"].mul_(2)
    assert copied["row"].tolist() == [4.0, 6.0, 8.0, 10.0]
    assert copied["even"].tolist() == [0.0, 4.0, 8.0, 12.0, 16.0]
    assert base[1] == 1.0


def test_small_view_of_a_large_storage_is_copied_alone() -> None:
    base = torch.zeros(1_000_000)
    copied = copy_state({"a": base[:5], "b": base[10:20]})
    assert copied["a"].untyped_storage().nbytes() == 20
    assert copied["b"].untyped_storage().nbytes() == 40


def test_former_copy_is_used_again_without_allocation() -> None:
    source = nested()
    former = copy_state(source)
    source["tensor"].add_(1)
    again = copy_state(source, into=former)
    assert exact(again) == exact(source)
    pointers = [t.data_ptr() for t in tensors_of(former)]
    assert [t.data_ptr() for t in tensors_of(again)] == pointers


def test_overlapping_views_are_used_again() -> None:
    base = torch.arange(10.0)
    source = {"whole": base, "row": base[2:6]}
    former = copy_state(source)
    base.add_(1)
    again = copy_state(source, into=former)
    assert exact(again) == exact(source)
    assert again["whole"].data_ptr() == former["whole"].data_ptr()


def test_former_copy_of_other_shape_or_dtype_is_not_used() -> None:
    former = copy_state({"a": torch.ones(3), "b": torch.ones(3)})
    source = {"a": torch.ones(4), "b": torch.ones(3, dtype=torch.float64)}
    assert bits(copy_state(source, into=former)) == bits(source)


def test_tensors_untied_since_the_former_copy_do_not_share() -> None:
    tied = torch.ones(2)
    former = copy_state({"a": tied, "b": tied})
    again = copy_state({"a": torch.zeros(2), "b": torch.ones(2)}, into=former)
    assert again["a"].tolist() == [0, 0] and again["b"].tolist() == [1, 1]


def test_the_source_itself_given_as_former_copy_is_not_aliased() -> None:
    source = {"a": torch.ones(2)}
    copied = copy_state(source, into=source)
    copied["a"].zero_()
    assert source["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.ones(1).expand(4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.zeros(0, 3),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([float("nan"), -0.0, float("inf")]),
        torch.ones(3).to(torch.float8_e4m3fn),
    ],
    ids=["coo", "csr", "expanded", "channels_last", "conj", "empty", "scalar", "nan", "float8"],
)
def test_any_layout_is_copied_twice(tensor: Tensor) -> None:
    first = copy_state([tensor])
    second = copy_state([tensor], into=first)
    for copied in (first[0], second[0]):
        assert bits(copied.resolve_conj()) == bits(tensor.resolve_conj())
        assert copied.layout is tensor.layout
    if tensor.layout is torch.strided and tensor.numel():
        assert second[0].data_ptr() != tensor.data_ptr()


def test_other_values_are_copied_if_plain_else_kept() -> None:
    module, function, array = nn.Linear(1, 1), torch.relu, np.arange(3)
    space = argparse.Namespace(items=[1], weight=torch.ones(1))
    copied = copy_state({"m": module, "f": function, "a": array, "n": space})
    assert copied["m"] is module and copied["f"] is function
    assert copied["a"] is not array and copied["a"].tolist() == [0, 1, 2]
    copied["n"].items.append(2)
    copied["n"].weight.zero_()
    assert space.items == [1] and space.weight.item() == 1


def test_state_that_holds_itself_is_copied() -> None:
    state: dict[str, Any] = {"list": [1]}
    state["self"] = state
    state["list"].append(state["list"])
    copied = copy_state(state)
    assert copied["self"] is copied and copied["list"][1] is copied["list"]


def test_keys_that_are_tensors_are_kept() -> None:
    weight = nn.Parameter(torch.ones(1))
    copied = copy_state({weight: {"exp_avg": torch.ones(1)}})
    assert next(iter(copied)) is weight


LEAVES = st.one_of(st.integers(), st.floats(allow_nan=False), st.text(max_size=3), st.none()) | st.builds(
    lambda size, seed: torch.randn(size, generator=torch.Generator().manual_seed(seed)),
    st.integers(0, 4),
    st.integers(0, 99),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(deque, st.lists(inner, max_size=3))
    ),
    max_leaves=12,
)


@given(STATES, STATES)
def test_any_state_into_any_former_copy_is_an_equal_own_copy(state: Any, other: Any) -> None:
    copied = copy_state(state, into=copy_state(other))
    assert str(exact(copied)) == str(exact(state))
    mine = {t.data_ptr() for t in tensors_of(state) if t.numel()}
    assert not mine & {t.data_ptr() for t in tensors_of(copied) if t.numel()}


def copied(value: Any, into: StateCopy | None = None) -> StateCopy:
    work = StateCopy(value, into)
    work.run()
    return work


def trained() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen": Counter("aab"), "step": 1}


def test_copy_into_a_former_one_is_not_laid_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = trained()
    former = copied(source)
    monkeypatch.setattr(state_copy, "Plan", None)  # what a new layout ends with
    source["model"]["0.weight"].fill_(7)
    source["optimizer"]["state"][1]["exp_avg"] = torch.full((4,), 5.0)  # has moved
    source["step"], source["seen"]["b"] = 2, 5
    again = copied(dict(source), former)
    assert exact(again.result) == exact(source)
    assert again.result["model"]._metadata == source["model"]._metadata
    assert again.result["model"] is not former.result["model"]
    assert [t.data_ptr() for t in tensors_of(again.result)] == [t.data_ptr() for t in tensors_of(former.result)]


def test_a_repeated_copy_goes_by_addresses_and_says_whether_it_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"tied": [weight := torch.rand(3), weight], "moved": torch.rand(2), "none": torch.empty(0), "n": 1}
    former = copied(source)
    for call in ("copy_", "copy_finite"):  # tensor by tensor
        monkeypatch.setattr(engine, call, None)
    for bad in (False, True):
        source["moved"] = torch.full((2,), float("inf") if bad else 5.0)
        weight.mul_(2)
        former = StateCopy(source, former)
        assert former.run_finite() is not bad
        assert exact(former.result) == exact(source)
        assert former.result["tied"][0] is former.result["tied"][1]


def test_tensor_that_moved_into_the_former_copy_is_read_before_it_is_overwritten() -> None:
    source = {"a": torch.zeros(2), "b": torch.ones(2)}
    former = copied(source)
    source["a"].fill_(5)
    source["b"] = former.result["a"]
    assert exact(copied(source, former).result) == exact({"a": torch.full((2,), 5.0), "b": torch.zeros(2)})


def test_tensors_that_moved_into_one_memory_overlap_in_the_copy_too() -> None:
    source = {"a": torch.zeros(6), "b": torch.ones(3)}
    former = copied(source)
    both = torch.arange(9.0)
    again = copied({"a": both[:6], "b": both[5:8]}, former).result
    again["a"][5] = 7
    assert again["b"].tolist() == [7, 6, 7]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(a=torch.ones(3)),  # tied no more
        lambda s: s.update(b=torch.arange(4.0)[1:], a=(both := torch.arange(4.0))[1:], e=both[:3]),
        lambda s: s.update(c=(both := torch.arange(9.0))[:6].view(2, 3), f=both[5:8]),  # overlap now
        lambda s: s.update(b=s["c"]),  # tied with another
        lambda s: s.update(c=s["c"].view(3, 2)),
        lambda s: s.update(c=s["c"].t()),
        lambda s: s.update(c=s["c"].view(torch.int32)),
        lambda s: s.update(c=s["c"].to_sparse()),
        lambda s: s.update(z=s["z"].conj()),
        lambda s: s.update(im=s["z"].conj().imag),
        lambda s: s.update(d=torch.zeros(1)),
        lambda s: s.pop("c"),
        lambda s: s.update(c=[s["a"]]),
        lambda s: s.update(c=argparse.Namespace(t=s["c"])),
        lambda s: s.update(me=s),
        lambda s: s.update(twin=(one := [1]), other=one),
    ],
)
def test_layout_that_has_changed_is_laid_out_anew(change: Callable[[dict[str, Any]], Any]) -> None:
    tied = torch.ones(3)
    source = {
        "a": tied,
        "b": tied,
        "c": torch.arange(6.0).view(2, 3),
        "z": torch.tensor([1 + 2j]),
        "im": None,
        "f": torch.ones(3),
    }
    former = copied(source)
    change(source)
    again, plain = copied(source, former).result, copy_state(source)
    again.pop("me", None), plain.pop("me", None)
    for one, other in ((again, plain), (again, source)):
        assert str({**one, "me": 0}) == str({**other, "me": 0})
    assert ("twin" in again) == (again.get("twin") is not None and again["twin"] is again["other"])
    for name, value in plain.items():
        same = [key for key, item in plain.items() if item is value]
        assert [key for key, item in again.items() if item is again[name]] == same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_memory_that_is_written_to_by_address_is_neither_resized_nor_freed(dtype: torch.dtype) -> None:
    state = {"w": torch.ones(1000).to(dtype)}
    work = StateCopy(state)
    work.run()
    target = work.result["w"]
    memory = target.untyped_storage()
    for smaller_or_larger in (0, 10, 1 << 20):
        with pytest.raises(RuntimeError, match="not resizable"):
            memory.resize_(smaller_or_larger)
    with pytest.raises(RuntimeError, match="not resizable"):
        target.resize_(1 << 20)
    reference = memory._weak_ref()
    del memory
    target.set_(torch.zeros(1, dtype=dtype))  # whoever holds the copy gives it other memory
    assert not torch.UntypedStorage._expired(reference)
    torch.UntypedStorage._free_weak_ref(reference)
    StateCopy(state, work).run()


def test_copy_does_not_keep_its_sources_alive() -> None:
    tensor = torch.ones(2)
    alive = weakref.ref(tensor)
    work = copied({"t": tensor})
    del tensor
    gc.collect()
    assert alive() is None and work.result["t"].tolist() == [1, 1]


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda work: pickle.loads(pickle.dumps(work))])
def test_a_twin_of_a_copy_is_written_to_its_own_memory(twin_of: Callable[[StateCopy], StateCopy]) -> None:
    source = {"a": torch.zeros(4), "b": torch.ones(3)}
    former = copied(source)
    before = exact(former.result)
    twin = twin_of(former)
    source["a"].fill_(7)
    assert exact(copied(source, twin).result) == exact(source)
    assert exact(former.result) == before
