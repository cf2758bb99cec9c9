"""A trace works through what runs ops in its own way: checkpoints, custom Functions, in-place ops, functional calls."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanscan
from nanscan import engine as engines


def origin_of(function, model=None):
    with nanscan.trace(model) as t:
        function()
    assert t.origin is not None
    return t.origin


class Root(nn.Module):
    def forward(self, x):
        y = x * 0
        return y.sqrt()  # the root


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_fault_inside_a_checkpoint_maps_to_its_line_and_module(reentrant):
    net = nn.Sequential(nn.Linear(2, 2), Root())
    x = torch.full((1, 2), -1.0, requires_grad=True)
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(2))
        net[0].bias.zero_()
    origin = origin_of(lambda: checkpoint(net, x, use_reentrant=reentrant).sum().backward(), net)
    assert (origin.op, origin.phase, origin.module) == ("SqrtBackward0", "backward", "1")
    assert origin.code.endswith("# the root")


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (x - x)


class BadForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x - 2).log()  # custom forward

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_custom_function():
    x = torch.ones(2, requires_grad=True)
    origin = origin_of(lambda: BadBackward.apply(x).sum().backward())
    assert (origin.op, origin.phase, origin.kind) == ("BadBackwardBackward", "backward", "inf")
    origin = origin_of(lambda: BadForward.apply(x))
    assert origin.op == "aten.log" and origin.code.endswith("# custom forward")


def test_functional_call_names_the_module():
    net = nn.Sequential(nn.Linear(2, 2), Root())
    values = {"0.weight": -torch.ones(2, 2), "0.bias": torch.zeros(2, requires_grad=True)}
    origin = origin_of(lambda: torch.func.functional_call(net, values, torch.ones(1, 2)).sum().backward(), net)
    assert origin.op == "SqrtBackward0" and origin.module == "1"


def test_in_place_op_that_makes_nan_shows_what_it_overwrote():
    x = torch.tensor([4.0, -1.0])
    origin = origin_of(lambda: x.sqrt_())
    assert origin.op == "aten.sqrt_" and origin.inputs[0].value_at == -1.0


def test_value_overwritten_later_is_still_found():
    def run():
        y = torch.tensor([-1.0]).sqrt()  # made here
        y.zero_()

    assert origin_of(run).code.endswith("# made here")


def test_in_place_on_a_bad_input_blames_the_input():
    x = torch.tensor([float("nan"), 1.0])
    origin = origin_of(lambda: x.mul_(2))
    assert origin.op == "input" and origin.name == "x"


def test_nan_written_through_a_view_and_out_argument():
    x, out = torch.zeros(4), torch.empty(2)
    assert origin_of(lambda: x[1:3].log_().sqrt_()).op in ("aten.log_", "aten.sqrt_")
    assert origin_of(lambda: torch.sqrt(torch.tensor([-1.0, 1.0]), out=out)).op == "aten.sqrt"


def test_uninitialised_memory_is_no_origin():
    with nanscan.trace() as t:
        for _ in range(50):
            torch.empty(1000).fill_(1.0).sum()
            torch.empty(1000).normal_().sum()
    assert t.origins == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype):
    x = torch.zeros(3, dtype=dtype)
    assert origin_of(lambda: x / x).op == "aten.div"


def test_half_precision_overflow_under_autocast_names_the_op():
    net = nn.Linear(4, 4)
    with torch.no_grad():
        net.weight.fill_(1e4)

    def run():
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(torch.full((1, 4), 10.0))
        F.mse_loss(out.float(), torch.zeros(1, 4)).backward()

    origin = origin_of(run, net)
    assert (origin.op, origin.kind, origin.module) == ("aten.addmm", "inf", "")
    assert origin.outputs[0].dtype == "float16"


def test_sparse_gradient_that_is_bad_is_found():
    emb = nn.Embedding(10, 2, sparse=True)
    scale = torch.tensor([float("inf")])
    origin = origin_of(lambda: (emb(torch.tensor([3])) * scale).sum().backward(), emb)
    assert origin.op == "MulBackward0" or origin.phase == "forward"


def test_optimizer_update_that_makes_nan_is_found():
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.Adam([weight], foreach=False, fused=False)

    def run():
        weight.grad = torch.zeros(2, dtype=torch.float16)
        optimizer.step()

    assert origin_of(run).op.startswith("aten.addcdiv")


def test_library_code_is_named_beside_the_users_own_line(tmp_path, monkeypatch):
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "somelib.py").write_text("def root(x):\n    return x.sqrt()  # inside\n")
    monkeypatch.syspath_prepend(str(package))
    import somelib

    origin = origin_of(lambda: somelib.root(torch.tensor([-1.0])))  # mine
    assert origin.file == __file__ and origin.code.endswith("# mine") and "somelib.py:2" in origin.note


def test_gradient_hook_that_makes_nan_is_said():
    x = torch.ones(2, requires_grad=True)

    def run():
        y = x * 2
        y.register_hook(lambda g: g * float("nan"))
        y.sum().backward()

    origin = origin_of(run)
    assert origin.phase == "backward" and "a hook changed it" in origin.note and "Look at the hooks" in origin.hint


def test_a_hook_of_a_weight_is_told_from_a_sum_of_gradients_that_overflows():
    model, x = nn.Linear(2, 1), torch.ones(1, requires_grad=True)
    model.weight.register_hook(lambda g: g / 0)
    with nanscan.trace(model) as traced:
        model(torch.ones(1, 2)).sum().backward()
    origin = traced.origin
    assert (origin.kind, origin.name, origin.note) == ("inf", "weight", "a hook changed it after this node")
    assert "Look at the hooks" in origin.hint
    huge = torch.tensor([3e38])
    origin = origin_of(lambda: torch.autograd.backward([x * 1, x * 1], [huge, huge]))
    assert "a sum of gradients overflowed" in origin.note and "the sum of gradients" in origin.hint


def test_a_bad_gradient_given_to_backward_is_said_to_be_an_input():
    x = torch.ones(2, requires_grad=True)
    origin = origin_of(lambda: (x * 2).backward(torch.tensor([float("nan"), 0.0])))
    assert (origin.op, origin.phase, origin.name) == ("input", "backward", "the gradient given to backward()")


def test_the_engine_can_be_chosen_inside_of_a_transform_where_a_new_parameter_has_no_memory(monkeypatch):
    monkeypatch.setattr(engines, "_active", None)
    assert origin_of(lambda: torch.func.grad(lambda v: v.log().sum())(torch.zeros(3))).op == "aten.log"


def test_transforms_of_torch_func_are_traced():
    origin = origin_of(lambda: torch.func.grad(lambda v: v.sqrt().sum())(torch.zeros(3)))
    assert (origin.op, origin.kind, origin.phase) == ("SqrtBackward0", "inf", "backward")
    assert origin_of(lambda: torch.func.vmap(lambda v: (v - v).log())(torch.ones(3, 2))).op == "aten.log"
    gradients = torch.func.vmap(torch.func.grad(lambda v: v.sum().sqrt()))  # of each sample
    origin = origin_of(lambda: gradients(-torch.ones(3, 2)))
    assert (origin.op, origin.kind, origin.inputs[0].value_at) == ("aten.sqrt", "nan", -2.0)


def test_meta_tensors_and_inference_mode_are_no_obstacle():
    with torch.inference_mode():
        assert origin_of(lambda: torch.tensor([-1.0]).sqrt()).op == "aten.sqrt"
    with nanscan.trace() as t:
        torch.empty(3, device="meta").sqrt()
    assert t.origins == []


def test_inference_fast_path_of_the_transformer_stays_on():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        plain = encoder(x, src_key_padding_mask=mask)
        with nanscan.trace(encoder) as t:
            traced = encoder(x, src_key_padding_mask=mask)
    assert torch.equal(plain, traced) and t.origins == []
