"""PyTorch's own functions that the engine calls instead of `.grad`: they are found, and no answer depends on it."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from nanscan import engine
from nanscan.engine.native import NativeEngine

# Scans the same gradients in a process that has not looked for the shortcuts, and again when it has found them.
SCRIPT = """
import math, sys
import torch
from nanscan.engine import build
from nanscan.engine.native import NativeEngine
from nanscan.engine.tensors import resolve_at
from tests.engine.make import Subclass

class Late(NativeEngine):
    def _learn_shortcuts(self):
        pass

def with_grad(grad, of=torch.nn.Parameter):
    parameter = of(torch.zeros(tuple(grad.shape), dtype=grad.dtype))
    parameter.grad = grad
    return parameter

def lists():
    torch.manual_seed(0)
    dense = torch.randn(7, 5)
    tied = torch.randn(64)
    followed = torch.ones(3, requires_grad=True)
    yield [with_grad(torch.randn(64)) for _ in range(40)]
    odd = [torch.randn(3, dtype=d) for d in (torch.float16, torch.bfloat16, torch.float64, torch.complex64)]
    odd += [dense, dense.t(), dense[:, ::2], torch.ones(()), torch.ones(0, 3), torch.ones(1).expand(4), followed * 2]
    odd += [torch.full((2,), math.nan), torch.full((3,), math.inf), torch.eye(3).to_sparse(), Subclass(torch.ones(2))]
    odd = [with_grad(g) for g in odd] + [with_grad(tied), with_grad(tied), torch.nn.Parameter(torch.ones(2))]
    odd += [with_grad(torch.ones(2), of=lambda t: t), with_grad(torch.ones(2), of=lambda t: Subclass(t))]
    yield odd
    yield [p for p in odd for _ in range(2)] * 3

class Holder:
    grad = None

Late_ = Late(build.load_native())
c = Late_._c

def answers():
    for params in LISTS:
        groups = [{"params": params}, {"params": tuple(params[::-1])}]
        scan = c.scan_gradients(groups, [], resolve_at, None, math.inf, None, None)
        yield [tuple(map(repr, row)) for row in scan.rows()], scan.separate, scan.row_major, scan.numel, scan.signature

def refused():
    for params in ([with_grad(torch.ones(2)), 3], [Holder()], [object()] ):
        try:
            print(c.scan_gradients([{"params": params}], [], resolve_at, None, math.inf, None, None).count)
        except Exception as error:
            yield type(error), str(error).replace(hex(id(params[0])), "")

def counts():
    held = [sys.getrefcount(p.grad) for params in LISTS for p in params if p.grad is not None]
    return held, sys.getrefcount(None) // 1000

LISTS = list(lists())
before, no, held = list(answers()), list(refused()), counts()
followed = [{"params": [with_grad(torch.ones(3, requires_grad=True) * 2)]}]
assert c.scale_gradients(followed, 1.0, math.inf, resolve_at) is False
NativeEngine._learn_shortcuts(Late_)
found = c.learn_shortcuts(LISTS[0][0])
for _ in range(2000):
    list(answers())
assert list(answers()) == before and list(refused()) == no and len(no) >= 2, (before, no)
assert c.scale_gradients(followed, 1.0, math.inf, resolve_at) is False, "autograd follows it"
assert c.scale_gradients([{"params": LISTS[0]}], 1.0, math.inf, resolve_at) is True
assert counts() == held, (counts(), held)
print("found" if found else "not found")
"""


def test_scan_says_the_same_with_shortcuts_and_without() -> None:
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1:] == ["found"], done.stdout


def test_gradient_list_is_reread_at_every_scan() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(40)]
    groups = [{"params": parameters}]
    assert isinstance(engine.active_engine(), NativeEngine)
    for value in (1.0, 2.0):
        for parameter in parameters:
            parameter.grad = torch.full((4,), value)
        assert engine.scan_grads(groups).inf_norm == value
        parameters[17].grad = None
        assert engine.scan_grads(groups).count == 39
        parameters[17].grad = torch.full((4,), 5.0)
        assert engine.scan_grads(groups).inf_norm == 5.0
        parameters[17].grad.data = torch.full((9,), 7.0)
        assert (engine.scan_grads(groups).inf_norm, engine.scan_grads(groups).numel) == (7.0, 39 * 4 + 9)
    parameters[3], parameters[4].grad = torch.nn.Parameter(torch.ones(2)), None
    assert engine.scan_grads(groups).count == 38
