"""One step: what is decided, what is touched, what is said."""

from __future__ import annotations

import math
import threading
import warnings

import pytest
import torch
from torch import nn

import nanscan
from nanscan.errors import NonFiniteWarning
from tests.guarded import INF, NAN, bits, make_params, set_grads, whole_state

pytestmark = pytest.mark.usefixtures("either_way_of_clipping")

quiet = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")


def one(value=1.0, make=torch.optim.SGD, lr=1.0, model=None, inner=None, **options):
    """A parameter and a guarded optimizer over it."""
    weight = nn.Parameter(torch.tensor(value))
    return weight, nanscan.wrap(make([weight], lr=lr, **(inner or {})), model, **options)


def step(optimizer, weight, grad):
    weight.grad = torch.tensor(grad)
    return optimizer.step()


# ---- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_clip_value_comes_first_then_clip_norm_of_what_is_left(fused):
    weight, optimizer = one([0.0, 0.0], inner={"fused": fused}, clip_value=3.0, clip_norm=2.5)
    step(optimizer, weight, [3.0, 40.0])
    factor = 2.5 / (math.hypot(3.0, 3.0) + 1e-6)
    assert weight.tolist() == pytest.approx([-3.0 * factor, -3.0 * factor])
    report = optimizer.last_report
    assert report.clip_factor == pytest.approx(factor)
    assert report.norm == pytest.approx(math.hypot(3.0, 40.0)), "norms are of the gradients before clipping"
    assert report.inf_norm == 40.0


def test_clip_value_alone_clamps_both_signs():
    weight, optimizer = one([0.0, 0.0, 0.0], clip_value=3.0)
    step(optimizer, weight, [3.5, -40.0, 1.0])
    assert weight.tolist() == [-3.0, 3.0, -1.0]
    assert optimizer.last_report.clip_factor == 1.0


def test_gradients_within_the_limits_are_not_touched():
    weight, optimizer = one([0.0, 0.0], clip_value=4.0, clip_norm=5.1)
    step(optimizer, weight, [3.0, 4.0])
    assert weight.grad.tolist() == [3.0, 4.0]
    assert optimizer.last_report.clip_factor == 1.0


@pytest.mark.parametrize("name", ["clip_norm", "clip_value"])
@pytest.mark.parametrize("value", [0, 0.0, -1.0, NAN, -INF])
def test_limits_that_make_no_sense_are_refused(name, value):
    with pytest.raises(
        ValueError, match=rf"^{name} must be a positive number, got {value}; for no clipping give None$"
    ):
        one(**{name: value})


@pytest.mark.parametrize("value", [None, INF])
def test_no_limit_reports_the_norm_and_clips_nothing(value):
    weight, optimizer = one([0.0, 0.0], clip_norm=value, clip_value=value)
    step(optimizer, weight, [3e8, 4e8])
    assert weight.tolist() == [-3e8, -4e8]
    assert optimizer.last_report.norm == pytest.approx(5e8)


@quiet
def test_zero_clips_by_the_norm_of_the_finite_elements():
    weight, optimizer = one([0.0, 0.0, 0.0], clip_norm=1.0, on_nonfinite="zero")
    step(optimizer, weight, [3.0, NAN, 4.0])
    assert weight.tolist() == pytest.approx([-0.6, 0.0, -0.8])
    assert optimizer.last_report.finite_norm == 5.0


@pytest.mark.parametrize("fused", [True, False])
def test_norm_that_is_huge_against_the_limit_is_clipped_and_not_lost(fused):
    weight, optimizer = one([0.0, 0.0], inner={"fused": fused}, clip_norm=1e-3)
    step(optimizer, weight, [3e38, 0.0])
    assert weight.tolist() == pytest.approx([-1e-3, 0.0], rel=1e-5)


@pytest.mark.parametrize("make", [torch.optim.SGD, lambda ps, lr: torch.optim.SGD(ps, lr=lr, fused=True)])
def test_hooks_see_the_clipped_gradients(make):
    weight, optimizer = one([0.0, 0.0], make=make, clip_norm=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(weight.grad.tolist()))
    step(optimizer, weight, [3.0, 4.0])
    assert seen == pytest.approx([0.6, 0.8])


