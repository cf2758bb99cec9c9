"""Closures: optimizers that evaluate once, LBFGS, and third-party ones that evaluate in the middle of a step."""

from __future__ import annotations

import copy
import pickle
from collections import deque

import pytest
import torch

import nanscan
from tests.guarded import NAN, VARIANTS, bits, make_params, set_grads, whole_state

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
LBFGS = [v for v in VARIANTS if v.closure]
ONCE = [v for v in VARIANTS if not v.closure and v.leaf]


class Rosenbrock:
    """A loss over one parameter whose evaluation number `bad_at` (from 0, over all steps) is NaN."""

    def __init__(self, optimizer, weight, bad_at=None):
        self.optimizer, self.weight, self.bad_at, self.calls = optimizer, weight, bad_at, 0

    def __call__(self):
        self.optimizer.zero_grad()
        x, y = self.weight
        loss = (1 - x) ** 2 + 100 * (y - x**2) ** 2
        if self.calls == self.bad_at:
            loss = loss * NAN
        self.calls += 1
        loss.backward()
        return loss


def rosenbrock(variant, bad_at=None, wrapped=True, **options):
    weight = torch.nn.Parameter(torch.tensor([-1.2, 1.0]))
    optimizer = variant.make([weight])
    if wrapped:
        optimizer = nanscan.wrap(optimizer, **options)
    return weight, optimizer, Rosenbrock(optimizer, weight, bad_at)


@pytest.mark.parametrize("variant", LBFGS, ids=str)
def test_lbfgs_equals_the_bare_one_bit_for_bit(variant):
    theirs, bare, their_closure = rosenbrock(variant, wrapped=False)
    mine, guarded, closure = rosenbrock(variant)
    for _ in range(4):
        expected, loss = bare.step(their_closure), guarded.step(closure)
        assert bits(loss) == bits(expected)
    assert whole_state([mine], guarded) == whole_state([theirs], bare)
    assert closure.calls == their_closure.calls > 4


@pytest.mark.parametrize("variant", LBFGS, ids=str)
@pytest.mark.parametrize("evaluation", [0, 1, 3])
def test_nan_in_any_evaluation_restores_lbfgs_weights_and_history(variant, evaluation):
    mine, guarded, closure = rosenbrock(variant)
    for _ in range(2):
        guarded.step(closure)
    before = whole_state([mine], guarded)
    closure.bad_at = closure.calls + evaluation
    loss = guarded.step(closure)
    assert closure.calls == closure.bad_at + 1, "the step should end at the bad evaluation"
    assert whole_state([mine], guarded) == before
    assert torch.isnan(loss)
    assert guarded.step_was_skipped
    assert [row.name for row in guarded.last_report.bad] == ["group0.param0", "loss"]
    assert mine.grad is None
    guarded.step(closure)
    assert not guarded.step_was_skipped
    assert bits(mine) != before[0][0]


def test_nan_in_the_first_evaluation_of_lbfgs_runs_no_hook():
    _, guarded, closure = rosenbrock(LBFGS[0], bad_at=0)
    called = []
    guarded.register_step_pre_hook(lambda *_: called.append("pre"))
    guarded.register_step_post_hook(lambda *_: called.append("post"))
    guarded.step(closure)
    assert called == []
    guarded.step(closure)
    assert called == ["pre", "post"]


def test_lbfgs_raise_restores_and_raises():
    mine, guarded, closure = rosenbrock(LBFGS[0], bad_at=2, on_nonfinite="raise")
    before = whole_state([mine], guarded)
    with pytest.raises(nanscan.NonFiniteError, match="group0.param0"):
        guarded.step(closure)
    assert whole_state([mine], guarded) == before
    assert mine.grad is not None


