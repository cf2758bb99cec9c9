"""Guarded Paddle training loops: what a step does, what a skipped one leaves, names, clipping, parity with Paddle."""

import json
import math
import warnings

import numpy as np
import paddle
import pytest

import nanscan
from nanscan import NonFiniteError, NonFiniteWarning, TrainingDiverged
from nanscan.integrations.paddle import GuardedOptimizer, clip_grad_norm_, wrap

NAN, INF = math.nan, math.inf
OPTIMIZERS = ["SGD", "Momentum", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSProp", "Lamb", "NAdam", "RAdam"]


def make_optimizer(name, parameters, **options):
    options = {**({"learning_rate": 0.05} if name != "Adadelta" else {}), **options}
    return getattr(paddle.optimizer, name)(parameters=parameters, **options)


def make_net():
    paddle.seed(1)
    return paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Tanh(), paddle.nn.Linear(8, 2))


def batch(step):
    generator = np.random.default_rng(step)
    return paddle.to_tensor(generator.normal(size=(16, 4)).astype("float32"))


def backward(net, step, factor=1.0):
    loss = (net(batch(step)) ** 2).mean() * factor
    loss.backward()
    return loss


def plant(param, value=NAN, index=0):
    with paddle.no_grad():
        paddle.assign(
            paddle.where(paddle.arange(param.size) == index, value, param._grad_ivar().flatten()).reshape(param.shape),
            param._grad_ivar(),
        )


def state_of(net, optimizer):
    """Bytes of every parameter and everything that the optimizer keeps."""
    found = {name: value.numpy().tobytes() for name, value in net.state_dict().items()}
    for name, value in optimizer.state_dict().items():
        found[name] = value.numpy().tobytes() if isinstance(value, paddle.Tensor) else repr(value)
    return found


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


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
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
