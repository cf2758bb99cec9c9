"""`nanscan.scan`: what it takes, how it names, and what it says of input that it cannot scan."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nanscan
from nanscan import engine as engines
from tests.conftest import ENGINES, load_engine

NAN, INF = math.nan, math.inf


@pytest.fixture(params=ENGINES, autouse=True)
def any_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test holds on every engine."""
    monkeypatch.setattr(engines, "_active", load_engine(str(request.param)))


def names(report: nanscan.Report) -> list[str]:
    return [row.name for row in report.tensors]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_a_list_a_tuple_and_a_generator_have_rows_named_by_position() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([4.0, NAN])]
    for given in (tensors, tuple(tensors), (t for t in tensors)):
        report = nanscan.scan(given)
        assert names(report) == ["[0]", "[1]"]
        assert (report.finite, report.nan_count, report.finite_norm, report.numel) == (False, 1, 5.0, 3)
        assert [(row.name, row.first_bad, row.nan_count) for row in report.bad] == [("[1]", (1,), 1)]


def test_none_in_a_list_is_skipped_and_positions_stay() -> None:
    report = nanscan.scan([None, torch.ones(2), None, torch.tensor([INF])])
    assert names(report) == ["[1]", "[3]"] and [row.name for row in report.bad] == ["[3]"]


def test_a_dict_has_its_keys_as_names() -> None:
    report = nanscan.scan({"w": torch.ones(2, 2), 7: torch.tensor(NAN), "off": None})
    assert names(report) == ["w", "7"]
    assert report.bad[0].first_bad == () and report.bad[0].shape == ()


def test_one_tensor_is_named_tensor() -> None:
    row = nanscan.scan(torch.tensor([[1.0, 2.0], [INF, 3.0]], dtype=torch.bfloat16)).bad[0]
    assert (row.name, row.first_bad, row.shape, row.dtype, row.device) == ("tensor", (1, 0), (2, 2), "bfloat16", "cpu")
    assert row.describe() == "'tensor' has 0 NaN, 1 Inf of 4 (first at [1, 0])"


def test_a_module_is_scanned_with_parameters_and_floating_buffers() -> None:
    net = model()
    net[1].running_var[1] = INF
    report = nanscan.scan(net)
    assert names(report) == ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]
    assert [(row.name, row.kind, row.first_bad) for row in report.bad] == [("1.running_var", "buffer", (1,))]


