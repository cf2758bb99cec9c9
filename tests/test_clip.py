"""`clip_grad_norm_` against torch's, and where torch's is wrong against the truth."""

from __future__ import annotations

import math

import pytest
import torch

import nanscan
from tests.guarded import INF, NAN, bits, make_params, set_grads

ORDERS = [2.0, 2, 1.0, 3.0, 0.5, INF, "inf", -1.0, -INF]


def weights(*grads):
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    return params


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("max_norm", [0.5, 1e6, INF])
def test_equals_torchs_norm_and_gradients(order, max_norm):
    mine, theirs = make_params(), make_params()
    set_grads(mine, 3)
    set_grads(theirs, 3)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type=order)
    norm = nanscan.clip_grad_norm_(mine, max_norm, norm_type=order)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close([p.grad for p in mine], [p.grad for p in theirs], rtol=1e-5, atol=1e-8)
    assert (norm.shape, norm.dtype, norm.device) == (expected.shape, expected.dtype, expected.device)


def test_order_zero_counts_the_gradients_that_are_not_zero_as_torch_does():
    values = [[1.0, 0.0, 2.0], [0.0, 0.0], [5.0], [1e-30, -2.0]]
    mine, theirs = ([*weights(*map(torch.tensor, values))] for _ in range(2))
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type=0)
    assert nanscan.clip_grad_norm_(mine, 0.5, norm_type=0).item() == expected.item() == 3.0
    torch.testing.assert_close([p.grad for p in mine], [p.grad for p in theirs], rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", [2.0, INF, 1.0])
@pytest.mark.parametrize("bad, expected", [(NAN, NAN), (INF, INF), (-INF, INF)])
def test_nonfinite_element_leaves_all_gradients_alone(order, bad, expected):
    params = make_params()
    set_grads(params, 0, bad=bad)
    before = bits([p.grad for p in params])
    norm = nanscan.clip_grad_norm_(params, 0.5, norm_type=order).item()
    assert math.isnan(norm) if math.isnan(expected) else norm == expected
    assert bits([p.grad for p in params]) == before


def test_error_if_nonfinite_names_the_tensor_and_carries_the_report():
    params = make_params()
    set_grads(params, 0, bad=NAN)
    before = bits([p.grad for p in params])
    with pytest.raises(nanscan.NonFiniteError) as error:
        nanscan.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert str(error.value) == (
        "the gradients can't be clipped: grad of 'parameters[1]' has 1 NaN, 0 Inf of 15 (first at [1, 0]). They are "
        "left as they are; with error_if_nonfinite=False the non-finite norm is returned instead."
    )
    assert [row.name for row in error.value.report.bad] == ["parameters[1]"]
    assert bits([p.grad for p in params]) == before
    set_grads(params, 0)
    nanscan.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, NAN])
def test_limits_that_make_no_sense_are_refused(value):
    (param,) = weights(torch.tensor([3.0, 4.0]))
    with pytest.raises(
        ValueError, match=rf"^max_norm must be a positive number, got {value}; for no clipping give None$"
    ):
        nanscan.clip_grad_norm_([param], value)
    assert param.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("value", [None, INF])
def test_no_limit_returns_the_norm_and_touches_nothing(value):
    (param,) = weights(torch.tensor([3.0, 4.0]))
    assert nanscan.clip_grad_norm_([param], value).item() == 5.0
    assert param.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("given", [lambda p: p, lambda p: (q for q in [p]), lambda p: (p,), lambda p: iter([p])])
def test_one_tensor_a_generator_a_tuple_an_iterator(given):
    (param,) = weights(torch.tensor([3.0, 4.0]))
    assert nanscan.clip_grad_norm_(given(param), 1.0).item() == 5.0
    assert param.grad.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(
    "params", [[], [torch.nn.Parameter(torch.zeros(2))], iter(())], ids=["none", "no grad", "iter"]
)
def test_nothing_to_clip_is_zero_as_in_torch(params):
    norm = nanscan.clip_grad_norm_(params, 1.0, norm_type=3)
    assert bits(norm) == bits(torch.tensor(0.0))


def test_a_generator_that_was_used_up_is_warned_about():
    model = torch.nn.Linear(2, 2)
    parameters = model.parameters()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    with pytest.warns(UserWarning, match="a generator with nothing .left. in it: no gradient is clipped"):
        nanscan.clip_grad_norm_(parameters, 1.0)


