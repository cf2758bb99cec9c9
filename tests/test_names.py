"""What tensors are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nanscan.names import Names, buffers_of, clean, label_of, names_of


def groups_of(*params):
    return [{"params": list(params)}]


@pytest.mark.parametrize(
    "name, cleaned",
    [
        ("_orig_mod.fc.weight", "fc.weight"),
        ("layer.0._orig_mod.fc.weight", "layer.0.fc.weight"),
        ("_fsdp_wrapped_module.a._checkpoint_wrapped_module.b", "a.b"),
        ("module.fc.weight", "module.fc.weight"),
    ],
)
def test_clean(name, cleaned):
    assert clean(name) == cleaned


def test_module_that_is_called_module_keeps_its_name():
    model = nn.ModuleDict({"module": nn.Linear(1, 1)})
    assert names_of(model)[id(model["module"].bias)] == ("module.bias",)


def test_compiled_model_inside_data_parallel():
    inner = nn.Sequential(nn.Linear(1, 1))
    model = nn.DataParallel(torch.compile(inner))
    assert names_of(model)[id(inner[0].weight)] == ("0.weight",)


def test_tied_parameter_has_all_its_names():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    assert names_of(model)[id(model["a"].weight)] == ("a.weight", "b.weight")


def test_group_names_count_within_their_group():
    a, b, c = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    labels = Names().labels(0, [{"params": [a, b]}, {"params": [c]}])
    assert [label.names for label in labels] == [("group0.param0",), ("group0.param1",), ("group1.param0",)]


def test_labels_are_built_once_for_the_same_parameters_and_anew_for_others():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
    names = Names()
    first = names.labels(0, groups_of(a))
    assert names.labels(0, groups_of(a)) is first
    assert names.labels(17, groups_of(a)) is first
    assert names.labels(17, []) is first, "the engine's word is taken"
    assert [label.shape for label in names.labels(18, groups_of(b))] == [(2,)]
    assert names.labels(0, groups_of(b, a)) is not first


def test_known_names_serve_where_there_is_no_model():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
    names = Names(None, [("fc.weight",)])
    assert [label.names for label in names.labels(0, groups_of(a, b))] == [("fc.weight",), ("group0.param1",)]
    assert names.known(groups_of(a, b)) == [("fc.weight",), ("group0.param1",)]


def test_label_says_shape_dtype_device_and_kind():
    label = label_of(torch.zeros(2, 3, dtype=torch.bfloat16), ("a",), "grad")
    assert label == (("a",), (2, 3), "bfloat16", "cpu", "grad")


def test_only_floating_buffers_are_looked_at():
    model = nn.Sequential(nn.BatchNorm1d(2))
    tensors, labels = buffers_of(model)
    assert [label.names[0] for label in labels] == ["0.running_mean", "0.running_var"]
    assert len(tensors) == 2
