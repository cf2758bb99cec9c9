"""Guarded Paddle training loops: what a step does, what a skipped one leaves, names, clipping, parity with Paddle."""

import contextlib
import json
import math
import warnings

import numpy as np
import paddle
import pytest
import torch

import nanscan
from nanscan import NonFiniteError, NonFiniteWarning, TrainingDiverged
from nanscan.integrations.paddle import GuardedOptimizer, wrap
from tests.integrations.paddle_nets import INF, NAN, backward, batch, make_net, make_optimizer, plant, state_of

OPTIMIZERS = ["SGD", "Momentum", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSProp", "Lamb", "NAdam", "RAdam"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_healthy_training_is_bit_identical_and_a_skipped_step_leaves_everything(name):
    plain_net, net = make_net(), make_net()
    plain = make_optimizer(name, plain_net.parameters())
    guarded = wrap(make_optimizer(name, net.parameters()), net, log=lambda report: None)
    for step in range(4):
        for model, optimizer in ((plain_net, plain), (net, guarded)):
            backward(model, step)
            optimizer.step()
            optimizer.clear_grad()
        if step == 1:
            backward(net, 77)
            plant(net[2].weight, INF, 3)
            before = state_of(net, guarded)
            with pytest.warns(NonFiniteWarning, match=r"step 2 skipped: grad of '2.weight' has 0 NaN, 1 Inf of 16"):
                guarded.step()
            assert state_of(net, guarded) == before
            assert all(p.grad is None for p in net.parameters()) and guarded.step_was_skipped
    ours, theirs = ([p.numpy() for p in model.parameters()] for model in (net, plain_net))
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    kept = [[v.numpy() for v in o.state_dict().values() if isinstance(v, paddle.Tensor)] for o in (guarded, plain)]
    assert all(np.array_equal(a, b) for a, b in zip(*kept, strict=True))
    assert (guarded.skipped_steps, guarded.consecutive_skips, guarded.first_skipped_step) == (1, 0, 2)
    assert guarded.health().endswith("1 skipped so far  last bad: step 2 2.weight")
    assert [report.action for report in guarded.history] == ["step", "step", "skip", "step", "step"]


def test_the_decision_is_that_of_the_loop_over_isnan_and_the_norm_that_of_numpy():
    net = make_net()
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), net, max_consecutive_skips=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)
        for step in range(12):
            backward(net, step)
            if step % 4 == 3:
                plant(net[0].weight, (NAN, INF, -INF)[step // 4], step)
            bad = any(bool((paddle.isnan(p.grad) | paddle.isinf(p.grad)).any()) for p in net.parameters())
            norm = math.sqrt(sum(float((p.grad.numpy().astype("float64") ** 2).sum()) for p in net.parameters()))
            optimizer.step()
            optimizer.clear_grad()
            assert optimizer.step_was_skipped == bad == (step % 4 == 3)
            if not bad:
                assert optimizer.last_report.norm == pytest.approx(norm, rel=1e-7)
            else:
                assert optimizer.last_report.bad[0].first_bad == np.unravel_index(step, (4, 8))


def test_raise_leaves_the_gradients_and_says_who():
    net = make_net()
    optimizer = wrap(paddle.optimizer.Adam(parameters=net.parameters()), net, on_nonfinite="raise")
    backward(net, 0)
    plant(net[0].bias, NAN, 5)
    before = state_of(net, optimizer)
    with pytest.raises(NonFiniteError, match=r"grad of '0.bias' has 1 NaN, 0 Inf of 8 \(first at \[5\]\)") as caught:
        optimizer.step()
    assert caught.value.report.action == "raise" and state_of(net, optimizer) == before
    assert np.isnan(net[0].bias.grad.numpy()).sum() == 1 and net[2].weight.grad is not None


@pytest.mark.parametrize("value", [NAN, INF])
def test_zero_changes_only_the_bad_elements_and_steps(value):
    net, other = make_net(), make_net()
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), net, on_nonfinite="zero")
    plain = paddle.optimizer.SGD(0.1, parameters=other.parameters())
    backward(net, 0)
    backward(other, 0)
    plant(net[2].weight, value, 1)
    plant(other[2].weight, 0.0, 1)
    with pytest.warns(NonFiniteWarning, match="taken with the bad elements set to 0"):
        optimizer.step()
    plain.step()
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert not optimizer.step_was_skipped and optimizer.last_report.action == "zero"


