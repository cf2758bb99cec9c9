"""`wrap(find_origin=True)`: the first skipped step of a run is run again, and its origin stands in the report."""

import copy
import gc
import json
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanscan


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.bn, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x, *, fault=None):
        h = self.drop(self.bn(self.fc(x)))
        if fault == "forward":
            return (h - h) / (h - h)  # forward fault
        if fault == "backward":
            return (h - h).sqrt()  # backward fault
        return h


def guarded(net, **options):
    return nanscan.wrap(torch.optim.SGD(net.parameters(), lr=0.1), net, find_origin=True, **options)


def step(net, optimizer, fault=None):
    optimizer.zero_grad()
    loss = net(torch.randn(3, 4), fault=fault).sum()
    loss.backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
@pytest.mark.parametrize(("fault", "op"), [("forward", "aten.div"), ("backward", "SqrtBackward0")])
def test_origin_is_in_report_history_log_and_warning(fault, op, tmp_path):
    torch.manual_seed(0)
    net = Net()
    optimizer = guarded(net, log=tmp_path / "run.jsonl")
    step(net, optimizer)
    with pytest.warns(nanscan.NonFiniteWarning, match=rf"made by {op}.*test_find_origin_wrap.py:\d+: return") as said:
        step(net, optimizer, fault)
    assert "Hint: " in str(said[0].message) and ".." not in str(said[0].message)
    step(net, optimizer)
    origin = optimizer.history[1].origin
    assert origin.op == op and origin.phase == fault and origin.code.endswith(f"# {fault} fault")
    assert origin.module == "" and optimizer.history[0].origin is None and optimizer.history[2].origin is None
    line = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[1])
    assert line["origin"]["op"] == op
    assert nanscan.StepReport.from_dict(line).origin.op == op


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
@pytest.mark.parametrize("made", ["input", "aten.addmm"])
def test_in_a_model_of_pytorchs_own_modules_the_line_is_that_of_the_call_of_the_model(made):
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = guarded(net)
    inputs = torch.full((1, 2), float("nan") if made == "input" else 1e30)
    net[0].weight.data.fill_(1e20)
    net(inputs).sum().backward()  # the call
    net[0].weight.grad[0, 0] = float("nan")
    optimizer.step()  # not the step, in which it is run again
    origin = optimizer.last_report.origin
    assert origin.op == made and origin.code == "net(inputs).sum().backward()  # the call"


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
def test_training_goes_on_bit_for_bit_as_without_it():
    results = []
    for find in (False, True):
        torch.manual_seed(1)
        net = Net()
        optimizer = nanscan.wrap(torch.optim.SGD(net.parameters(), lr=0.1), net, find_origin=find)
        for fault in (None, "forward", None, "backward", "backward", None):
            step(net, optimizer, fault)
        results.append([*(v.clone() for v in net.state_dict().values()), torch.get_rng_state()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) or (a.isnan() == b.isnan()).all()


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
def test_only_the_first_step_of_a_run_is_run_again():
    net = Net()
    optimizer = guarded(net)
    for fault in ("forward", "forward", None, "backward"):
        step(net, optimizer, fault)
    assert [r.origin is not None for r in optimizer.history] == [True, False, False, True]


def test_raise_keeps_the_gradients_and_carries_the_origin():
    net = Net()
    optimizer = guarded(net, on_nonfinite="raise")
    with pytest.raises(nanscan.NonFiniteError, match="made by SqrtBackward0") as caught:
        step(net, optimizer, "backward")
    assert caught.value.origin.op == caught.value.report.origin.op == "SqrtBackward0"
    assert net.fc.weight.grad is not None and net.fc.weight.grad.isnan().any()


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
def test_the_replay_has_the_same_dropout_and_the_same_autocast():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            h = self.fc(F.dropout(x, 0.5))
            return h / (h.dtype == torch.bfloat16)

    torch.manual_seed(0)
    net = Net()
    optimizer = guarded(net)
    seen = []
    net.fc.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach().clone()))
    net.fc.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (net(torch.ones(2, 64)) * float("nan")).sum()
    loss.backward()
    optimizer.step()
    assert len(seen) == 4 and torch.equal(seen[0], seen[2]) and seen[1] == seen[3] == torch.bfloat16


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
def test_a_fault_of_an_earlier_micro_batch_is_found():
    net = Net()
    optimizer = guarded(net)
    for fault in ("backward", None, None):
        net(torch.randn(3, 4), fault=fault).sum().backward()
    optimizer.step()
    assert optimizer.last_report.origin.op == "SqrtBackward0"


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
def test_more_micro_batches_than_can_be_run_again_are_said_to_be_too_many():
    net = Net()
    optimizer = guarded(net)
    for i in range(10):
        net(torch.randn(3, 4), fault=None if i else "backward").sum().backward()
    optimizer.step()
    hint = optimizer.last_report.origin.hint
    assert "last 8 forwards" in hint and "optimizer.check_microbatch(loss)" in hint


