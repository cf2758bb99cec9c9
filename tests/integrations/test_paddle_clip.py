"""Clipping of Paddle gradients: by the guard in place of Paddle, sparse and transposed ones, `clip_grad_norm_`."""

import math

import numpy as np
import paddle
import pytest

from nanscan import NonFiniteError, NonFiniteWarning
from nanscan.integrations.paddle import clip_grad_norm_, wrap
from tests.integrations.paddle_nets import INF, NAN, backward, make_net, plant


def clipped_pair(build, factor=1.0):
    """The weights after one step clipped by Paddle, and by the guard."""
    nets = [make_net(), make_net()]
    for net in nets:
        backward(net, 0, factor)
    build(nets[0])[0].step()
    build(nets[1])[1].step()
    return [[p.numpy() for p in net.parameters()] for net in nets]


@pytest.mark.parametrize("limit", [1e-3, 0.05, 100.0])
@pytest.mark.parametrize("grouped", [False, True])
def test_clip_by_global_norm_is_replaced_and_gives_the_same_step(limit, grouped):
    optimizers = {}

    def build(net):
        parameters = [{"params": net.parameters()}] if grouped else net.parameters()
        clip = paddle.nn.ClipGradByGlobalNorm(limit)
        plain = paddle.optimizer.SGD(1.0, parameters=parameters, grad_clip=clip)
        optimizers["guarded"] = wrap(plain, net)
        return plain, optimizers["guarded"]

    theirs, ours = clipped_pair(build)
    for a, b in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-8)
    guarded = optimizers["guarded"]
    assert (guarded.last_report.clip_factor < 1) == (limit < 1)
    holder = guarded._param_groups[0]["grad_clip"] if grouped else guarded._grad_clip
    assert isinstance(holder, paddle.nn.ClipGradByGlobalNorm)  # in its place again


def test_global_clipping_is_not_done_twice_and_the_smaller_limit_holds(monkeypatch):
    def refuse(self, params_grads):
        raise AssertionError("Paddle clipped as well")

    monkeypatch.setattr(paddle.nn.ClipGradByGlobalNorm, "__call__", refuse, raising=False)
    for own, given in ((0.02, 5.0), (5.0, 0.02)):
        net = make_net()
        clip = paddle.nn.ClipGradByGlobalNorm(own)
        optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters(), grad_clip=clip), clip_norm=given)
        backward(net, 0)
        optimizer.step()
        report = optimizer.last_report
        assert report.clip_factor == pytest.approx(0.02 / (report.norm + 1e-6), rel=1e-9)


def test_parameters_with_need_clip_false_are_looked_at_but_not_measured_or_scaled():
    def build(net):
        net[2].bias.need_clip = False
        clip = paddle.nn.ClipGradByGlobalNorm(0.05)
        plain = paddle.optimizer.SGD(1.0, parameters=net.parameters(), grad_clip=clip)
        return plain, wrap(plain, net)

    theirs, ours = clipped_pair(build)
    for a, b in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-8)
    net = make_net()
    _, optimizer = build(net)
    backward(net, 0)
    plant(net[2].bias)
    with pytest.warns(NonFiniteWarning, match="'2.bias'"):
        optimizer.step()


def test_other_clips_and_those_of_several_groups_stay_paddles():
    def build(net):
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "learning_rate": 0.5}]
        clip = paddle.nn.ClipGradByGlobalNorm(0.05)
        plain = paddle.optimizer.Momentum(1.0, parameters=groups, grad_clip=clip)
        return plain, wrap(plain, net)

    for a, b in zip(*clipped_pair(build), strict=True):
        assert np.array_equal(a, b)

    def by_value(net):
        plain = paddle.optimizer.SGD(1.0, parameters=net.parameters(), grad_clip=paddle.nn.ClipGradByValue(0.01))
        return plain, wrap(plain, net)

    for a, b in zip(*clipped_pair(by_value), strict=True):
        assert np.array_equal(a, b)


def test_clip_value_comes_first_then_clip_norm():
    weight = paddle.create_parameter([4], "float32")
    optimizer = wrap(paddle.optimizer.SGD(1.0, parameters=[weight]), clip_value=2.0, clip_norm=1.0)
    weight.grad = paddle.to_tensor([8.0, -8.0, 2.0, 0.0])
    start = weight.numpy()
    optimizer.step()
    np.testing.assert_allclose(start - weight.numpy(), np.array([2, -2, 2, 0]) / math.sqrt(12), rtol=1e-5, atol=1e-6)


