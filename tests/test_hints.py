"""The table of hints as a whole: complete, harmless, documented."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nanscan
from nanscan.origin.hints import hint_for, hint_table, table
from nanscan.origin.hints.row import Row
from nanscan.origin.record import OpEvent
from tests import test_hints_backward, test_hints_forward, test_hints_functions, test_hints_layers
from tests.hint_cases import INF, NAN, Case, case, check, leaf, params

DOCS = Path(__file__).parent.parent / "docs" / "hints.md"
MOST_READS = 12  # transfers from a GPU for one hint


def bad_embedding() -> nn.Module:
    model = nn.Embedding(4, 2)
    with torch.no_grad():
        model.weight[1] = NAN
    return model


def never_initialised() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.empty(2, 2))
    with torch.no_grad():
        model.weight.fill_(NAN)  # what memory may hold by chance
    return model


def half_written(rest: float) -> Tensor:
    """Memory of which no traced op has written a thing; `rest` is what happens to lie in it."""
    memory = torch.empty(2)
    memory.numpy()[:] = (1.0, rest)
    return memory


def hooked(factor: float) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_full_backward_hook(lambda module, given, got: tuple(g * factor for g in given))
    return model


class Numpy(torch.autograd.Function):
    """A function that leaves PyTorch for numpy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, slope: Any = np.ones_like) -> Tensor:
        ctx.x, ctx.slope = x.detach().numpy(), slope
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(function(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        with np.errstate(divide="ignore"):
            return gradient * torch.from_numpy(ctx.slope(ctx.x)), None, None


BAD_EMBEDDING, EMPTY_WEIGHT = bad_embedding(), never_initialised()
BAD_BATCH = torch.tensor([[1.0, 2.0], [1.0, NAN]])

OUTSIDE = [
    case(
        "bad input",
        "comes in with the batch",
        "first in sample 1",
        "nanscan.check_batch names the sample",
        bad=lambda: nn.Linear(2, 2)(BAD_BATCH),
        healthy=lambda: nn.Linear(2, 2)(BAD_BATCH.nan_to_num()),
    ),
    case(
        "bad input",
        "1 of 4 elements",
        bad=lambda: F.scaled_dot_product_attention(
            torch.zeros(2, 2), torch.zeros(2, 2), BAD_BATCH, attn_mask=torch.tensor([[True, False]] * 2)
        ),
        healthy=lambda: F.scaled_dot_product_attention(
            torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(2, 2), attn_mask=torch.tensor([[True, False]] * 2)
        ),
    ),
    case(
        "step with a factor of NaN",
        "its factor (alpha) is NaN",
        bad=lambda: leaf(1.0).add(torch.ones(1), alpha=NAN),
        healthy=lambda: leaf(1.0).add(torch.ones(1), alpha=0.1),
    ),
    case(
        "hook that changes the gradient",
        "a full backward hook of a module changed the gradient at [0, 0]",
        bad=lambda: hooked(NAN)(torch.ones(1, 2, requires_grad=True)),
        healthy=lambda: hooked(0.5)(torch.ones(1, 2, requires_grad=True)),
    ),
    case(
        "memory that was never written",
        "1 of 2 elements, flat indices [1]",
        bad=lambda: half_written(math.nan) + 1,
        healthy=lambda: half_written(0.0) + 1,
    ),
    case(
        "custom function beyond PyTorch",
        "made NaN by other means than PyTorch's ops (2 of 2 elements",
        bad=lambda: Numpy.apply(leaf(-1.0, -2.0), np.log) * 2,
        healthy=lambda: Numpy.apply(leaf(-1.0, -2.0), np.exp) * 2,
    ),
    case(
        "backward of a custom function",
        "the backward of your custom autograd.Function made Inf out of finite gradients at [0]",
        bad=lambda: Numpy.apply(leaf(0.0, 1.0), np.sqrt, lambda x: 0.5 / np.sqrt(x)),
        healthy=lambda: Numpy.apply(leaf(0.0, 1.0), np.sqrt, lambda x: 0.5 / np.sqrt(x + 1e-6)),
    ),
    case(
        "bad parameter or buffer",
        "the parameter or buffer held NaN before this pass",
        "2 of 8 elements, flat indices [2, 3]",
        bad=lambda: BAD_EMBEDDING(torch.tensor([0, 1])),
        healthy=lambda: nn.Embedding(4, 2)(torch.tensor([0, 1])),
    ),
    case(
        "bad parameter or buffer",
        "torch.empty",
        bad=lambda: EMPTY_WEIGHT(torch.ones(1, 2)),
        healthy=lambda: nn.Linear(2, 2)(torch.ones(1, 2)),
    ),
]

ALL: list[Case] = [
    *OUTSIDE,
    *test_hints_forward.CASES,
    *test_hints_functions.CASES,
    *test_hints_layers.CASES,
    *test_hints_backward.CASES,
]


@params(OUTSIDE)
def test_the_row_speaks_in_its_words_and_not_of_its_healthy_twin(given: Case) -> None:
    check(given)


def test_every_row_is_made_to_happen_by_a_test() -> None:
    assert {c.row for c in ALL} == {name for name, _, _ in hint_table()}


def test_names_of_rows_are_unique_and_each_says_cause_and_cure() -> None:
    names = Counter(name for name, _, _ in hint_table())
    assert [name for name, count in names.items() if count > 1] == []
    assert all(cause and cure and not cure.endswith(".") for _, cause, cure in hint_table())


def test_the_docs_list_every_row() -> None:
    text = DOCS.read_text(encoding="utf-8")
    missing = [name for name, cause, cure in hint_table() if f"| {name} | {cause} | {cure} |" not in text]
    assert missing == []


def raising(view: Any) -> str | None:
    raise RuntimeError("a predicate that fails")


def test_a_row_that_raises_is_passed_over_and_the_origin_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Row("broken", frozenset(), "cause", "cure", raising)
    monkeypatch.setattr(table, "ROWS", (broken, *table.ROWS))
    with nanscan.trace() as traced:
        kept = torch.tensor([0.0]).log()
    del kept
    assert traced.origin is not None and traced.origin.hint is not None
    assert traced.origin.hint.startswith("log(0) is -inf")
    monkeypatch.setattr(table, "ROWS", (broken,))
    with nanscan.trace() as traced:
        other = torch.tensor([0.0]).log()
    assert other.isinf().all() and traced.origin is not None and traced.origin.hint is None


def test_an_event_that_lacks_everything_gives_no_hint_and_no_error() -> None:
    assert hint_for(OpEvent("aten.log", "forward", "inf")) is None
    assert hint_for(OpEvent("SqrtBackward0", "backward", "nan", saved={"result": None})) is None


def test_an_unknown_op_gives_no_hint() -> None:
    x = torch.tensor([1.0])
    event = OpEvent("mylib.frobnicate", "forward", "nan", inputs=(x,), outputs=(x * NAN,), first_bad=(0,), args=(x,))
    assert hint_for(event) is None


class Reads(TorchDispatchMode):
    """Counts what would be a transfer from a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"):
            self.count += 1
        assert not any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments), func
        return func(*args, **(kwargs or {}))


@params(ALL)
def test_a_hint_reads_few_numbers_and_changes_nothing(given: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    def counted(event: OpEvent) -> str | None:
        tensors = [t for t in (*event.inputs, *event.outputs, *event.saved.values()) if isinstance(t, Tensor)]
        before = [(t._version, t.clone()) for t in tensors]
        with Reads() as reads:
            text = hint_for(event)
        after = [(t._version, t) for t in tensors]
        assert all(v == w and torch.equal(a.isnan(), b.isnan()) for (v, a), (w, b) in zip(before, after, strict=True))
        events.append(reads.count)
        return text

    monkeypatch.setattr("nanscan.origin.hints.hint_for", counted)
    with nanscan.trace():
        kept = given.bad()
        if isinstance(kept, Tensor) and kept.requires_grad and kept.grad_fn is not None:
            kept.sum().backward()
    assert events and max(events) <= MOST_READS


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 1, torch.log(x), torch.zeros_like(x)) + torch.log(x).nan_to_num(neginf=0.0)


def test_what_is_laundered_in_forward_is_named_where_it_was_made() -> None:
    with nanscan.trace() as traced:
        out = Layer()(leaf(0.0, 2.0))
        assert out.isfinite().all()
        out.sum().backward()
    origin = traced.origin
    assert origin is not None and origin.op == "aten.log" and origin.module == "Layer"
    assert origin.hint is not None and "log(0)" in origin.hint


def test_masks_and_padding_give_neither_origin_nor_hint() -> None:
    s = leaf(1.0, 2.0, 3.0).unsqueeze(0)
    with nanscan.trace() as traced:
        m = s.masked_fill(torch.tensor([[False, False, True]]), -INF)
        (m.softmax(-1)[..., 0] + m.logsumexp(-1) + m.amax(-1)).sum().backward()
        torch.zeros(3, requires_grad=True).norm().backward()
        F.normalize(torch.zeros(3, requires_grad=True), dim=0).sum().backward()
        F.cosine_similarity(torch.zeros(3, requires_grad=True), torch.ones(3), dim=0).backward()
        leaf(0.0, 2.0, 0.0).prod().backward()
        F.gaussian_nll_loss(leaf(1.0), torch.tensor([1.0]), torch.tensor([0.0])).backward()
    assert traced.origins == []


def test_batch_norm_of_one_value_and_a_singular_inverse_are_errors_of_pytorch_not_nan() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm2d(2)(torch.randn(1, 2, 1, 1))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv(torch.zeros(2, 2))
    with pytest.raises(torch.linalg.LinAlgError, match="positive-definite"):
        torch.linalg.cholesky(torch.zeros(2, 2))