def test_a_model_of_which_only_parts_are_called_is_said_to_be_none_to_run_again():
    parts = nn.ModuleDict({"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 1)})
    optimizer = guarded(parts)
    for expected in (True, False):
        parts["decoder"](parts["encoder"](torch.full((1, 2), float("nan")))).sum().backward()
        with pytest.warns(nanscan.NonFiniteWarning) as seen:
            optimizer.step()
        assert any("Give wrap the module that you call" in str(w.message) for w in seen) is expected
        assert optimizer.last_report.origin is None
        for weight in parts.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()  # which ends the run of skips


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
def test_a_fault_of_the_loss_function_is_said_to_be_one():
    net = Net()
    optimizer = guarded(net)
    loss = net(torch.randn(3, 4)).sum() / torch.zeros(())
    loss.backward()
    optimizer.observe(loss)
    optimizer.step()
    origin = optimizer.last_report.origin
    assert origin.op == "loss" and "DivBackward0" in origin.note and "nanscan.trace" in origin.hint


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
def test_a_loss_function_that_fails_in_consecutive_steps_is_named_at_the_second():
    net = Net()
    optimizer = nanscan.wrap(torch.optim.SGD(net.parameters(), lr=0.1), net, find_origin=True)
    for count in (0, 0, 0):
        loss = net(torch.randn(3, 4)).sum() * 0 / torch.tensor(count)
        loss.backward()
        optimizer.observe(loss)
        optimizer.step()
    assert [report.origin.op if report.origin else None for report in optimizer.history] == ["loss", "aten.div", None]


def test_the_next_fault_of_the_loss_function_is_named_and_results_stay_the_same():
    results = []
    for find in (False, True):
        torch.manual_seed(0)
        net = Net()
        optimizer = nanscan.wrap(torch.optim.SGD(net.parameters(), lr=0.1), net, find_origin=find)
        for count in (1.0, 0.0, 1.0, 1.0, 0.0, 1.0):
            optimizer.zero_grad()
            loss = net(torch.randn(3, 4)).sum() * 0 / torch.tensor(count)  # the loss
            loss.backward()
            optimizer.step()
            net.eval()
            net(torch.randn(3, 4))
            net.train()
        results.append(list(net.state_dict().values()))
    assert [None if r.origin is None else r.origin.op for r in optimizer.history] == [
        None, "loss", None, None, "aten.div", None,
    ]  # fmt: skip
    assert optimizer.history[4].origin.code.endswith("# the loss")
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
def test_a_gradient_penalty_that_fails_in_consecutive_steps_is_named_at_the_second():
    net = nn.Linear(4, 1)
    nn.init.zeros_(net.weight)
    optimizer = guarded(net)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(3, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        ((gradient.square().sum(1).sqrt() - 1) ** 2).mean().backward()  # the penalty
        optimizer.step()
    first, origin = (report.origin for report in optimizer.history)
    assert (first.op, first.phase) == ("loss", "backward") and "a penalty on weights or gradients" in first.hint
    assert origin.op == "SqrtBackward0" and origin.code.endswith("# the penalty")


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
def test_a_mask_that_the_model_returns_and_the_loss_takes_in_is_said_to_be_one():
    net = nn.Linear(4, 3)
    hide = net.register_forward_hook(lambda module, args, out: out.masked_fill(torch.tensor([True] * 3), -float("inf")))
    optimizer = guarded(net)
    loss = net(torch.randn(1, 4)).logsumexp(-1).mean()
    loss.backward()
    optimizer.observe(loss)
    optimizer.step()
    hide.remove()
    assert "the model's output holds 3 Inf that were written on purpose" in optimizer.last_report.origin.hint


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
def test_a_loss_scale_that_float16_cannot_hold_is_said_to_be_one():
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer, scaler = guarded(net), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(net(torch.randn(2, 4)), torch.tensor([0, 1]))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    hint = optimizer.last_report.origin.hint
    assert "scale of the loss is too large" in hint and "GradScaler skips this step and lowers it" in hint


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
def test_an_input_changed_after_the_forward_is_noted():
    net = Net()
    optimizer = guarded(net)
    x = torch.randn(3, 4)
    net(x, fault="backward").sum().backward()
    x.mul_(2)
    optimizer.step()
    assert "changed in place" in optimizer.last_report.origin.note


@pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")
def test_a_closure_finds_it_too():
    net = Net()
    optimizer = guarded(net)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.randn(3, 4), fault="forward").sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.last_report.origin.op == "aten.div"


def test_copies_and_pickles_of_the_model_do_not_record():
    net = Net()
    optimizer = guarded(net)
    step(net, optimizer)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other(torch.ones(3, 4)).shape == (3, 4)
        assert len(optimizer._recorder._calls) == 1
    assert copy.deepcopy(optimizer)._recorder is None


def test_the_model_does_not_keep_the_optimizer_nor_old_inputs():
    net = Net()
    optimizer = guarded(net)
    step(net, optimizer)
    ref = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ref() is None
    net(torch.ones(3, 4))
    assert not net._forward_hooks and not net._forward_pre_hooks


def test_it_needs_the_model():
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="find_origin=True needs the model"):
        nanscan.wrap(torch.optim.SGD([weight], lr=0.1), find_origin=True)
