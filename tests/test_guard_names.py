"""Who is named in a report: model, groups, positions; tied, wrapped and sparse parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nanscan
from tests.guarded import INF, NAN, one, step

pytestmark = pytest.mark.usefixtures("either_way_of_clipping")

quiet = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")


@quiet
def test_tied_parameter_is_counted_scaled_and_named_once():
    model = nn.ModuleDict({"emb": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["emb"].weight
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model, clip_norm=1.0)
    weight = model["emb"].weight
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    assert optimizer.last_report.norm == pytest.approx(12**0.5)
    assert weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    weight.grad = torch.full((4, 3), NAN)
    optimizer.step()
    assert [row.name for row in optimizer.last_report.bad] == ["emb.weight (= head.weight)"]
    assert optimizer.last_report.nan_count == 12


@quiet
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_parameter_listed_twice_counts_once_under_both_names():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = nanscan.wrap(torch.optim.SGD([weight, weight], lr=1.0))
    weight.grad = torch.tensor([NAN, 1.0])
    optimizer.step()
    assert [row.name for row in optimizer.last_report.bad] == ["group0.param0 (= group0.param1)"]
    assert optimizer.last_report.nan_count == 1


@quiet
def test_names_come_from_the_optimizers_named_groups():
    model = nn.Linear(2, 1)
    optimizer = nanscan.wrap(torch.optim.SGD(model.named_parameters(), lr=1.0))
    model.bias.grad = torch.tensor([NAN])
    optimizer.step()
    assert [row.name for row in optimizer.last_report.bad] == ["bias"]


@quiet
@pytest.mark.parametrize("wrapper", [nn.DataParallel, torch.compile])
def test_prefixes_of_wrappers_are_not_part_of_a_name(wrapper):
    model = nn.Sequential(nn.Linear(2, 1))
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=1.0), wrapper(model))
    model[0].bias.grad = torch.tensor([NAN])
    optimizer.step()
    assert [row.name for row in optimizer.last_report.bad] == ["0.bias"]


@quiet
def test_parameter_that_is_not_in_the_model_has_its_position():
    model, extra = nn.Linear(2, 1), nn.Parameter(torch.zeros(1))
    optimizer = nanscan.wrap(torch.optim.SGD([*model.parameters(), extra], lr=1.0), model)
    step(optimizer, extra, [NAN])
    assert [row.name for row in optimizer.last_report.bad] == ["group0.param2"]


@quiet
def test_sparse_gradient_is_reported_by_its_row_id():
    model = nn.ModuleDict({"emb": nn.Embedding(10, 3, sparse=True)})
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model)
    out = model["emb"](torch.tensor([7, 2, 7]))
    (out * torch.tensor([[1.0, 1.0, 1.0], [1.0, NAN, 1.0], [1.0, 1.0, 1.0]])).sum().backward()
    optimizer.step()
    row = optimizer.last_report.bad[0]
    assert (row.name, row.shape, row.first_bad, row.nan_count) == ("emb.weight", (10, 3), (2, 1), 1)


@quiet
def test_first_bad_is_the_logical_index_in_a_channels_last_gradient():
    weight, optimizer = one(torch.zeros(2, 3, 4, 4).tolist())
    grad = torch.zeros(2, 3, 4, 4)
    grad[1, 2, 3, 0] = INF
    weight.grad = grad.to(memory_format=torch.channels_last)
    optimizer.step()
    assert optimizer.last_report.bad[0].first_bad == (1, 2, 3, 0)


def test_parameters_that_have_no_shape_yet_are_named_with_the_one_they_get():
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, on_nonfinite="raise")
    model(torch.full((1, 3), NAN)).sum().backward()
    with pytest.raises(nanscan.NonFiniteError, match=r"grad of '0.weight' has 6 NaN, 0 Inf of 6 \(first at \[0, 0\]\)"):
        optimizer.step()
    assert optimizer.last_report.bad[0].shape == (2, 3)


@quiet
def test_model_that_is_converted_after_wrap_is_described_as_it_is_then():
    """`model.to(dtype)` gives the same parameters another dtype: reports said that of the time of `wrap`."""
    model = nn.Linear(2, 1)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model.to(torch.bfloat16)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert {row.dtype for row in optimizer.last_report.tensors} == {"bfloat16"}
    model.double()
    optimizer.zero_grad()
    model(torch.full((1, 2), NAN, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert optimizer.last_report.bad[0].dtype == "float64"


@quiet
def test_parameter_that_has_grown_is_described_in_its_new_shape():
    model = nn.ModuleDict({"emb": nn.Embedding(2, 2)})
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    step(optimizer, model["emb"].weight, [[1.0, 1.0], [1.0, 1.0]])
    model["emb"].weight.data = torch.zeros(3, 3)
    grad = torch.zeros(3, 3)
    grad[2, 1] = NAN
    model["emb"].weight.grad = grad
    optimizer.step()
    row = optimizer.last_report.bad[0]
    assert (row.shape, row.first_bad) == ((3, 3), (2, 1))