def test_a_function_decides_and_warn_steps_anyway():
    net = make_net()
    seen = []
    optimizer = wrap(
        paddle.optimizer.SGD(0.1, parameters=net.parameters()), net, on_nonfinite=lambda r: seen.append(r) or "warn"
    )
    backward(net, 0)
    plant(net[0].weight)
    with pytest.warns(NonFiniteWarning, match="taken although grad of '0.weight'"):
        optimizer.step()
    assert np.isnan(net[0].weight.numpy()).sum() == 1 and seen[0].nan_count == 1


def test_a_run_that_does_not_recover_is_given_up():
    net = make_net()
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), net, max_consecutive_skips=3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            backward(net, 0, NAN)
            optimizer.step()
        backward(net, 0, NAN)
        with pytest.raises(TrainingDiverged, match="3 skipped steps in a row"):
            optimizer.step()
    assert optimizer.consecutive_skips == 3
    assert [w.filename for w in said if w.category is NonFiniteWarning] == [__file__]  # once for each run of skips


def test_a_nan_loss_with_healthy_gradients_is_a_bad_step():
    net = make_net()
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), net)
    backward(net, 0)
    optimizer.observe(paddle.to_tensor(NAN))
    with pytest.warns(NonFiniteWarning, match="loss has 1 NaN"):
        optimizer.step()
    backward(net, 0)
    optimizer.step()
    assert not optimizer.step_was_skipped
    with pytest.raises(TypeError, match=r"paddle.Tensor or a number, got str"):
        optimizer.observe("0.3")


def test_buffers_that_the_forward_pass_spoiled_are_named():
    net = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.BatchNorm1D(4))
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), net)
    net(batch(0) * NAN).sum().backward()
    with pytest.warns(NonFiniteWarning, match="spoiled what a skip can't restore: buffer '1._mean' has 4 NaN"):
        optimizer.step()
    assert [row.name for row in optimizer.last_report.buffers] == ["1._mean", "1._variance"]


def test_weights_that_a_finite_step_spoiled_are_named_with_their_accumulators():
    weight = paddle.create_parameter([2], "float32", name="w_checked")
    optimizer = wrap(paddle.optimizer.Momentum(3e38, parameters=[weight]), check_params_every=2)
    with pytest.warns(NonFiniteWarning, match="after step 1, finite gradients, non-finite update: .*w_checked"):
        for _ in range(2):
            (weight * paddle.to_tensor([1.0, 3.0])).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
    assert optimizer.bad_parameter_steps == 1 and optimizer.last_report.parameters[0].kind == "parameter"


def test_a_tied_parameter_has_all_its_names_and_is_scaled_once():
    class Tied(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.emb = paddle.nn.Embedding(6, 3)
            self.head = paddle.nn.Linear(3, 6)
            self.out = self.head
            self.first = self.emb.weight

        def forward(self, ids):
            return self.head(self.emb(ids))

    net = Tied()
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), net)
    net(paddle.to_tensor([1, 2])).sum().backward()
    plant(net.emb.weight)
    plant(net.head.bias)
    with pytest.warns(NonFiniteWarning):
        optimizer.step()
    assert {row.name for row in optimizer.last_report.bad} == {
        "first (= emb.weight)", "head.bias (= out.bias)",
    }  # fmt: skip


