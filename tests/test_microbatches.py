"""Accumulation: which micro-batch brought the NaN, and a run that gives up only that one."""

from __future__ import annotations

import json
import math
import pickle
import warnings

import pytest
import torch
from torch import nn

import nanscan
from nanscan.errors import NonFiniteWarning
from nanscan.microbatches import MicrobatchReport
from tests.guarded import INF, NAN, bits

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")


class Experts(nn.Module):
    """An embedding tied to the head, and two experts of which a micro-batch uses one: None, sparse, tied gradients."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=sparse)
        self.emb = nn.Embedding(5, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens, expert, scale=1.0):
        hidden = self.emb(tokens) + self.table(tokens)
        return self.head(torch.tanh(self.experts[expert](hidden)) * scale)


def batch(step, micro):
    generator = torch.Generator().manual_seed(100 * step + micro)
    tokens = torch.randint(0, 5, (6,), generator=generator)
    return tokens, (step + micro) % 2, tokens.roll(1)


def make(kind=torch.optim.SGD, sparse=False, **options):
    torch.manual_seed(0)
    model = Experts(sparse)
    given = {"momentum": 0.9, "weight_decay": 0.1} if kind is torch.optim.SGD and not sparse else {}
    inner = kind(model.parameters(), lr=0.1, **given)
    return model, nanscan.wrap(inner, model, **options)


def backward(model, step, micro, parts, bad=False, retain=False):
    tokens, expert, target = batch(step, micro)
    loss = nn.functional.cross_entropy(model(tokens, expert, NAN if bad else 1.0), target)
    (loss / parts).backward()
    return loss


def weight_of(**options):
    """One weight of two elements under SGD."""
    weight = nn.Parameter(torch.ones(2))
    return weight, nanscan.wrap(torch.optim.SGD([("w", weight)], lr=1.0), **options)


def add(weight, value=1.0, parts=1):
    """A micro-batch whose gradient is [1, value] / parts."""
    (weight * torch.tensor([1.0, value])).sum().div(parts).backward()


# ---- who brought it --------------------------------------------------------------------------------------------------


def test_first_microbatch_with_a_nan_is_named_and_later_ones_are_not_blamed():
    weight, optimizer = weight_of()
    reports = []
    for value in (1.0, NAN, 1.0, NAN):
        add(weight, value)
        reports.append(optimizer.check_microbatch())
    assert [report.finite for report in reports] == [True, False, True, True]
    assert [report.microbatch for report in reports] == [0, 1, 2, 3]
    assert [row.name for row in reports[1].bad] == ["w"] and reports[1].bad[0].first_bad == (1,)
    assert reports[1].describe() == "micro-batch 1 of step 0: grad of 'w' has 1 NaN, 0 Inf of 2 (first at [1])"
    assert [len(report.stale) for report in reports] == [0, 0, 1, 1]
    with pytest.warns(NonFiniteWarning, match=r"came with micro-batch 1 of 4 \(counted from 0\)"):
        optimizer.step()
    last = optimizer.last_report
    assert (last.skipped, last.microbatches, last.microbatch, last.dropped) == (True, 4, 1, ())
    add(weight)
    assert optimizer.check_microbatch().finite, "the skip has cleared the gradients: the next window begins clean"
    assert optimizer.check_microbatch().step == 1
    optimizer.step()
    assert weight.tolist() == [0.0, 0.0] and optimizer.skipped_steps == 1


def test_a_second_parameter_or_element_that_goes_bad_later_is_named_then():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))
    optimizer = nanscan.wrap(torch.optim.SGD([("a", a), ("b", b)], lr=1.0))
    found = []
    for where, factor in ((a, [INF, 1.0, 1.0]), (a, [-INF, 1.0, 1.0]), (a, [1.0, 1.0, NAN]), (b, [NAN])):
        (where * torch.tensor(factor)).sum().backward()
        report = optimizer.check_microbatch()
        found.append([row.name for row in report.bad])
    assert found == [["a"], [], ["a"], ["b"]], "inf - inf is a NaN in the same element: nothing new"


def test_a_bad_loss_is_found_although_its_gradients_are_zero_and_the_step_is_judged_by_it():
    weight, optimizer = weight_of()
    add(weight)
    assert optimizer.check_microbatch(torch.tensor(1.0)).finite
    report = optimizer.check_microbatch(torch.tensor(NAN))
    assert [row.name for row in report.bad] == ["loss"] and report.microbatch == 1
    optimizer.step()
    assert optimizer.step_was_skipped and optimizer.last_report.bad[0].name == "loss"
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("before_backward", [False, True])
@pytest.mark.parametrize(
    ("losses", "weights", "loss"),
    [
        ((1.0, 3.0), (1.0, 1.0), 2.0),
        ((torch.tensor([1.0, 2.0]), 4.5), (1.0, 3.0), 3.75),
        ((1.0, 3.0), (0.0, 0.0), 2.0),
        ((1.0, NAN, 5.0), (1.0, 1.0, 1.0), 3.0),
        ((1.0, None), (1.0, 1.0), None),
        ((NAN,), (1.0,), None),
    ],
)
def test_the_mean_of_the_losses_that_are_kept_is_the_steps_in_the_log_too(
    tmp_path, losses, weights, loss, before_backward
):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=0.1), log=tmp_path / "run.jsonl")
    optimizer.zero_grad()
    for given, share in zip(losses, weights, strict=True):
        options = {"drop": True, "weight": share}
        if before_backward and given is not None:
            if not optimizer.check_microbatch(given, before_backward=True, **options).finite:
                continue
            given = None
        add(weight)
        optimizer.check_microbatch(given, **options)
    optimizer.step()
    line = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])
    assert optimizer.last_report.loss == loss and line.get("loss") == loss


def test_a_bad_loss_that_is_not_dropped_and_an_observed_one_are_the_steps_loss():
    weight, optimizer = weight_of()
    for loss in (1.0, math.inf):
        add(weight)
        optimizer.check_microbatch(loss)
    optimizer.step()
    assert optimizer.last_report.loss == math.inf and optimizer.step_was_skipped
    for loss in (1.0, 3.0):
        add(weight)
        optimizer.check_microbatch(loss)
    optimizer.observe(7.0)
    optimizer.step()
    assert optimizer.last_report.loss == 7.0
    add(weight)
    optimizer.step()
    assert optimizer.last_report.loss is None, "no loss of an earlier window"


def test_health_counts_and_names_what_was_dropped_and_a_resumed_guard_goes_on_counting():
    weight, optimizer = weight_of()
    for bad in ({1}, set(), {0, 2}):
        for micro in range(3):
            add(weight, NAN if micro in bad else 1.0)
            optimizer.check_microbatch(float(micro), drop=True)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.health().endswith("none skipped  3 micro-batches dropped  last bad: step 2 micro-batch 0, 2")
    _, other = weight_of()
    other.load_guard_state_dict(optimizer.guard_state_dict())
    add(other.param_groups[0]["params"][0])
    other.step()
    assert other.health().endswith("3 micro-batches dropped")


def test_report_survives_pickle_and_json():
    weight, optimizer = weight_of()
    add(weight, NAN)
    report = optimizer.check_microbatch(0.5)
    again = pickle.loads(pickle.dumps(report))
    assert isinstance(report, nanscan.Report) and isinstance(again, MicrobatchReport)
    assert again.to_json() == report.to_json() and again.microbatch == 0
    assert MicrobatchReport.from_dict(json.loads(report.to_json())).bad[0].name == "w"
    optimizer.step()
    assert nanscan.StepReport.from_dict(json.loads(optimizer.last_report.to_json())).microbatch == 0


# ---- giving up one micro-batch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bad_at", [{0}, {1}, {3}, {0, 2}])
def test_dropped_microbatch_leaves_the_run_bit_equal_to_one_that_never_saw_it(sparse, set_to_none, bad_at):
    model, optimizer = make(sparse=sparse)
    twin, inner = make(sparse=sparse)
    parts = 4
    for step in range(3):
        for micro in range(parts):
            bad = micro in bad_at and step != 1
            loss = backward(model, step, micro, parts, bad)
            report = optimizer.check_microbatch(loss, drop=True)
            assert (report.finite, report.dropped) == (not bad, bad)
            if not bad:
                backward(twin, step, micro, parts)
        drops = len(bad_at) if step != 1 else 0
        if drops:
            for p in {id(p): p for p in twin.parameters()}.values():
                if p.grad is not None:
                    p.grad = p.grad.coalesce() if p.grad.is_sparse else p.grad
                    p.grad *= parts / (parts - drops)
        optimizer.step()
        inner.step()
        assert bits([p.grad for p in model.parameters()]) == bits([p.grad for p in twin.parameters()]), step
        assert optimizer.last_report.dropped == (tuple(sorted(bad_at)) if drops else ())
        optimizer.zero_grad(set_to_none=set_to_none)
        inner.zero_grad(set_to_none=set_to_none)
        assert bits(list(model.parameters())) == bits(list(twin.parameters()))
        assert bits(optimizer.state_dict()) == bits(inner.state_dict())
    assert optimizer.skipped_steps == 0


def test_the_rest_is_scaled_by_the_weights_given_before_it_is_clipped():
    for weights, expected in (([1, 1, 1, 1], 4.0), ([10, 30, 50, 10], 3 / 0.7), ([0, 0, 0, 0], 3.0)):
        weight, optimizer = weight_of(clip_norm=100.0)
        for micro, tokens in enumerate(weights):
            add(weight, NAN if micro == 1 else 1.0)
            optimizer.check_microbatch(drop=True, weight=tokens)
        optimizer.step()
        assert optimizer.last_report.norm == pytest.approx(expected * math.sqrt(2))
        assert weight.tolist() == pytest.approx([1 - expected] * 2)
    with pytest.raises(ValueError, match="weight must be 0 or more"):
        optimizer.check_microbatch(weight=-1.0)


def test_shorter_last_window_is_scaled_by_its_own_length():
    weight, optimizer = weight_of()
    for parts in (4, 2):
        for micro in range(parts):
            add(weight, NAN if micro == 1 else 1.0, parts)
            optimizer.check_microbatch(drop=True)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_report.microbatches == parts
        assert optimizer.last_report.norm == pytest.approx(math.sqrt(2) * (1 if parts == 4 else 1))


def test_window_of_which_all_was_dropped_is_a_skipped_step_that_says_why():
    weight, optimizer = weight_of(max_consecutive_skips=2)
    for _ in range(2):
        add(weight, NAN)
        optimizer.check_microbatch(drop=True)
        assert weight.grad is None
    with pytest.warns(NonFiniteWarning, match="grad of 'w' has 1 NaN.*All 2 micro-batches were dropped"):
        optimizer.step()
    assert optimizer.step_was_skipped and optimizer.skipped_steps == 1
    assert optimizer.last_report.dropped == (0, 1) and optimizer.last_report.bad[0].name == "w"
    assert weight.tolist() == [1.0, 1.0]
    add(weight, NAN)
    optimizer.check_microbatch(drop=True)
    with pytest.raises(nanscan.TrainingDiverged):
        optimizer.step()
    strict = weight_of(on_nonfinite="raise")
    add(strict[0], NAN)
    strict[1].check_microbatch(drop=True)
    with pytest.raises(nanscan.NonFiniteError):
        strict[1].step()


def test_each_run_of_drops_is_warned_about_once_and_named():
    weight, optimizer = weight_of()
    said = []
    for bad in (True, True, False, True):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for micro in range(2):
                add(weight, NAN if bad and micro else 1.0)
                optimizer.check_microbatch(drop=True)
            optimizer.step()
            optimizer.zero_grad()
        said.append([str(w.message) for w in seen])
        assert all(w.filename == __file__ for w in seen)
    assert [len(texts) for texts in said] == [1, 0, 0, 1]
    assert said[0][0].startswith("nanscan: dropped micro-batch 1 of step 0: grad of 'w' has 1 NaN, 0 Inf of 2")


def test_buffers_that_the_forward_of_a_dropped_microbatch_spoiled_are_named_in_warning_and_report():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.warns(NonFiniteWarning, match="spoiled what a drop can't restore: buffer '0.running_mean' has 3 NaN"):
        for value in (1.0, NAN):
            model(torch.rand(4, 3) * value).sum().backward()
            optimizer.check_microbatch(drop=True)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert [row.name for row in optimizer.last_report.buffers] == ["0.running_mean", "0.running_var"]


def test_observed_loss_of_a_dropped_microbatch_is_dropped_with_it():
    weight, optimizer = weight_of()
    for value in (1.0, NAN, 1.0):
        add(weight, value)
        optimizer.observe(value)
        optimizer.check_microbatch(value, drop=True)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert weight.tolist() == [-2.0, -2.0]


def test_copies_take_the_memory_of_the_gradients_and_are_used_again():
    model = nn.Linear(64, 64)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    memory = set()
    for _ in range(3):
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.check_microbatch(drop=True)
        memory.add(tuple(copy.data_ptr() for copy in optimizer._kept._copies))
        optimizer.step()
        optimizer.zero_grad()
    assert len(memory) == 1 and len(next(iter(memory))) == 2


def test_a_bad_microbatch_that_could_not_be_dropped_has_the_step_skipped():
    weight, optimizer = weight_of()
    add(weight)
    optimizer.check_microbatch()  # no copy is made here
    add(weight, NAN)
    assert not optimizer.check_microbatch(drop=True).dropped
    optimizer.step()
    assert optimizer.step_was_skipped and weight.tolist() == [1.0, 1.0]


# ---- the loss before its backward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("again_after", [True, False])
def test_bad_loss_before_backward_saves_the_backward(again_after):
    weight, optimizer = weight_of()
    for value in (1.0, NAN, 1.0, 1.0):
        loss = (weight * torch.tensor([1.0, value])).sum() / 4
        report = optimizer.check_microbatch(loss, drop=True, before_backward=True)
        if not report.finite:
            assert report.dropped and report.microbatch == 1
            continue
        loss.backward()
        if again_after:
            optimizer.check_microbatch(drop=True)
    optimizer.step()
    assert optimizer.last_report.microbatches == 4 and optimizer.last_report.dropped == (1,)
    assert weight.tolist() == [0.0, 0.0]


def test_backward_of_a_loss_that_was_given_up_is_undone():
    weight, optimizer = weight_of()
    for value in (1.0, NAN):
        loss = (weight * torch.tensor([1.0, value])).sum() / 2
        optimizer.check_microbatch(loss, drop=True, before_backward=True)
        loss.backward()
        optimizer.check_microbatch(drop=True)
    optimizer.step()
    assert (optimizer.last_report.microbatches, optimizer.last_report.dropped) == (2, (1,))
    assert weight.tolist() == [0.0, 0.0]


def test_before_backward_needs_a_loss_in_the_middle_of_a_window():
    weight, optimizer = weight_of()
    add(weight)
    optimizer.check_microbatch()
    with pytest.raises(ValueError, match="looks at the loss only: give it"):
        optimizer.check_microbatch(before_backward=True)
    with pytest.raises(TypeError, match="loss must be a tensor or a number, got str"):
        optimizer.check_microbatch("0.5")


# ---- left over from earlier ------------------------------------------------------------------------------------------


def test_nan_that_was_there_before_the_window_is_told_apart_at_its_start():
    weight, optimizer = weight_of()
    weight.grad = torch.tensor([NAN, 1.0])
    start = optimizer.check_microbatch(before_backward=True)
    assert start.finite and [row.name for row in start.stale] == ["w"]
    add(weight)
    report = optimizer.check_microbatch()
    assert report.finite and report.microbatch == 0 and report.stale[0].first_bad == (0,)
    optimizer.step()
    assert optimizer.step_was_skipped and optimizer.last_report.microbatch is None


@pytest.mark.parametrize("cleared", ["nothing", "zeros", "none"])
def test_nan_kept_by_a_step_that_raised_is_stale_unless_the_gradients_were_cleared(cleared):
    weight, optimizer = weight_of(on_nonfinite="raise")
    add(weight, NAN)
    optimizer.check_microbatch()
    with pytest.raises(nanscan.NonFiniteError, match="came with micro-batch 0 of 1"):
        optimizer.step()
    if cleared != "nothing":
        optimizer.zero_grad(set_to_none=cleared == "none")
    add(weight, NAN if cleared != "nothing" else 1.0)
    report = optimizer.check_microbatch()
    assert (report.finite, len(report.stale)) == ((True, 1) if cleared == "nothing" else (False, 0))


def test_zero_grad_forgets_a_window_that_no_step_ended():
    weight, optimizer = weight_of()
    for _ in range(2):
        add(weight, NAN)
        assert optimizer.check_microbatch().microbatch == 0
        optimizer.zero_grad()
    add(weight)
    optimizer.step()
    assert not optimizer.step_was_skipped and optimizer.last_report.microbatches == 0


# ---- with the rest ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_scaler", [torch.amp.GradScaler, nanscan.GradScaler], ids=["torch", "nanscan"])
def test_scaler_hears_of_a_dropped_overflow_and_not_of_a_dropped_bad_loss(make_scaler):
    weight, optimizer = weight_of()
    scaler = make_scaler("cpu", init_scale=1024.0)
    scales = []
    for bad_loss, bad in ((1.0, {1}), (NAN, {1}), (1.0, {0, 1}), (NAN, {0, 1}), (1.0, set())):
        for micro in range(2):
            loss = (weight * torch.tensor([1.0, INF if micro in bad else 1.0])).sum() / 2
            scaler.scale(loss).backward()
            value = bad_loss if micro in bad else 1.0
            optimizer.check_microbatch(value, drop=True, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    assert scales == [512.0, 512.0, 256.0, 256.0, 256.0]
    assert [report.skipped for report in optimizer.history] == [False, False, True, True, False]
    assert weight.tolist() == [-2.0, -2.0]


def test_torchs_scaler_that_is_not_given_is_asked_for_where_it_would_fail():
    weight, optimizer = weight_of()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((weight * NAN).sum()).backward()
    optimizer.check_microbatch(drop=True)
    with pytest.raises(RuntimeError, match=r"check_microbatch\(.*scaler=scaler\)"):
        scaler.step(optimizer)


def test_closure_that_checks_its_last_microbatch_ends_the_window_and_loses_its_loss_with_it():
    weight, optimizer = weight_of()
    add(weight, 1.0, 2)
    optimizer.check_microbatch(drop=True)

    def closure():
        add(weight, NAN, 2)
        optimizer.check_microbatch(drop=True)
        return torch.tensor(NAN)

    optimizer.step(closure)
    assert weight.tolist() == [0.0, 0.0] and optimizer.last_report.dropped == (1,)
    lbfgs = nanscan.wrap(torch.optim.LBFGS([weight]))
    weight.grad = torch.ones(2)
    lbfgs.check_microbatch()
    with pytest.raises(RuntimeError, match="check_microbatch can't be used with an optimizer that evaluates"):
        lbfgs.step(closure)


def test_copy_of_the_optimizer_in_the_middle_of_a_window_begins_a_new_one():
    weight, optimizer = weight_of()
    add(weight)
    optimizer.check_microbatch(drop=True)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.check_microbatch().microbatch == 0
    assert optimizer.check_microbatch(drop=True).microbatch == 1


def test_without_checks_a_step_goes_the_short_way():
    weight, optimizer = weight_of()
    add(weight)
    optimizer.step()  # where torch was built for CUDA, the first step finds out that the gradients are on the CPU
    assert optimizer._plain
    add(weight)
    optimizer.check_microbatch()
    assert not optimizer._plain
    optimizer.step()
    assert optimizer._plain


def test_one_rank_alone_may_not_drop_what_other_ranks_keep():
    weight, optimizer = weight_of()
    parallel = object.__new__(nn.parallel.DistributedDataParallel)
    optimizer._names.model = parallel
    with pytest.raises(NotImplementedError, match="Leave process_group=False out"):
        optimizer.check_microbatch(drop=True)