def test_lbfgs_clips_each_evaluation():
    mine, guarded, closure = rosenbrock(LBFGS[0], clip_norm=1.0)
    norms = []
    original = guarded.optimizer._gather_flat_grad
    guarded.optimizer._gather_flat_grad = lambda: norms.append(original().norm().item()) or original()
    guarded.step(closure)
    assert len(norms) > 1
    assert all(norm <= 1.0 for norm in norms)
    assert guarded.last_report.norm > 1.0


def test_lbfgs_update_that_makes_nan_of_finite_gradients_is_undone():
    weight = torch.nn.Parameter(torch.ones(1))
    guarded = nanscan.wrap(torch.optim.LBFGS([weight], lr=3e38, max_iter=1))

    def closure():
        guarded.zero_grad()
        loss = (weight * 1e30).sum()
        loss.backward()
        return loss

    guarded.optimizer.param_groups[0]["lr"] = float("inf")
    guarded.step(closure)
    assert weight.item() == 1.0
    assert guarded.step_was_skipped
    assert guarded.last_report.finite
    assert [row.name for row in guarded.last_report.parameters][0] == "group0.param0"


@pytest.mark.parametrize("variant", ONCE, ids=str)
def test_closure_of_an_optimizer_that_evaluates_once(variant):
    runs = []
    for wrapped in (False, True):
        params = make_params()
        optimizer = variant.make(params)
        optimizer = nanscan.wrap(optimizer) if wrapped else optimizer
        calls = []

        def closure(params=params, calls=calls):
            calls.append(torch.is_grad_enabled())
            set_grads(params, len(calls), variant.sparse)
            return torch.tensor(7.0)

        losses = [optimizer.step(closure) for _ in range(3)]
        assert calls == [True] * 3
        assert losses == [torch.tensor(7.0)] * 3
        runs.append(whole_state(params, optimizer))
    assert runs[0] == runs[1]


def test_nan_loss_of_a_closure_skips_although_the_gradients_are_zero():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0, weight_decay=0.1))

    def closure():
        weight.grad = torch.zeros(2)
        return torch.tensor(NAN)

    assert torch.isnan(optimizer.step(closure))
    assert weight.tolist() == [1.0, 1.0]
    assert [row.name for row in optimizer.last_report.bad] == ["loss"]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as third parties write it: perturbs the weights, then calls the closure."""

    def __init__(self, params, base, rho=1e-4, **options):
        super().__init__(params, dict(rho=rho, **options))
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.perturbations = 0

    @torch.no_grad()
    def step(self, closure=None):
        if not any(p.grad is not None for g in self.param_groups for p in g["params"]):
            torch.enable_grad()(closure)()
        self.perturbations += 1
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=group["rho"])
        loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        return loss


def sam(bad_at=None, wrapped=True):
    weight = torch.nn.Parameter(torch.tensor([-1.2, 1.0]))
    optimizer = SAM([weight], torch.optim.Adam, lr=0.1)
    optimizer = nanscan.wrap(optimizer) if wrapped else optimizer
    return weight, optimizer, Rosenbrock(optimizer, weight, bad_at)


def test_sam_equals_the_bare_one_bit_for_bit():
    theirs, bare, their_closure = sam(wrapped=False)
    mine, guarded, closure = sam()
    for _ in range(3):
        bare.step(their_closure)
        guarded.step(closure)
    assert bits(mine) == bits(theirs)
    assert closure.calls == their_closure.calls


@pytest.mark.parametrize("evaluation", [0, 1])
def test_nan_while_sam_has_perturbed_the_weights_restores_everything(evaluation):
    mine, guarded, closure = sam()
    guarded.step(closure)
    guarded.zero_grad()

    def everything():
        inner = guarded.optimizer
        return whole_state([mine], guarded), bits(inner.base_optimizer.state_dict()), inner.perturbations

    before = everything()
    closure.bad_at = closure.calls + evaluation
    guarded.step(closure)
    assert guarded.step_was_skipped
    assert everything() == before


class Extragradient(torch.optim.Optimizer):
    """A third-party optimizer that steps with its base optimizer, evaluates, and steps again."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.base = torch.optim.SGD(self.param_groups, **options)

    def step(self, closure=None):
        for _ in range(2):
            loss = closure()
            self.base.step()
        return loss