def test_fused_optimizer_with_the_same_gradient_in_two_parameters_clips_it_once():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = nanscan.wrap(torch.optim.SGD([a, b], lr=1.0, fused=True), clip_norm=1.0)
    a.grad = b.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert a.tolist() == pytest.approx([-0.6, -0.8])
    assert b.tolist() == pytest.approx([-0.6, -0.8])


# ---- what to do about a NaN ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["stop", "SKIP", None, 3])
def test_unknown_action_is_refused_with_the_valid_ones(value):
    expected = f"on_nonfinite must be 'skip', 'raise', 'zero', 'warn' or a function of the report, got {value!r}"
    with pytest.raises(ValueError) as error:
        one(on_nonfinite=value)
    assert str(error.value) == expected


@quiet
@pytest.mark.parametrize("action", ["skip", "raise", "zero", "warn"])
def test_function_decides_with_the_report_in_hand(action):
    reports = []

    def decide(report):
        reports.append((report, report.bad[0].name, report.step))
        return action

    weight, optimizer = one([1.0, 1.0], on_nonfinite=decide)
    step(optimizer, weight, [1.0, 1.0])
    assert reports == [], "a healthy step asks nobody"
    if action == "raise":
        with pytest.raises(nanscan.NonFiniteError):
            step(optimizer, weight, [NAN, 1.0])
    else:
        step(optimizer, weight, [NAN, 1.0])
    assert [(name, at) for _, name, at in reports] == [("group0.param0", 1)]
    assert reports[0][0] is optimizer.last_report
    assert optimizer.last_report.action == action
    assert optimizer.step_was_skipped == (action in ("skip", "raise"))


def test_function_that_returns_nonsense_is_an_error_and_nothing_is_touched():
    weight, optimizer = one([1.0], on_nonfinite=lambda report: "maybe")
    with pytest.raises(ValueError, match="must return 'skip', 'raise', 'zero', 'warn', it returned 'maybe'"):
        step(optimizer, weight, [NAN])
    assert weight.tolist() == [1.0]
    assert torch.isnan(weight.grad).all()


@quiet
def test_raise_says_who_where_and_how_many_and_carries_the_report():
    model = nn.Linear(2, 2)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model, on_nonfinite="raise")
    model.weight.grad = torch.tensor([[1.0, INF], [NAN, 1.0]])
    model.bias.grad = torch.zeros(2)
    with pytest.raises(nanscan.NonFiniteError) as error:
        optimizer.step()
    assert str(error.value) == (
        "nanscan: step 0 not taken: grad of 'weight' has 1 NaN, 1 Inf of 4 (first at [0, 1]). Weights and optimizer "
        "state are unchanged, the gradients are left for inspection."
    )
    assert error.value.report is optimizer.last_report
    assert optimizer.skipped_steps == optimizer.consecutive_skips == 1
    assert isinstance(error.value, RuntimeError)


# ---- skips, runs of skips --------------------------------------------------------------------------------------------


def test_each_run_of_skips_is_warned_about_once_at_the_callers_line():
    weight, optimizer = one([1.0])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for grad in (1.0, NAN, NAN, NAN, 1.0, NAN, NAN):
            step(optimizer, weight, [grad])
    assert [str(w.message).split(":")[1] for w in seen] == [" step 1 skipped", " step 5 skipped"]
    assert {w.category for w in seen} == {NonFiniteWarning}
    assert {w.filename for w in seen} == {__file__}
    assert optimizer.skipped_steps == 5
    assert optimizer.consecutive_skips == 2
    assert optimizer.first_skipped_step == 1
    assert [r.skipped for r in optimizer.history] == [False, True, True, True, False, True, True]


def test_warning_of_a_skip_word_for_word():
    model = nn.Linear(2, 1)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model.weight.grad, model.bias.grad = torch.tensor([[1.0, NAN]]), torch.tensor([INF])
    with pytest.warns(NonFiniteWarning) as seen:
        optimizer.step()
    assert str(seen[0].message) == (
        "nanscan: step 0 skipped: grad of 'weight' has 1 NaN, 0 Inf of 2 (first at [0, 1]); grad of 'bias' has 0 NaN, "
        "1 Inf of 1 (first at [0]). Weights and optimizer state are unchanged, the gradients are cleared."
    )