def test_accumulation_keeps_no_nan_after_a_skip():
    net = make_net()
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), net)
    for factor in (1.0, NAN, 1.0):
        backward(net, 0, factor)
    with pytest.warns(NonFiniteWarning):
        optimizer.step()
    backward(net, 1)
    backward(net, 2)  # nobody called clear_grad
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_frozen_parameters_are_left_out_as_paddle_leaves_them_out():
    net = make_net()
    backward(net, 0)
    plant(net[0].weight)
    net[0].weight.stop_gradient = True
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), net)
    optimizer.step()
    assert not optimizer.step_was_skipped and len(optimizer.last_report.tensors) == 3


def test_it_is_the_inner_optimizer_in_every_other_respect(tmp_path):
    net = make_net()
    scheduler = paddle.optimizer.lr.StepDecay(0.1, step_size=1, gamma=0.5)
    inner = paddle.optimizer.Adam(scheduler, parameters=net.parameters())
    optimizer = wrap(inner, net)
    assert isinstance(optimizer, paddle.optimizer.Optimizer) and isinstance(optimizer, GuardedOptimizer)
    backward(net, 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.get_lr() == inner.get_lr() == 0.05
    assert optimizer._parameter_list is inner._parameter_list and optimizer._accumulators is inner._accumulators
    paddle.save(optimizer.state_dict(), str(tmp_path / "o.pdopt"))
    other = paddle.optimizer.Adam(
        paddle.optimizer.lr.StepDecay(0.1, step_size=1, gamma=0.5), parameters=net.parameters()
    )
    wrap(other).set_state_dict(paddle.load(str(tmp_path / "o.pdopt")))
    assert other.get_lr() == 0.05 and other.state_dict().keys() <= optimizer.state_dict().keys()
    optimizer.set_lr_scheduler(paddle.optimizer.lr.StepDecay(0.3, step_size=1))
    assert inner.get_lr() == 0.3
    optimizer._multi_precision = True  # what paddle.amp.decorate does
    assert inner._multi_precision is True
    optimizer.clear_grad()
    assert float(net[0].weight.grad.abs().sum()) == 0.0  # kept and set to zero, as Paddle's default is


def test_minimize_is_a_guarded_step_whose_loss_is_looked_at():
    net, other = make_net(), make_net()
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), net)
    plain = paddle.optimizer.SGD(0.1, parameters=other.parameters())
    ops, pairs = optimizer.minimize(backward(net, 0))
    plain.minimize(backward(other, 0))
    assert len(pairs) == 4
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    optimizer.clear_grad()
    backward(net, 1)
    with pytest.warns(NonFiniteWarning, match="loss has 1 NaN"):
        assert optimizer.minimize(paddle.to_tensor(NAN)) == (None, None)


def test_a_second_wrap_changes_options_and_a_log_gets_every_step(tmp_path):
    net = make_net()
    optimizer = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), log=tmp_path / "run.jsonl")
    assert wrap(optimizer, net, clip_norm=0.01, history=2) is optimizer
    for step in range(3):
        backward(net, step)
        optimizer.step()
        optimizer.clear_grad()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2] and all(line["clip_factor"] < 1 for line in lines)
    assert [report.step for report in optimizer.history] == [1, 2]
    assert optimizer.history[0].tensors[0].name == "0.weight"


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((3,), TypeError, "must be a paddle.optimizer.Optimizer, got int"),
        ((torch.optim.SGD([torch.zeros(1)]),), TypeError, "got SGD of PyTorch: nanscan.wrap guards it"),
        ((None, 3), TypeError, "layer must be a paddle.nn.Layer"),
        ((None, None, {"clip_norm": 0}), ValueError, "clip_norm must be a positive number"),
        ((None, None, {"on_nonfinite": "stop"}), ValueError, "'skip', 'raise', 'zero', 'warn'"),
        ((None, None, {"clip_norm": nanscan.AdaptiveClip()}), TypeError, "must be a number with Paddle"),
    ],
)
def test_wrong_arguments_are_refused_at_wrap(arguments, kind, words):
    optimizer, layer, options = (*arguments, *(None, None, {})[len(arguments) :])
    optimizer = optimizer or paddle.optimizer.SGD(0.1, parameters=make_net().parameters())
    with pytest.raises(kind, match=words):
        wrap(optimizer, layer, **options)
    if options:
        with pytest.raises(kind, match=words):
            wrap(wrap(optimizer), layer, **options)