def test_state_of_a_base_optimizer_that_stepped_already_is_restored():
    weight = torch.nn.Parameter(torch.tensor([-1.2, 1.0]))
    guarded = nanscan.wrap(Extragradient([weight], lr=1e-4, momentum=0.9))
    closure = Rosenbrock(guarded, weight)
    guarded.step(closure)
    before = bits(weight), bits(guarded.optimizer.base.state_dict())
    closure.bad_at = 3
    guarded.step(closure)
    assert guarded.step_was_skipped
    assert (bits(weight), bits(guarded.optimizer.base.state_dict())) == before


class OnePerLayer(torch.optim.Optimizer):
    """A third-party optimizer that holds a list of optimizers and steps with them before it evaluates again."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.parts = [torch.optim.Adam([p], **options) for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        for part in self.parts:
            part.step()
        return None if closure is None else closure()


def test_state_of_optimizers_in_a_list_is_restored_and_goes_back():
    model = torch.nn.Linear(1, 1)
    guarded = nanscan.wrap(OnePerLayer(model.parameters(), lr=0.1), model)

    def closure(value):
        guarded.zero_grad()
        return (model(torch.full((1, 1), value)).sum() ** 2).backward()

    closure(1.0)
    guarded.step(lambda: closure(1.0))
    before = [bits(part.state_dict()) for part in guarded.parts]
    guarded.step(lambda: closure(NAN))
    assert guarded.step_was_skipped
    assert [bits(part.state_dict()) for part in guarded.parts] == before
    recovery = nanscan.Recovery(model, guarded)
    guarded.parts[0].state[model.weight]["exp_avg"].fill_(NAN)
    closure(NAN)
    guarded.step()
    assert recovery.step()
    assert guarded.parts[0].state[model.weight]["exp_avg"].isfinite().all()


class Swallows(torch.optim.SGD):
    """A third-party optimizer that moves the weights first and catches whatever its closure raises."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(1.0)
        try:
            return closure()
        except Exception:
            return None


def test_optimizer_that_catches_exceptions_does_not_stop_the_way_back():
    weight = torch.nn.Parameter(torch.zeros(1))
    guarded = nanscan.wrap(Swallows([weight], lr=0.1))

    def closure():
        weight.grad = torch.tensor([NAN])
        return torch.tensor(1.0)

    guarded.step(closure)
    assert weight.item() == 0.0
    assert guarded.step_was_skipped


class Accelerated(torch.optim.SGD):
    """A third-party optimizer that keeps counters, averages and a cache beside its state, and moves them first."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.counters = {"tries": 0}
        self.past = deque(maxlen=3)
        self.order = [p for group in self.param_groups for p in group["params"]]
        self.averages = [p.detach().clone() for p in self.order]
        self.best = None

    def step(self, closure=None):
        self.counters["tries"] += 1
        self.past.append(self.counters["tries"])
        self.best = torch.ones(1)
        self.ready = True
        for average in self.averages:
            average.mul_(2.0)
        loss = closure()
        super().step()
        return loss


def test_what_an_optimizer_keeps_in_containers_beside_its_state_is_restored():
    weight = torch.nn.Parameter(torch.ones(1))
    inner = Accelerated([weight], lr=0.1)
    guarded, counters = nanscan.wrap(inner), inner.counters

    def closure():
        weight.grad = torch.tensor([NAN])
        return torch.tensor(1.0)

    guarded.step(closure)
    assert guarded.step_was_skipped
    assert (inner.counters, list(inner.past), inner.past.maxlen, inner.best) == ({"tries": 0}, [], 3, None)
    assert [average.item() for average in inner.averages] == [1.0]
    assert not hasattr(inner, "ready")
    assert inner.counters is counters
    assert inner.order[0] is weight


class Quantized(torch.Tensor):
    """State as torchao keeps it: a wrapper around codes and a scale, which knows few operators of PyTorch."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(**parts)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        raise NotImplementedError(f"{function} of {types}")