def test_repeat_offender_is_said_when_it_is_one():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    named = [("encoder.in", a), ("decoder.out.bias", b)]
    optimizer = nanscan.wrap(torch.optim.SGD(named, lr=1.0))
    said = []
    for grads in ((NAN, NAN), (1.0, 1.0), (1.0, INF), (1.0, 1.0), (1.0, NAN), (1.0, 1.0), (NAN, 1.0)):
        a.grad, b.grad = torch.tensor([grads[0]]), torch.tensor([grads[1]])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
        said += ["Last 3 skipped steps: always decoder.out.bias." in str(w.message) for w in seen]
    assert said == [False, False, True, False]


@quiet
def test_training_diverged_comes_with_the_skip_that_fills_the_count():
    weight, optimizer = one([1.0], max_consecutive_skips=3)
    step(optimizer, weight, [NAN])
    step(optimizer, weight, [0.5])
    step(optimizer, weight, [NAN])
    step(optimizer, weight, [NAN])
    with pytest.raises(nanscan.TrainingDiverged) as error:
        step(optimizer, weight, [NAN])
    assert optimizer.consecutive_skips == 3
    assert error.value.report is optimizer.last_report
    assert "Last 3 skipped steps: always group0.param0." in str(error.value)
    assert "That makes 3 skipped steps in a row (since step 2)" in str(error.value)
    assert isinstance(error.value, nanscan.NonFiniteError)
    assert weight.tolist() == [0.5]
    assert weight.grad is None


@quiet
def test_max_consecutive_skips_of_one_and_of_none():
    weight, optimizer = one([1.0], max_consecutive_skips=1)
    with pytest.raises(nanscan.TrainingDiverged):
        step(optimizer, weight, [NAN])
    weight, optimizer = one([1.0], max_consecutive_skips=None)
    for _ in range(60):
        step(optimizer, weight, [NAN])
    assert optimizer.consecutive_skips == 60


@quiet
def test_skip_clears_the_gradients_of_every_group_and_accumulation_recovers():
    params = make_params()
    optimizer = nanscan.wrap(torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1))
    set_grads(params, 0, bad=NAN)
    optimizer.step()
    assert [p.grad for p in params] == [None] * 3