@pytest.mark.parametrize("optimizer", ["Momentum", "AdamW"])
def test_gradients_that_are_handed_over_are_guarded_too(optimizer):
    net = make_net()
    guarded = wrap(make_optimizer(optimizer, net.parameters()), net, clip_norm=1e-3)
    pairs = guarded.backward(backward(net, 0))
    pairs[0] = (pairs[0][0], paddle.full_like(pairs[0][1], NAN))
    before = state_of(net, guarded)
    with pytest.warns(NonFiniteWarning, match="step 0 skipped: grad of '0.weight' has 32 NaN"):
        assert guarded.apply_gradients(pairs) is None
    assert state_of(net, guarded) == before and all(p.grad is None for p in net.parameters())
    guarded.apply_gradients([*guarded.backward(backward(net, 1)), (net[0].weight, None)])
    assert guarded.last_report.action == "step" and guarded.last_report.clip_factor < 1
    assert len(guarded.last_report.tensors) == 4 and state_of(net, guarded) != before


def test_log_says_the_options_the_engine_and_the_loss(tmp_path):
    net = paddle.nn.Linear(2, 1)
    inner = paddle.optimizer.SGD(0.25, parameters=net.parameters())
    optimizer = wrap(inner, net, clip_norm=2.0, log=tmp_path / "run.jsonl")
    losses = []
    for value in (1.0, NAN):
        loss = (net(paddle.ones([4, 2])) * value).mean()
        loss.backward()
        losses.append(float(loss))
        optimizer.observe(loss)
        with pytest.warns(NonFiniteWarning) if value != value else contextlib.nullcontext():
            optimizer.step()
        optimizer.clear_grad()
    first, second = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert first["loss"] == pytest.approx(losses[0]) and second["loss"] == "NaN"
    settings = first["run"]["settings"]
    assert settings["optimizer"] == "SGD" and settings["groups"][0]["lr"] == 0.25
    assert settings["guard"]["clip_norm"] == 2.0 and first["run"]["engine"]["engine"] in ("native", "eager")


@pytest.mark.parametrize("loss", [NAN, np.float32("nan"), np.float64("nan")])
def test_numbers_of_numpy_are_losses(loss):
    net = make_net()
    guarded = wrap(paddle.optimizer.SGD(0.1, parameters=net.parameters()), net)
    backward(net, 0)
    guarded.observe(loss)
    with pytest.warns(NonFiniteWarning, match="loss"):
        guarded.step()
    assert guarded.last_report.bad[0].name == "loss"


def test_a_static_graph_is_refused():
    inner = paddle.optimizer.SGD(0.1, parameters=make_net().parameters())
    paddle.enable_static()
    try:
        with pytest.raises(NotImplementedError, match=r"only dygraph.*paddle.disable_static\(\)"):
            wrap(inner)
    finally:
        paddle.disable_static()


def test_paddles_own_training_loop_takes_a_guarded_optimizer():
    rows = [(batch(i).numpy()[0], np.int64(i % 2)) for i in range(16)]
    rows[5] = (np.full(4, NAN, "float32"), np.int64(1))
    net = make_net()
    model = paddle.Model(net)
    schedule = paddle.optimizer.lr.StepDecay(0.1, step_size=4)
    guarded = wrap(paddle.optimizer.Adam(schedule, parameters=net.parameters()), net, clip_norm=1.0)
    model.prepare(guarded, paddle.nn.CrossEntropyLoss())
    with pytest.warns(NonFiniteWarning, match="step 1 skipped: .*grad of '0.weight'"):
        model.fit(paddle.io.DataLoader(rows, batch_size=4), epochs=1, verbose=0)
    assert [report.action for report in guarded.history] == ["step", "skip", "step", "step"]
    assert guarded.get_lr() == pytest.approx(0.01) and all(bool(paddle.isfinite(p).all()) for p in net.parameters())