class Low(torch.optim.SGD):
    """A third-party optimizer with such a state."""

    def step(self, closure=None):
        loss = None
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault(
                    "average", Quantized(torch.zeros(2, dtype=torch.uint8), torch.ones(1))
                )
                average.codes.add_(1)
                loss = None if closure is None else closure()
                average.scale.mul_(p.grad.norm())
        super().step()
        return loss


def test_state_in_a_wrapper_of_codes_and_scale_is_restored_and_goes_back():
    weight = torch.nn.Parameter(torch.ones(2))
    model = torch.nn.ParameterList([weight])
    guarded = nanscan.wrap(Low([weight], lr=0.1), model)

    def closure(value):
        weight.grad = torch.full((2,), value)
        return torch.tensor(1.0)

    guarded.step(lambda: closure(1.0))
    before = guarded.state[weight]["average"].codes.tolist(), guarded.state[weight]["average"].scale.tolist()
    guarded.step(lambda: closure(NAN))
    assert guarded.step_was_skipped
    average = guarded.state[weight]["average"]
    assert (type(average), average.codes.tolist(), average.scale.tolist()) == (Quantized, *before)
    recovery = nanscan.Recovery(model, guarded)
    average.scale.fill_(NAN)
    closure(NAN)
    guarded.step()
    assert recovery.step()
    average = guarded.state[weight]["average"]
    assert (average.codes.tolist(), average.scale.tolist()) == before
    assert "scale of average of '0'" in recovery.rollbacks[0].reason


class NeverEvaluates(torch.optim.SGD):
    """A third-party optimizer that ignores its closure and uses the gradients that are there."""

    def step(self, closure=None):
        return super().step()


def test_unknown_optimizer_that_never_calls_the_closure_is_checked_afterwards():
    weight = torch.nn.Parameter(torch.zeros(1))
    guarded = nanscan.wrap(NeverEvaluates([weight], lr=0.1, momentum=0.9))
    weight.grad = torch.tensor([NAN])
    guarded.step(lambda: None)
    assert weight.item() == 0.0
    assert len(guarded.state) == 0
    assert guarded.step_was_skipped


def test_closure_error_passes_through_and_is_not_a_step():
    weight, guarded, _ = rosenbrock(LBFGS[0])

    def closure():
        raise KeyError("my bug")

    with pytest.raises(KeyError, match="my bug"):
        guarded.step(closure)
    assert len(guarded.history) == 0


def test_closure_with_a_gradient_scaler_is_refused():
    weight, guarded, closure = rosenbrock(ONCE[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match="a closure can't be used with a GradScaler"):
        scaler.step(guarded, closure)


@pytest.mark.parametrize("action", ["zero", "warn"])
def test_zero_and_warn_go_on_in_the_middle_of_lbfgs(action):
    mine, guarded, closure = rosenbrock(LBFGS[0], bad_at=1, on_nonfinite=action)
    before = bits(mine)
    guarded.step(closure)
    if action == "zero":  # torch's LBFGS carries on from a gradient of zeros
        assert bits(mine) != before
        assert torch.isfinite(mine).all()
    assert guarded.skipped_steps == 0
    assert guarded.last_report.action == action


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deep", "pickle"]
)
def test_copy_of_lbfgs_goes_on_although_torch_leaves_its_list_of_parameters_out(copied):
    mine, guarded, closure = rosenbrock(LBFGS[0])
    guarded.step(closure)
    weight, other = copied((mine, guarded))
    assert other.step(Rosenbrock(other, weight)) == guarded.step(closure)
    assert whole_state([weight], other) == whole_state([mine], guarded)
    assert other._numel_cache == 2
    (problem,) = nanscan.find_unpicklable(other.optimizer)
    assert problem.severity == "loss" and "_params, _numel_cache would not be saved" in problem.reason