def test_float16_norm_beyond_its_range_is_right_and_float32():
    (param,) = weights(torch.full((2,), 60000.0, dtype=torch.float16))
    norm = nanscan.clip_grad_norm_([param], 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(60000 * 2**0.5)
    assert param.grad.tolist() == pytest.approx([0.7071, 0.7071], rel=2.0**-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factor_is_not_rounded_to_the_gradients_dtype(dtype):
    (param,) = weights(torch.full((3,), 60000.0, dtype=dtype))
    nanscan.clip_grad_norm_([param], 1e-3)
    assert param.grad.tolist() == pytest.approx(
        [1e-3 / 3**0.5] * 3, rel=2.0**-8 if dtype is torch.bfloat16 else 2.0**-10
    )


def test_float64_keeps_its_precision():
    params = weights(torch.tensor([1e-3], dtype=torch.float32), torch.tensor([1.0 + 1e-12], dtype=torch.float64))
    norm = nanscan.clip_grad_norm_(params, None, norm_type=INF)
    assert (norm.dtype, norm.item()) == (torch.float64, 1.0 + 1e-12)


@pytest.mark.parametrize("order", [2.0, INF, 1.0])
def test_complex_gradients_have_the_norm_of_their_magnitudes(order):
    (param,) = weights(torch.tensor([3.0 + 4.0j, 1.0j]))
    expected = torch.linalg.vector_norm(param.grad, order).item()
    assert nanscan.clip_grad_norm_([param], 1.0, norm_type=order).item() == pytest.approx(expected)
    assert torch.linalg.vector_norm(param.grad, order).item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("order", [2.0, 1.0, INF])
def test_tied_parameter_counts_and_scales_once(order):
    (param,) = weights(torch.tensor([3.0, 4.0]))
    expected = torch.linalg.vector_norm(param.grad, order).item()
    assert nanscan.clip_grad_norm_([param, param], 1.0, norm_type=order).item() == pytest.approx(expected)
    assert torch.linalg.vector_norm(param.grad, order).item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("order", [2.0, 1.0, INF])
def test_sparse_gradient_is_its_coalesced_values(order):
    grad = torch.sparse_coo_tensor([[3, 3, 1]], [[1.0], [1.0], [1.5]], (5, 1), check_invariants=True)
    (param,) = weights(grad)
    expected = torch.linalg.vector_norm(torch.tensor([2.0, 1.5]), order).item()
    assert nanscan.clip_grad_norm_([param], 1.0, norm_type=order).item() == pytest.approx(expected)
    assert param.grad.is_sparse
    assert torch.linalg.vector_norm(param.grad.coalesce().values(), order).item() == pytest.approx(1.0, rel=1e-5)


def test_foreach_is_accepted():
    for foreach in (None, True, False):
        (param,) = weights(torch.tensor([3.0, 4.0]))
        assert nanscan.clip_grad_norm_([param], 1.0, foreach=foreach).item() == 5.0


def test_graph_of_gradients_survives():
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    (weight**3).sum().backward(create_graph=True)
    nanscan.clip_grad_norm_([weight], 1.0)
    assert weight.grad.item() == pytest.approx(1.0, rel=1e-5)


def test_unreadable_gradient_is_named():
    (param,) = weights(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match=r"^grad of parameters\[0\] is a meta or fake tensor"):
        nanscan.clip_grad_norm_([param], 1.0)


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0])
def test_finite_float64_gradients_whose_norm_is_beyond_float64_are_clipped_and_not_zeroed(order):
    (weight,) = weights(torch.full((4,), 1.5e308, dtype=torch.float64))
    assert nanscan.clip_grad_norm_([weight], 1.0, norm_type=order).item() == INF
    assert torch.linalg.vector_norm(weight.grad, order).item() == pytest.approx(1.0)


@pytest.mark.parametrize("value", [3e38, 1e-30])
def test_norm_of_a_high_order_neither_overflows_nor_vanishes(value):
    """The tenth power of a float32 is beyond float64: the norm was inf, and clipping made all gradients 0."""
    (weight,) = weights(torch.full((4,), value))
    norm = nanscan.clip_grad_norm_([weight], value, norm_type=20.0)
    assert norm.item() == pytest.approx(value * 4 ** (1 / 20), rel=1e-5)
    if value > 1:
        assert weight.grad.tolist() == pytest.approx([value / 4 ** (1 / 20)] * 4, rel=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            lambda model: model.named_parameters(),
            r"parameters\[0\] is no tensor but a tuple: give model.parameters\(\)",
        ),
        (lambda model: model.state_dict(), r"parameters\[0\] is no tensor but a str"),
        (lambda model: [{"params": [model.weight]}], r"parameters\[0\] is no tensor but a dict"),
        (lambda model: [model.weight, None], r"parameters\[1\] is no tensor but a NoneType"),
        (lambda model: model, r"got the module Linear: give .parameters\(\)"),
    ],
)
def test_what_is_no_parameter_is_said(given, words):
    with pytest.raises(TypeError, match=words):
        nanscan.clip_grad_norm_(given(torch.nn.Linear(2, 1)), 1.0)
