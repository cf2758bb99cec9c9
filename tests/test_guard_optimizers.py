"""Every optimizer of torch.optim, in every variant that runs on a CPU, guarded and bare side by side."""

from __future__ import annotations

import pytest
import torch

import nanscan
from nanscan.errors import NonFiniteWarning
from tests.guarded import FUSED, INF, NAN, STEPPING, Variant, bits, make_params, set_grads, whole_state

every_variant = pytest.mark.parametrize("variant", STEPPING, ids=str)
pytestmark = [
    pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning"),
    pytest.mark.usefixtures("either_way_of_clipping"),
]


def pair(variant: Variant, **options):
    """(parameters, bare optimizer) and (parameters, guarded optimizer), equal at the start."""
    mine, theirs = make_params(variant.leaf), make_params(variant.leaf)
    return (theirs, variant.make(theirs)), (mine, nanscan.wrap(variant.make(mine), **options))


def run(params, optimizer, variant: Variant, steps, bad_at=(), bad=NAN):
    for step in steps:
        set_grads(params, step, variant.sparse, bad if step in bad_at else None)
        optimizer.step()


@every_variant
def test_good_steps_equal_the_bare_optimizer_bit_for_bit(variant):
    (theirs, bare), (mine, guarded) = pair(variant)
    run(theirs, bare, variant, range(4))
    run(mine, guarded, variant, range(4))
    assert whole_state(mine, guarded) == whole_state(theirs, bare)
    assert [report.action for report in guarded.history] == ["step"] * 4
    assert bits([p.grad for p in mine]) == bits([p.grad for p in theirs])


@every_variant
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_skipped_step_leaves_weights_and_state_bit_identical(variant, bad):
    _, (mine, guarded) = pair(variant, clip_norm=1.0)
    run(mine, guarded, variant, range(2))
    before = whole_state(mine, guarded)
    run(mine, guarded, variant, [2], bad_at=[2], bad=bad)
    assert whole_state(mine, guarded) == before
    assert guarded.step_was_skipped
    assert [row.name for row in guarded.last_report.bad] == ["group0.param1"]
    assert guarded.last_report.bad[0].first_bad == (1, 0)
    assert all(p.grad is None for p in mine)


@every_variant
@pytest.mark.parametrize("bad_at", [[0], [2], [0, 1, 2]], ids=str)
def test_run_with_skips_equals_the_bare_run_without_those_steps(variant, bad_at):
    (theirs, bare), (mine, guarded) = pair(variant)
    run(mine, guarded, variant, range(6), bad_at=bad_at)
    run(theirs, bare, variant, [step for step in range(6) if step not in bad_at])
    assert whole_state(mine, guarded) == whole_state(theirs, bare)
    assert guarded.skipped_steps == len(bad_at)
    assert guarded.first_skipped_step == bad_at[0]


@pytest.mark.parametrize("variant", [v for v in STEPPING if not v.sparse], ids=str)  # torch can't clip sparse ones
def test_clipped_steps_equal_torch_clipping_and_stepping(variant):
    (theirs, bare), (mine, guarded) = pair(variant, clip_norm=0.5)
    for step in range(4):
        set_grads(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        bare.step()
        set_grads(mine, step)
        guarded.step()
        assert guarded.last_report.norm == pytest.approx(norm.item(), rel=1e-6)
        assert guarded.last_report.clip_factor == pytest.approx(0.5 / (norm.item() + 1e-6), rel=1e-6)
        torch.testing.assert_close([p.grad for p in mine], [p.grad for p in theirs], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_sparse_steps_are_clipped_to_the_norm_of_the_coalesced_values():
    weight = torch.nn.Parameter(torch.zeros(5, 2))
    optimizer = nanscan.wrap(torch.optim.SparseAdam([weight]), clip_norm=1.0)
    weight.grad = torch.sparse_coo_tensor([[3, 3]], [[1.0, 1.0], [1.0, 1.0]], (5, 2))
    optimizer.step()
    assert optimizer.last_report.norm == pytest.approx(8**0.5)
    assert weight.grad.coalesce().values().norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("variant", FUSED, ids=str)
def test_fused_optimizer_that_clips_by_itself_keeps_no_flags_afterwards(variant):
    _, (mine, guarded) = pair(variant, clip_norm=0.5)
    run(mine, guarded, variant, range(2))
    assert not {"grad_scale", "found_inf"} & vars(guarded.optimizer).keys()


@every_variant
def test_zero_replaces_only_the_bad_elements(variant):
    (theirs, bare), (mine, guarded) = pair(variant, on_nonfinite="zero")
    for step in range(3):
        set_grads(theirs, step, variant.sparse, 0.0 if step == 1 else None)
        bare.step()
    run(mine, guarded, variant, range(3), bad_at=[1])
    assert bits(mine) == bits(theirs)
    assert guarded.skipped_steps == 0
    assert [report.action for report in guarded.history] == ["step", "zero", "step"]


@every_variant
def test_warn_steps_as_the_bare_optimizer_does_and_says_so(variant):
    (theirs, bare), (mine, guarded) = pair(variant, on_nonfinite="warn", clip_norm=0.1)
    run(theirs, bare, variant, [0], bad_at=[0])
    with pytest.warns(NonFiniteWarning, match="step 0 taken although grad of 'group0.param1' has 1 NaN, 0 Inf of 15"):
        run(mine, guarded, variant, [0], bad_at=[0])
    assert whole_state(mine, guarded) == whole_state(theirs, bare)
    assert (guarded.last_report.action, guarded.last_report.skipped) == ("warn", False)


@every_variant
def test_raise_leaves_weights_state_and_gradients(variant):
    _, (mine, guarded) = pair(variant, on_nonfinite="raise", clip_norm=0.1)
    run(mine, guarded, variant, [0])
    before = whole_state(mine, guarded)
    set_grads(mine, 1, variant.sparse, NAN)
    grads = bits([p.grad for p in mine])
    with pytest.raises(
        nanscan.NonFiniteError, match=r"grad of 'group0.param1' has 1 NaN, 0 Inf of 15 \(first at \[1, 0\]\)"
    ):
        guarded.step()
    assert whole_state(mine, guarded) == before
    assert bits([p.grad for p in mine]) == grads


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adadelta", "Adamax", "RMSprop", "Rprop", "ASGD"])
def test_capturable_variants_skip_and_step_on_cuda(name):
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = nanscan.wrap(getattr(torch.optim, name)([weight], capturable=True))
    weight.grad = torch.ones(4, device="cuda")
    optimizer.step()
    before = bits(weight)
    weight.grad = torch.full((4,), NAN, device="cuda")
    optimizer.step()
    assert optimizer.step_was_skipped
    assert bits(weight) == before
