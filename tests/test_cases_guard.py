"""Reports of people who train models, as small programs: what is right, not what plain PyTorch does.

Each test names the public report it comes from.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import nanscan
from tests.guarded import INF, NAN, bits

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")


def parameter(value, grad=None, dtype=torch.float32):
    p = nn.Parameter(torch.tensor(value, dtype=dtype))
    if grad is not None:
        p.grad = torch.tensor(grad, dtype=dtype)
    return p


def test_float16_norm_that_overflows_its_dtype_is_no_bad_step():
    """The norm of finite float16 gradients is inf in float16: clipping turned all of them into 0."""
    a, b = parameter([0.0] * 4, [3e4] * 4, torch.float16), parameter([0.0] * 4, [3e4] * 4, torch.float16)
    optimizer = nanscan.wrap(torch.optim.SGD([a, b], lr=1.0), clip_norm=1.0)
    optimizer.step()
    report = optimizer.last_report
    assert (report.finite, report.bad, report.skipped) == (True, (), False)
    assert report.norm == pytest.approx(84852.8, rel=1e-6)
    assert torch.cat([a.grad, b.grad]).double().norm().item() == pytest.approx(1.0, rel=1e-3)
    assert a.grad.tolist() == pytest.approx([0.3535] * 4, rel=1e-3)


@pytest.mark.parametrize("bad", [INF, NAN])
def test_one_bad_element_does_not_spoil_every_gradient_when_clipping(bad):
    """inf * 0 = NaN: clipping before looking destroyed all gradients and then all weights."""
    a, b = parameter([1.0, 1.0], [bad, 1.0]), parameter([1.0, 1.0], [1.0, 1.0])
    optimizer = nanscan.wrap(torch.optim.AdamW([("a", a), ("b", b)]), clip_norm=1.0, on_nonfinite="raise")
    before = bits([a, b]), bits([a.grad, b.grad])
    with pytest.raises(nanscan.NonFiniteError):
        optimizer.step()
    assert (bits([a, b]), bits([a.grad, b.grad])) == before
    assert [(row.name, row.nan_count + row.inf_count, row.first_bad) for row in optimizer.last_report.bad] == [
        ("a", 1, (0,))
    ]


def test_sparse_embedding_gradient_is_summed_named_clipped_and_never_made_dense():
    """nn.Embedding(sparse=True) broke multi-tensor norms and finite checks."""
    model = nn.ModuleDict({"emb": nn.Embedding(5, 2, sparse=True)})
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, clip_norm=1.0)
    model["emb"](torch.tensor([3, 3])).sum().backward()
    optimizer.step()
    assert optimizer.last_report.norm == pytest.approx(2.8284271)
    grad = model["emb"].weight.grad
    assert grad.is_sparse
    assert grad.coalesce().values().norm().item() == pytest.approx(1.0, rel=1e-5)
    optimizer.zero_grad()
    (model["emb"](torch.tensor([1, 4])) * torch.tensor([[1.0, 1.0], [1.0, NAN]])).sum().backward()
    optimizer.step()
    row = optimizer.last_report.bad[0]
    assert (row.name, row.first_bad, row.nan_count) == ("emb.weight", (4, 1), 1)


def test_no_gradient_anywhere_is_a_no_op_and_none_beside_nan_names_only_the_nan():
    """Frozen parts and unused branches: norm code crashed on an empty list, GradScaler asserted."""
    a, b = parameter([1.0]), parameter([1.0])
    optimizer = nanscan.wrap(torch.optim.SGD([("a", a), ("b", b)], lr=1.0))
    with pytest.warns(UserWarning, match="no gradients at step 0"):
        optimizer.step()
    assert (optimizer.last_report.norm, optimizer.step_was_skipped) == (0.0, False)
    b.grad = torch.tensor([NAN])
    optimizer.step()
    assert [row.name for row in optimizer.last_report.bad] == ["b"]
    assert nanscan.clip_grad_norm_([a, b], 1.0).item() == 0.0


@pytest.mark.parametrize(
    "grad, norm",
    [
        (torch.ones(1).expand(4), 2.0),
        (torch.ones(2, 3).t(), 6**0.5),
        (torch.ones(2, 3, 2, 4).to(memory_format=torch.channels_last), 48**0.5),
    ],
    ids=["expanded", "transposed", "channels_last"],
)
def test_gradient_of_any_layout_has_its_logical_norm_and_is_clipped_once(grad, norm):
    """Kernels that read flat memory saw the wrong elements; clipping an expanded gradient raised."""
    weight = nn.Parameter(torch.zeros(grad.shape))
    weight.grad = grad
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0), clip_norm=1.0)
    optimizer.step()
    assert optimizer.last_report.norm == pytest.approx(norm, rel=1e-6)
    assert weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    assert weight.unique().numel() == 1


def test_expanded_gradient_is_clipped_right_by_a_fused_optimizer_too():
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.ones(1).expand(4)
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0, fused=True), clip_norm=1.0)
    optimizer.step()
    assert weight.tolist() == pytest.approx([-0.5] * 4, rel=1e-5)


def test_tied_weight_counts_once():
    """An embedding tied to the output layer made the norm sqrt(2) too big and was scaled twice."""
    emb, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = emb.weight
    emb.weight.grad = torch.ones(4, 3)
    both = [*emb.parameters(), *head.parameters()]
    assert nanscan.clip_grad_norm_(both, 1.0).item() == pytest.approx(3.4641016)
    assert emb.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("max_norm", [-1.0, 0.0, NAN])
def test_bad_max_norm_is_an_error_before_any_gradient_is_touched(max_norm):
    """-1 reversed, 0 zeroed and NaN filled every gradient, silently."""
    p = parameter([0.0, 0.0], [3.0, 4.0])
    with pytest.raises(ValueError):
        nanscan.wrap(torch.optim.SGD([p], lr=1.0), clip_norm=max_norm)
    with pytest.raises(ValueError):
        nanscan.clip_grad_norm_([p], max_norm)
    assert p.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("unscale_first", [False, True])
def test_clipping_with_a_gradient_scaler_sees_the_unscaled_norm(unscale_first):
    """Gradients were clipped while still multiplied by the loss scale, and the model barely moved."""
    p = parameter([1.0])
    optimizer = nanscan.wrap(torch.optim.SGD([p], lr=1.0), clip_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((p * 0.5).sum()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.last_report.norm, optimizer.last_report.clip_factor, p.item()) == (0.5, 1.0, 0.5)


def test_schedule_can_wait_for_skipped_steps_and_no_false_alarm_is_raised():
    """The order-of-calls warning came on skipped steps, and the schedule ran ahead of the training."""
    p = parameter([1.0])
    optimizer = nanscan.wrap(torch.optim.SGD([p], lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            scaler.scale((p * INF).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            if not optimizer.step_was_skipped:
                scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 1.0
        (p * 1.0).sum().backward()
        optimizer.step()
        assert not optimizer.step_was_skipped
        scheduler.step()
    assert not [w for w in seen if "lr_scheduler" in str(w.message)]
    assert optimizer.skipped_steps == 3


def test_gradient_scaler_lets_the_guard_see_the_bad_step():
    """scaler.step() did not call the wrapper on a bad step, so that it could neither count nor name anything."""
    p = parameter([1.0])
    optimizer = nanscan.wrap(torch.optim.SGD([("p", p)], lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((p * INF).sum()).backward()
    assert scaler.step(optimizer) is None
    scaler.update()
    assert optimizer.step_was_skipped
    assert [row.name for row in optimizer.last_report.bad] == ["p"]
    assert (scaler.get_scale(), p.item()) == (4.0, 1.0)


def test_learning_rate_set_after_resuming_reaches_the_real_optimizer():
    """A wrapper that had copied param_groups held the old list after load_state_dict."""
    p = parameter([1.0])
    optimizer = nanscan.wrap(torch.optim.SGD([p], lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer.load_state_dict(optimizer.optimizer.state_dict())
    p.grad = torch.zeros(1)
    optimizer.step()
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_one_bad_micro_batch_costs_one_step_not_all_that_follow():
    """The skip jumped over zero_grad(): the NaN stayed in .grad and poisoned every later accumulation."""
    p = parameter([1.0])
    optimizer = nanscan.wrap(torch.optim.SGD([p], lr=0.1))
    for window in range(4):
        for micro in range(2):
            (p * (NAN if (window, micro) == (0, 1) else 1.0)).sum().backward()
        optimizer.step()
        if not optimizer.step_was_skipped:
            optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    assert p.item() == pytest.approx(0.4)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda ps: torch.optim.AdamW(ps, lr=0.1),
    ],
    ids=["SGD", "AdamW"],
)
def test_skipped_step_is_not_a_step_with_zeros(make):
    """A gradient of zeros still moves weights by momentum and weight decay, and step counters advance."""
    p = parameter([1.0], [1.0])
    optimizer = nanscan.wrap(make([p]))
    optimizer.step()
    before = bits(p), bits(optimizer.state_dict())
    p.grad = torch.tensor([NAN])
    optimizer.step()
    assert (bits(p), bits(optimizer.state_dict())) == before


def test_poisoned_state_of_the_optimizer_is_named():
    """Weights were put back after a bad step, but exp_avg had taken the inf and never forgot it."""
    p = parameter([1.0], [INF])
    optimizer = nanscan.wrap(torch.optim.Adam([("p", p)], lr=0.1), on_nonfinite="warn", check_params_every=1)
    optimizer.step()
    assert "exp_avg of 'p'" in [row.name for row in optimizer.last_report.parameters]
    p, state = parameter([1.0], [INF]), None
    optimizer = nanscan.wrap(torch.optim.Adam([("p", p)], lr=0.1))
    optimizer.step()
    p.grad = torch.tensor([1.0])
    optimizer.step()
    assert state is None and p.item() == pytest.approx(0.9), "skipping keeps the state clean from the start"


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
@pytest.mark.parametrize("foreach", [False, True])
def test_finite_gradients_that_make_nan_weights_are_found(kind, foreach):
    """eps=1e-8 is 0 in float16: the update divides by 0 although every gradient is finite."""
    p = parameter([1.0, 1.0, 1.0], [0.0, 1e-4, 1.0], torch.float16)
    with pytest.warns(nanscan.NonFiniteWarning, match="eps=1e-08 is 0 in float16, the dtype of 'p'"):
        optimizer = nanscan.wrap(kind([("p", p)], lr=0.1, foreach=foreach), check_params_every=1)
    with pytest.warns(nanscan.NonFiniteWarning, match="finite gradients, non-finite update: parameter 'p'"):
        optimizer.step()
    row = optimizer.last_report.parameters[0]
    assert (row.name, row.first_bad) == ("p", (0,))
    assert row.nan_count + row.inf_count >= 1
    assert optimizer.last_report.finite and not math.isnan(optimizer.last_report.norm)