def test_sparse_gradients_are_scanned_clipped_zeroed_and_cleared():
    embedding = paddle.nn.Embedding(10, 4, sparse=True)
    optimizer = wrap(paddle.optimizer.SGD(1.0, parameters=embedding.parameters()), embedding, clip_norm=1.0)
    start = embedding.weight.numpy()
    embedding(paddle.to_tensor([3, 3, 5])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
    assert optimizer.last_report.norm == pytest.approx(math.sqrt(4 * 4 + 4), rel=1e-6)
    np.testing.assert_allclose(
        (start - embedding.weight.numpy())[[3, 5], 0], np.array([2, 1]) / math.sqrt(20), rtol=1e-4
    )
    (embedding(paddle.to_tensor([3, 7])) * paddle.to_tensor([[1.0], [NAN]])).sum().backward()
    with pytest.warns(NonFiniteWarning, match=r"'weight' has 4 NaN, 0 Inf of 40 \(first at \[7, 0\]\)"):
        optimizer.step()
    assert embedding.weight._grad_ivar() is None
    wrap(optimizer, on_nonfinite="zero")
    (embedding(paddle.to_tensor([3, 7])) * paddle.to_tensor([[1.0], [NAN]])).sum().backward()
    before = embedding.weight.numpy()
    optimizer.step()  # of the same run of bad steps: said already
    assert optimizer.last_report.action == "zero"
    moved = before - embedding.weight.numpy()
    assert np.all(moved[7] == 0) and np.allclose(moved[3], 0.5, atol=1e-5)


def test_transposed_gradients_are_clipped_in_place():
    layer = paddle.nn.Linear(3, 4)
    (paddle.ones([1, 4]) @ layer.weight.t()).sum().backward()
    assert not layer.weight._grad_ivar().is_contiguous()
    optimizer = wrap(paddle.optimizer.SGD(1.0, parameters=[layer.weight]), clip_norm=1.0)
    start = layer.weight.numpy()
    optimizer.step()
    np.testing.assert_allclose(start - layer.weight.numpy(), np.full((3, 4), 1 / math.sqrt(12)), rtol=1e-4)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 0])
@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_clip_grad_norm_is_paddles_on_finite_gradients(norm_type, max_norm):
    ours, theirs = make_net(), make_net()
    backward(ours, 0)
    backward(theirs, 0)
    norm = clip_grad_norm_(ours.parameters(), max_norm, norm_type)
    expected = paddle.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    assert float(norm) == pytest.approx(float(expected), rel=1e-5) and norm.shape == [] and norm.dtype == expected.dtype
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-5)


def test_clip_grad_norm_leaves_bad_gradients_alone_and_survives_float16():
    net = make_net()
    backward(net, 0)
    plant(net[0].weight)
    before = [p.grad.numpy().tobytes() for p in net.parameters()]
    assert math.isnan(float(clip_grad_norm_(net.parameters(), 0.1)))
    with pytest.raises(NonFiniteError, match=r"parameters\[0\]' has 1 NaN"):
        clip_grad_norm_(net.parameters(), 0.1, error_if_nonfinite=True)
    assert [p.grad.numpy().tobytes() for p in net.parameters()] == before
    assert float(clip_grad_norm_([paddle.create_parameter([2], "float32")], 1.0)) == 0.0
    half = paddle.create_parameter([4], "float16")
    half.grad = paddle.full([4], 6e4, "float16")
    assert float(clip_grad_norm_(half, 1.0)) == pytest.approx(120000, rel=1e-3)  # Paddle's is inf
    np.testing.assert_allclose(half.grad.astype("float32").numpy(), 0.5, rtol=1e-3)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (None, "iterable of paddle.Tensor, got NoneType"),
        (paddle.nn.Linear(2, 2), r"got Linear: of a layer, give layer.parameters\(\)"),
        ([paddle.ones([2]), None], r"parameters\[1\] must be a paddle.Tensor, got NoneType"),
    ],
)
def test_clip_grad_norm_says_what_it_was_given_instead_of_parameters(parameters, words):
    with pytest.raises(TypeError, match=words):
        clip_grad_norm_(parameters, 1.0)
