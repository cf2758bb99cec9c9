"""The deferred scan: flags and clip factor that a fused optimizer reads, without one wait for the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanscan.engine import Engine, reference
from tests.engine.test_apply import group

NAN, INF = math.nan, math.inf


class NoWait(TorchDispatchMode):
    """Fails on every operator that would make the host wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.WAITS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_the_watch_for_waits_sees_one() -> None:
    with pytest.raises(AssertionError, match="waits for the device"), NoWait():
        torch.ones(1).item()


def test_launching_and_clearing_never_wait_for_the_device(engine: Engine) -> None:
    grads = [
        torch.ones(3),
        torch.ones(70_000).bfloat16(),
        torch.ones(2, 3, dtype=torch.complex64),
        torch.ones(1).expand(4),
    ]
    groups = group(*grads)
    engine.launch_grads(groups, clip_norm=1.0)  # what is found out once about a device is known now
    with NoWait():
        scan = engine.launch_grads(
            groups, clip_norm=1.0, extra=[torch.tensor(NAN)], grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0)
        )
        engine.clear_grads_if(groups, scan.found_inf)
    assert scan.found_inf.item() == 1.0 and not any(p.grad.any() for p in groups[0]["params"])


def test_gradients_of_a_dtype_that_only_pytorch_reads_are_cleared(engine: Engine) -> None:
    groups = group(torch.ones(3, dtype=torch.complex32), torch.ones(2))
    engine.clear_grads_if(groups, torch.tensor(1.0))
    assert not any(p.grad.any() for p in groups[0]["params"])


@pytest.mark.parametrize(
    ("grads", "separate"),
    [
        ((torch.ones(3), torch.ones(3)), True),
        ((torch.ones(3),) * 2, False),
        ((torch.ones(4)[::2], torch.ones(3)), False),
    ],
    ids=["each its own", "shared", "with gaps"],
)
def test_launch_says_whether_each_gradient_has_flat_memory_of_its_own(
    engine: Engine, grads: tuple[torch.Tensor, ...], separate: bool
) -> None:
    assert engine.launch_grads(group(*grads), clip_norm=1.0).separate is separate


@pytest.mark.parametrize("incoming", [None, 0.0, 1.0, 2.0, NAN])
@pytest.mark.parametrize("bad", [None, NAN, INF, -INF])
@pytest.mark.parametrize("where", ["grads", "extra"])
def test_found_inf_is_exactly_zero_or_one(
    engine: Engine, incoming: float | None, bad: float | None, where: str
) -> None:
    grad, loss = torch.ones(40), torch.tensor(0.5)
    if bad is not None:
        (grad if where == "grads" else loss).view(-1)[-1] = bad
    flag = None if incoming is None else torch.tensor([incoming])
    scan = engine.launch_grads(group(grad, torch.ones(3)), clip_norm=1.0, extra=[loss], found_inf=flag)
    want = bad is not None or incoming is not None and not incoming <= 0
    assert scan.found_inf.dtype is torch.float32 and scan.found_inf.shape == ()
    assert scan.found_inf.item() == float(want)
    assert scan.result().finite is (bad is None)


@pytest.mark.parametrize("incoming", [None, 1.0, 1024.0, 65536.0])
@pytest.mark.parametrize("clip_norm", [None, 0.5, 5.0, 1e9])
def test_grad_scale_is_the_incoming_scale_times_the_clip_divisor(
    engine: Engine, incoming: float | None, clip_norm: float | None
) -> None:
    unscaled = torch.tensor([3.0, 4.0, 12.0])  # norm 13
    scale = 1.0 if incoming is None else incoming
    flag = None if incoming is None else torch.tensor(incoming)
    scan = engine.launch_grads(group(unscaled[:2] * scale, unscaled[2:] * scale), clip_norm=clip_norm, grad_scale=flag)
    divisor = 1.0 if clip_norm is None else max(1.0, (13.0 + 1e-6) / clip_norm)
    assert scan.grad_scale.dtype is torch.float32 and scan.grad_scale.shape == ()
    assert scan.grad_scale.item() == pytest.approx(scale * divisor, rel=2e-7)
    assert scan.result().norm == pytest.approx(13.0 * scale, rel=1e-12)


