"""`paddle.amp.GradScaler` in front of a guarded optimizer, master weights, low precision. On the CPU."""

import math
import types

import numpy as np
import paddle
import pytest
from paddle.amp import grad_scaler

from nanscan import NonFiniteError, NonFiniteWarning
from nanscan.integrations.paddle import wrap

NAN, INF = math.nan, math.inf


@pytest.fixture
def scaler(monkeypatch):
    """A scaler that is switched on: Paddle's refuses to be, on a CPU, though all of its operators exist there."""
    place = types.SimpleNamespace(is_gpu_place=lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(grad_scaler, "_dygraph_tracer", lambda: types.SimpleNamespace(_expected_place=place))
        scaler = paddle.amp.GradScaler(init_loss_scaling=64.0, decr_every_n_nan_or_inf=100)
    monkeypatch.setattr(grad_scaler.amp_global_state(), "amp_dtype", "float16")
    assert scaler.is_enable()
    return scaler


def make_net():
    paddle.seed(3)
    return paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Tanh(), paddle.nn.Linear(8, 2))


def backward(net, scaler, factor=1.0):
    x = paddle.to_tensor(np.linspace(-1, 1, 32, dtype="float32").reshape(8, 4))
    loss = (net(x) ** 2).mean() * factor
    scaled = scaler.scale(loss)
    scaled.backward()
    return scaled


def plant(param, value):
    with paddle.no_grad():
        param._grad_ivar()[0] = value


def step_with_scaler(way, scaler, optimizer, scaled):
    if way == "minimize":
        scaler.minimize(optimizer, scaled)
        return
    if way == "unscale first":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("way", ["step", "unscale first", "minimize"])
def test_a_scaled_training_is_the_unscaled_one_and_a_bad_step_is_named(scaler, way):
    net, plain_net = make_net(), make_net()
    optimizer = wrap(paddle.optimizer.Adam(0.01, parameters=net.parameters()), net, clip_norm=0.05)
    clip = paddle.nn.ClipGradByGlobalNorm(0.05)
    plain = paddle.optimizer.Adam(0.01, parameters=plain_net.parameters(), grad_clip=clip)
    off = paddle.amp.GradScaler(enable=False)
    for step in range(4):
        scaled = backward(net, scaler)
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in net.parameters())) / 64
        if step == 2:
            plant(net[2].bias, INF)
            before = [p.numpy().tobytes() for p in net.parameters()]
            with pytest.warns(NonFiniteWarning, match=r"step 2 skipped: grad of '2.bias' has 1 NaN"):
                step_with_scaler(way, scaler, optimizer, scaled)
            assert [p.numpy().tobytes() for p in net.parameters()] == before
            assert optimizer.step_was_skipped and net[0].weight.grad is None
            assert (scaler._decr_count, scaler._incr_count) == (1, 0)  # the scaler knows it
            continue
        step_with_scaler(way, scaler, optimizer, scaled)
        optimizer.clear_grad()
        backward(plain_net, off)
        plain.step()
        plain.clear_grad()
        assert optimizer.last_report.norm == pytest.approx(norm, rel=1e-5)  # of the unscaled gradients
        assert scaler._decr_count == 0
    for a, b in zip(net.parameters(), plain_net.parameters(), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("choice", ["zero", "warn", "raise"])
def test_after_the_scaler_found_a_bad_gradient_the_others_are_gone_so_nothing_steps(scaler, choice):
    net = make_net()
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), net, on_nonfinite=choice)
    backward(net, scaler)
    plant(net[0].weight, NAN)
    before = [p.numpy().tobytes() for p in net.parameters()]
    with pytest.raises(NonFiniteError, match="0.weight") if choice == "raise" else pytest.warns(NonFiniteWarning):
        scaler.step(optimizer)
    assert [p.numpy().tobytes() for p in net.parameters()] == before
    assert optimizer.last_report.action == ("raise" if choice == "raise" else "skip")


def test_the_scalers_verdict_is_of_one_step_only(scaler):
    net = make_net()
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), net)
    backward(net, scaler)
    plant(net[0].weight, NAN)
    with pytest.warns(NonFiniteWarning):
        scaler.step(optimizer)
    backward(net, paddle.amp.GradScaler(enable=False))
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_two_guarded_optimizers_share_a_scaler_and_only_the_bad_one_skips(scaler):
    net = make_net()
    first, second = (
        wrap(paddle.optimizer.SGD(0.1, parameters=layer.parameters()), layer) for layer in (net[0], net[2])
    )
    backward(net, scaler)
    plant(net[0].weight, NAN)
    with pytest.warns(NonFiniteWarning):
        scaler.step(first)
    scaler.step(second)
    assert first.step_was_skipped and not second.step_was_skipped


def test_bfloat16_weights_with_master_weights_survive_a_bad_step():
    net = paddle.nn.Linear(4, 4)
    net.to(dtype="bfloat16")
    inner = paddle.optimizer.SGD(0.1, parameters=net.parameters(), multi_precision=True)
    optimizer = wrap(inner, net, clip_norm=1.0)
    for value in (3.0, NAN, 3.0):
        for param in net.parameters():
            param.grad = paddle.full(param.shape, 3.0, "bfloat16")
        net.bias.grad = paddle.full([4], value, "bfloat16")
        kept = {name: weight.numpy().copy() for name, weight in inner._master_weights.items()}
        if math.isnan(value):
            with pytest.warns(NonFiniteWarning, match="grad of 'bias' has 4 NaN"):
                optimizer.step()
            assert all(np.array_equal(weight.numpy(), kept[name]) for name, weight in inner._master_weights.items())
        else:
            optimizer.step()
            assert optimizer.last_report.clip_factor == pytest.approx(1 / math.sqrt(9 * 20), rel=1e-4)
    assert len(kept) == 2
    # On a CPU Paddle's SGD moves the weight and leaves its master where it is.
    np.testing.assert_allclose(net.bias.astype("float32").numpy(), -2 * 0.1 / math.sqrt(20), rtol=1e-2)


def test_decorate_takes_a_guarded_optimizer():
    net = make_net()
    inner = paddle.optimizer.AdamW(0.01, parameters=net.parameters())
    guarded = wrap(inner, net)
    _, same = paddle.amp.decorate(net, guarded, level="O2", dtype="bfloat16", master_weight=True)
    assert same is guarded


def test_main_gradients_in_float32_are_what_is_looked_at():
    weight = paddle.create_parameter([3], "float32")
    weight.grad = paddle.ones([3])
    weight.main_grad = paddle.to_tensor([1.0, NAN, 2.0])
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=[weight]))
    with pytest.warns(NonFiniteWarning, match=r"has 1 NaN, 0 Inf of 3 \(first at \[1\]\)"):
        optimizer.step()
    assert weight.main_grad is None and weight.grad is None