def test_a_module_with_integer_parameters_is_scanned_without_them() -> None:
    net = model()
    net.register_parameter("q", nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    assert "q" not in names(nanscan.scan(net))


def test_gradients_of_a_module_are_scanned_where_there_are_any() -> None:
    net = model()
    net(torch.randn(4, 3)).sum().backward()
    net[0].bias.grad = None
    net[1].weight.grad[0] = NAN
    report = nanscan.scan(net, grads=True)
    assert names(report) == ["0.weight", "1.weight", "1.bias"]
    assert report.bad[0].describe() == "grad of '1.weight' has 1 NaN, 0 Inf of 2 (first at [0])"


def test_gradients_of_a_list_and_of_a_dict_are_scanned_too() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    q.grad = torch.tensor([3.0, 4.0])
    assert names(nanscan.scan([p, q], grads=True)) == ["[1]"]
    assert nanscan.scan({"p": p, "q": q}, grads=True).norm == 5.0
    assert nanscan.scan(q, grads=True).norm == 5.0


def test_nothing_to_scan_is_finite() -> None:
    for report in (nanscan.scan([]), nanscan.scan({}), nanscan.scan([None]), nanscan.scan(model(), grads=True)):
        assert (report.finite, report.norm, report.tensors, report.bad) == (True, 0.0, (), ())


def test_a_tied_weight_is_one_row_with_both_names() -> None:
    emb, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = emb.weight
    net = nn.ModuleDict({"emb": emb, "head": head})
    with torch.no_grad():
        emb.weight.fill_(1.0)[2, 1] = NAN
    report = nanscan.scan(net)
    assert [(row.name, row.first_bad) for row in report.bad] == [("emb.weight (= head.weight)", (2, 1))]
    assert (len(report.tensors), report.numel) == (1, 12)
    t = torch.ones(2)
    assert names(nanscan.scan([t, torch.zeros(1), t])) == ["[0] (= [2])", "[1]"]


def test_a_state_dict_leaves_integers_and_extra_state_out() -> None:
    class Extra(nn.BatchNorm1d):
        def get_extra_state(self) -> Any:
            return {"version": 3}

    net = Extra(2)
    assert "num_batches_tracked" in net.state_dict() and "_extra_state" in net.state_dict()
    assert names(nanscan.scan(net.state_dict())) == ["weight", "bias", "running_mean", "running_var"]


def test_a_plain_dict_does_not_hide_an_integer_tensor() -> None:
    with pytest.raises(TypeError) as caught:
        nanscan.scan({"a": torch.ones(1), "steps": torch.tensor(3)})
    assert str(caught.value) == (
        "cannot scan 'steps' (position 1): it has dtype torch.int64: "
        "only floating-point and complex tensors can hold NaN or Inf"
    )


def test_a_sparse_row_is_placed_by_its_row_id() -> None:
    t = torch.sparse_coo_tensor([[7, 2, 7]], [[1.0, 2.0], [3.0, 4.0], [NAN, 0.0]], (9, 2), check_invariants=True)
    for given in (t, t.coalesce()):
        row = nanscan.scan({"emb": given}).bad[0]
        assert (row.first_bad, row.shape, row.nan_count) == ((7, 0), (9, 2), 1)
    emb = nn.Embedding(10, 2, sparse=True)
    emb(torch.tensor([4, 1, 4])).sum().backward()
    emb.weight.grad._values()[2, 1] = INF
    assert nanscan.scan(emb, grads=True).bad[0].first_bad == (4, 1)


def test_a_permuted_tensor_is_placed_in_its_own_shape() -> None:
    t = torch.ones(3, 4).t()
    t[3, 1] = NAN
    assert nanscan.scan([t]).bad[0].first_bad == (3, 1)


def lazily() -> Iterator[Tensor]:
    yield torch.ones(1)
    yield torch.ones(1, dtype=torch.int32)


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: [torch.ones(1), 2.5], TypeError,
     "cannot scan '[1]' (position 1): it is the number 2.5 (float), not a tensor: use torch.tensor"),
    (lambda: {"x": np.ones(2)}, TypeError, "cannot scan 'x' (position 0): it is a numpy.ndarray, not a tensor: "
     "use torch.from_numpy (or torch.as_tensor)"),
    (lambda: np.ones(2), TypeError, "cannot scan 'tensor' (position 0): it is a numpy.ndarray, not a tensor: "
     "use torch.from_numpy (or torch.as_tensor)"),
    (lambda: {"state": {0: torch.ones(2)}}, TypeError, "cannot scan 'state' (position 0): it is a dict, not a tensor: "
     "give the tensors in it in one flat list or dict"),
    (lambda: "weights.pt", TypeError, "cannot scan 'tensor' (position 0): it is a str, not a tensor"),
    (lambda: 3, TypeError,
     "cannot scan 'tensor' (position 0): it is the number 3 (int), not a tensor: use torch.tensor"),
    (lambda: None, TypeError, "nothing to scan: got None instead of tensors, a dict of them, or an nn.Module"),
    (lazily, TypeError, "cannot scan '[1]' (position 1): it has dtype torch.int32: "
     "only floating-point and complex tensors can hold NaN or Inf"),
    (lambda: [None, torch.ones(2, device="meta")], ValueError,
     "cannot scan '[1]' (position 1): it is a meta or fake tensor: it has a shape but no numbers to scan"),
    (lambda: nn.Linear(2, 2, device="meta"), ValueError,
     "cannot scan 'weight' (position 0): it is a meta or fake tensor: it has a shape but no numbers to scan"),
    (lambda: nn.LazyLinear(2), ValueError,
     "cannot scan 'weight' (position 0): it is not initialized yet: run one forward pass first"),
    (lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))]), TypeError,
     "cannot scan an optimizer (SGD): scan what it trains, nanscan.scan(model) or nanscan.scan(model, grads=True); "
     "its state is a dict of tensors for each parameter in optimizer.state"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "message"), REFUSED)
def test_refusals_name_position_name_reason_and_remedy(
    make: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        nanscan.scan(make())
    assert str(caught.value) == message


def test_an_integer_gradient_is_named_as_a_gradient() -> None:
    net = nn.Module()
    net.register_parameter("w", nn.Parameter(torch.ones(2)))
    q = torch.ones(2, dtype=torch.int32)
    q.grad = torch.ones(2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^cannot scan the gradient of 'q' \(position 1\): it has dtype torch\.int32"):
        nanscan.scan({"w": net.w, "q": q}, grads=True)


def test_a_report_outlives_its_tensors_and_pickles() -> None:
    t = torch.tensor([1.0, NAN])
    report = nanscan.scan({"w": t})
    t.fill_(0.0)
    del t
    copy = pickle.loads(pickle.dumps(report))
    assert [(r.name, r.nan_count, r.first_bad) for r in copy.bad] == [("w", 1, (1,))]
    assert math.isnan(report.norm) and report.tensors[0].inf_norm == 1.0


def test_scanning_under_autograd_inference_mode_and_no_grad_is_the_same() -> None:
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    with torch.inference_mode():
        assert nanscan.scan([w]).norm == 5.0
    with torch.no_grad():
        assert nanscan.scan([w * 1.0]).norm == 5.0
    assert nanscan.scan([w, w * 2.0]).norm == pytest.approx(math.sqrt(125), rel=1e-15)
    assert w.grad is None