@quiet
def test_frozen_parameter_and_parameter_without_gradient_are_left_alone():
    frozen, unused, used = (nn.Parameter(torch.ones(1)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = nanscan.wrap(torch.optim.SGD([frozen, unused, used], lr=1.0))
    step(optimizer, used, [0.25])
    assert [p.item() for p in (frozen, unused, used)] == [1.0, 1.0, 0.75]
    assert [row.name for row in optimizer.last_report.tensors] == ["group0.param2"]
    step(optimizer, used, [NAN])
    assert [row.name for row in optimizer.last_report.bad] == ["group0.param2"]


def test_no_gradient_at_all_is_stepped_through_and_hinted_at_once():
    weight, optimizer = one([1.0])
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    assert [str(w.message).split(":")[1] for w in seen] == [" no gradients at step 0"]
    assert len(called) == 2
    report = optimizer.last_report
    assert (report.norm, report.finite, report.skipped, report.numel) == (0.0, True, False, 0)


def test_gradient_of_zeros_is_an_ordinary_step():
    weight, optimizer = one([1.0], inner={"weight_decay": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(optimizer, weight, [0.0])
    assert weight.item() == 0.5
    assert optimizer.last_report.norm == 0.0


def test_unreadable_gradient_is_named():
    weight = nn.Parameter(torch.zeros(1, device="meta"))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.zeros(1, device="meta")
    with pytest.raises(ValueError, match=r"^grad of 'group0.param0' is a meta or fake tensor"):
        optimizer.step()


# ---- names -----------------------------------------------------------------------------------------------------------


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


# ---- losses, buffers, parameters -------------------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize(
    "loss", [NAN, torch.tensor(NAN), torch.tensor([1.0, NAN]), torch.tensor(INF, dtype=torch.bfloat16)], ids=str
)
def test_bad_loss_skips_the_step_although_gradients_are_zero(loss):
    weight, optimizer = one([1.0], inner={"weight_decay": 0.1})
    optimizer.observe(loss)
    step(optimizer, weight, [0.0])
    assert weight.item() == 1.0
    assert [(row.name, row.kind) for row in optimizer.last_report.bad] == [("loss", "loss")]
    assert optimizer.last_report.norm == 0.0, "the loss is no part of the norm"
    step(optimizer, weight, [1.0])
    assert not optimizer.step_was_skipped, "a loss joins one scan only"


def test_healthy_losses_are_rows_of_the_report():
    weight, optimizer = one([1.0])
    optimizer.observe(2.5)
    optimizer.observe(torch.tensor(3, dtype=torch.int64))
    step(optimizer, weight, [1.0])
    rows = optimizer.last_report.tensors
    assert [(row.name, row.norm) for row in rows] == [("group0.param0", 1.0), ("loss[0]", 2.5), ("loss[1]", 3.0)]
    assert optimizer.last_report.norm == 1.0


def test_observe_keeps_no_graph_and_refuses_what_is_no_loss():
    weight, optimizer = one([1.0])
    optimizer.observe((weight * 2).sum())
    assert not optimizer._losses[0].requires_grad
    with pytest.raises(TypeError, match="loss must be a tensor or a number, got str"):
        optimizer.observe("0.5")


def test_poisoned_batchnorm_buffers_are_named_when_a_step_is_skipped():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    assert optimizer.last_report.buffers == ()
    model(torch.tensor([[NAN, 1.0], [1.0, 1.0]])).sum().backward()
    with pytest.warns(NonFiniteWarning, match="spoiled what a skip can't restore: buffer '1.running_mean' has 3 NaN"):
        optimizer.step()
    assert [row.name for row in optimizer.last_report.buffers] == ["1.running_mean", "1.running_var"]


def float16_adam(foreach, **options):
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer = nanscan.wrap(torch.optim.Adam([weight], lr=0.1, foreach=foreach), **options)
    weight.grad = torch.tensor([0.0, 1e-4, 1.0], dtype=torch.float16)
    return weight, optimizer, [str(w.message) for w in seen]


@pytest.mark.parametrize("foreach", [True, False])
def test_update_that_makes_nan_of_finite_gradients_is_found_named_and_counted(foreach):
    _, optimizer, _ = float16_adam(foreach, check_params_every=1)
    with pytest.warns(NonFiniteWarning) as seen:
        optimizer.step()
    assert str(seen[0].message) == (
        "nanscan: after step 0, finite gradients, non-finite update: parameter 'group0.param0' has 1 NaN, 1 Inf of 3 "
        "(first at [0]); eps=1e-08 is 0 in float16. The step can't be undone here; go back to a checkpoint."
    )
    assert optimizer.last_report.finite
    assert [row.name for row in optimizer.last_report.parameters] == ["group0.param0"]
    assert (optimizer.bad_parameter_steps, optimizer.skipped_steps) == (1, 0)


@quiet
def test_poisoned_optimizer_state_is_named_with_its_parameter():
    weight, optimizer = one([1.0], torch.optim.Adam, check_params_every=1, on_nonfinite="warn")
    step(optimizer, weight, [INF])
    assert [(row.kind, row.name) for row in optimizer.last_report.parameters] == [
        ("parameter", "group0.param0"),
        ("state", "exp_avg of 'group0.param0'"),
        ("state", "exp_avg_sq of 'group0.param0'"),
    ]


def test_check_of_the_parameters_can_raise():
    _, optimizer, _ = float16_adam(True, check_params_every=1, on_nonfinite="raise")
    with pytest.raises(nanscan.NonFiniteError, match="after step 0, finite gradients, non-finite update"):
        optimizer.step()
    assert len(optimizer.history) == 1


@quiet
def test_parameters_are_checked_every_so_many_steps_and_warned_about_once():
    weight, optimizer = one([1.0], check_params_every=3)
    with torch.no_grad():
        weight.fill_(NAN)
    found = []
    for _ in range(7):
        step(optimizer, weight, [0.5])
        found.append(len(optimizer.last_report.parameters))
    assert found == [0, 0, 1, 0, 0, 1, 0]
    assert optimizer.bad_parameter_steps == 2


@pytest.mark.parametrize(
    "dtype, options, warned",
    [
        (torch.float16, {}, True),
        (torch.float16, {"eps": 1e-4}, False),
        (torch.float16, {"fused": True}, False),
        (torch.float32, {}, False),
        (torch.bfloat16, {}, False),
    ],
)
def test_eps_that_float16_cannot_hold_is_warned_about_when_wrapping(dtype, options, warned):
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    inner = torch.optim.AdamW([("fc.weight", weight)], **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        nanscan.wrap(inner)
    starts = [str(w.message)[:60] for w in seen]
    assert starts == (["nanscan: eps=1e-08 is 0 in float16, the dtype of 'fc.weight'"] if warned else [])


def test_fused_adam_in_float16_with_that_eps_stays_finite():
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    weight.grad = torch.tensor([0.0, 1e-4, 1.0], dtype=torch.float16)
    optimizer.step()
    assert torch.isfinite(weight).all(), "else the guard must warn about fused optimizers too"


# ---- many at once ----------------------------------------------------------------------------------------------------


@quiet
def test_two_guarded_optimizers_in_two_threads_do_not_mix():
    results = {}

    def train(name, bad_every):
        params = make_params(seed=len(name))
        optimizer = nanscan.wrap(torch.optim.AdamW(params, lr=0.01), clip_norm=1.0)
        for i in range(300):
            set_grads(params, i, bad=NAN if i % bad_every == 0 else None)
            optimizer.step()
        results[name] = (optimizer.skipped_steps, len(optimizer.history), whole_state(params, optimizer))

    for name, bad_every in (("a", 7), ("bb", 3)):
        train(name, bad_every)
    alone = dict(results)
    threads = [threading.Thread(target=train, args=pair) for pair in (("a", 7), ("bb", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == alone
    assert alone["a"][0] == 43
    assert alone["bb"][0] == 100


def test_step_of_the_inner_optimizer_that_fails_is_no_step():
    weight, optimizer = one([1.0])

    def fail(*_):
        raise OSError("hook failed")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="hook failed"):
        step(optimizer, weight, [1.0])
    handle.remove()
    assert len(optimizer.history) == 0
    step(optimizer, weight, [1.0])
    assert [r.step for r in optimizer.history] == [0]


def test_mixed_dtypes_in_one_optimizer():
    half, double = nn.Parameter(torch.zeros(2, dtype=torch.float16)), nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = nanscan.wrap(torch.optim.SGD([half, double], lr=1.0), clip_norm=1.0)
    half.grad, double.grad = torch.tensor([300.0, 0.0], dtype=torch.float16), torch.tensor([400.0], dtype=torch.float64)
    optimizer.step()
    assert optimizer.last_report.norm == 500.0
    assert half.tolist() == pytest.approx([-0.6, 0.0], rel=1e-3)
    assert double.item() == pytest.approx(-0.8)
    assert [row.dtype for row in optimizer.last_report.tensors] == ["float16", "float64"]


def test_groups_on_different_devices_are_not_left_to_one_device():
    here, elsewhere = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = nanscan.wrap(torch.optim.SGD([{"params": [here]}, {"params": [elsewhere]}], lr=1.0, momentum=0.9))
    optimizer._deferred = True
    optimizer._replan()
    here.grad = torch.ones(2)
    assert not optimizer._can_defer()
    optimizer.step()
    assert here.tolist() == [-1.0, -1.0]


def test_report_bits_do_not_depend_on_the_report_being_read():
    weight, optimizer = one([1.0, 2.0])
    step(optimizer, weight, [3.0, 4.0])
    first = optimizer.last_report
    assert first is optimizer.last_report is optimizer.history[-1]
    step(optimizer, weight, [6.0, 8.0])
    assert (first.norm, first.tensors[0].norm, bits(weight)) == (5.0, 5.0, bits(torch.tensor([-8.0, -10.0])))