def test_grad_scale_is_finite_whatever_the_gradients_hold(engine: Engine) -> None:
    for values in ([NAN, 1.0], [INF, 1.0], [3e38, 3e38, 3e38, 3e38], [1e-45], [0.0]):
        scan = engine.launch_grads(group(torch.tensor(values)), clip_norm=1.0, grad_scale=torch.tensor(65536.0))
        assert math.isfinite(scan.grad_scale.item()) and scan.grad_scale.item() >= 65536.0, values


def test_the_result_is_that_of_a_scan_at_the_launch(engine: Engine) -> None:
    grads = [
        torch.randn(50, 3).t(),
        torch.tensor([1.0, NAN, INF]),
        torch.zeros(0),
        torch.tensor(2.0, dtype=torch.float64),
    ]
    grads[0][1, 7] = INF
    extra = [torch.tensor(NAN)]
    groups = group(*grads, None, grads[1])
    want = reference.scan([p.grad for p in groups[0]["params"]], extra)
    scan = engine.launch_grads(groups, clip_norm=None, extra=extra)
    engine.clear_grads_if(groups, scan.found_inf)
    got = scan.result()
    assert scan.ready() and scan.result() is got
    for mine, right in zip(got.rows(), want.rows(), strict=True):
        assert mine == right._replace(finite_norm=pytest.approx(right.finite_norm, rel=1e-12)), (mine, right)
    assert (got.finite, got.nan_count, got.inf_count, got.numel, got.count) == (False, 2, 2, 154, 4)
    assert math.isnan(got.norm) and got.finite_norm == pytest.approx(want.finite_norm, rel=1e-12)


def test_no_gradients_at_all_is_a_healthy_launch(engine: Engine) -> None:
    for groups in ([], group(None, None), group(torch.zeros(0))):
        scan = engine.launch_grads(groups, clip_norm=1.0, grad_scale=torch.tensor(8.0))
        assert (scan.found_inf.item(), scan.grad_scale.item(), scan.result().norm) == (0.0, 8.0, 0.0)


def test_an_overlapping_gradient_is_dense_before_a_fused_kernel_reads_it(engine: Engine) -> None:
    groups = group(torch.ones(1).expand(4))
    engine.launch_grads(groups, clip_norm=1.0)
    assert groups[0]["params"][0].grad.stride() == (1,)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_optimizer_that_reads_the_flags_steps_as_if_clipped(engine: Engine, make: Any) -> None:
    torch.manual_seed(0)
    start, grads = [torch.randn(5, 3), torch.randn(7)], [torch.randn(5, 3), torch.randn(7)]
    mine = [torch.nn.Parameter(t.clone()) for t in start]
    plain = [torch.nn.Parameter(t.clone()) for t in start]
    for params in (mine, plain):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
    optimizer, other = make(mine, lr=0.1, fused=True), make(plain, lr=0.1)
    scan = engine.launch_grads(optimizer.param_groups, clip_norm=0.5)
    optimizer.found_inf, optimizer.grad_scale = scan.found_inf, scan.grad_scale
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(plain, 0.5)
    other.step()
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_norm_and_divisor_hold_at_the_ends_of_float64(engine: Engine, clip_norm: float | None) -> None:
    for size in (1e300, 1e-300, 5e-324):
        scan = engine.launch_grads(group(torch.full((4,), size, dtype=torch.float64)), clip_norm=clip_norm)
        assert scan.result().norm == 2 * size
        largest = torch.finfo(torch.float32).max
        want = min(max(1.0, 2 * size), largest) if clip_norm else 1.0
        assert scan.grad_scale.item() == pytest.approx(want, rel=2e-6)
