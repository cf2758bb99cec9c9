"""`nanscan.trace` names the op that made the first NaN or Inf: what each kind of fault must give."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanscan

INF = float("inf")


def leaf(*values, **kwargs):
    return torch.tensor(values, requires_grad=True, **kwargs)


def traced(function, model=None):
    with nanscan.trace(model) as t:
        function()
    return t


def origin_of(function, model=None):
    origin = traced(function, model).origin
    assert origin is not None
    return origin


# ---- forward -------------------------------------------------------------------------------------------------------


def test_forward_op_is_named_with_file_line_code_and_the_offending_value():
    x = leaf(-0.5, 2.0)
    origin = origin_of(lambda: (x**0.5).sum())  # the line
    assert (origin.op, origin.phase, origin.kind) == ("aten.pow", "forward", "nan")
    assert origin.file == __file__ and "(x**0.5).sum())  # the line" in origin.code
    assert origin.inputs[0].value_at == -0.5 and origin.outputs[0].first_bad == (0,)
    assert origin.inputs[0].shape == (2,) and origin.inputs[0].dtype == "float32"


def test_all_targets_ignored_is_the_loss_op():
    logits = torch.zeros(2, 3, requires_grad=True)
    t = traced(lambda: F.cross_entropy(logits, torch.tensor([-100, -100])).backward())
    assert [o.op for o in t.origins] == ["aten.nll_loss_forward"]
    assert t.origin.inputs[1].max == -100


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda p: p[torch.tensor([False, False])].mean(), "aten.mean"),
        (lambda p: (p * 0).sum() / torch.tensor(0), "aten.div"),
        (lambda p: F.mse_loss(p[:0], torch.zeros(0)), "aten.mse_loss"),
        (lambda p: (p / p.norm()).sum() if False else ((p * 0) / (p * 0).norm()).sum(), "aten.div"),
        (lambda p: torch.atan((p * 0) / (p * 0)).sum(), "aten.div"),
    ],
)
def test_zero_divided_by_zero(function, op):
    p = leaf(0.2, 0.7)
    t = traced(lambda: function(p).backward())
    assert t.origin.op == op and t.origin.phase == "forward"
    assert len(t.origins) == 1  # what follows in backward is a consequence


def test_fully_masked_attention_blames_the_softmax_and_not_the_mask():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 1, batch_first=True)

        def forward(self, x, mask):
            return self.attn(x, x, x, key_padding_mask=mask)[0]

    net, x = Net(), torch.randn(2, 3, 4)
    mask = torch.tensor([[False, False, False], [True, True, True]])
    t = traced(lambda: net(x, mask)[0].sum().backward(), net)
    assert t.origin.op == "aten._softmax" and t.origin.module == "attn" and t.origin.outputs[0].first_bad[0] == 1
    assert t.origin.code.startswith("return self.attn(")


def test_entropy_of_a_masked_action_is_the_multiplication():
    logits = leaf(0.0, 0.0, -INF)

    def entropy():
        logp = logits.log_softmax(-1)
        (-(logp.exp() * logp).nan_to_num(0.0).sum()).backward()

    t = traced(entropy)
    assert [o.op for o in t.origins] == ["aten.mul"]
    assert {r.value_at for r in t.origin.inputs} == {0.0, -INF}


def test_nan_that_is_laundered_in_forward_is_found():
    x = leaf(0.0, 2.0)
    t = traced(lambda: torch.log(x).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).sum().backward())
    assert t.origin.op == "aten.log" and t.origin.phase == "forward" and "LogBackward0" in t.origin.note
    assert traced(lambda: (torch.tensor([-1.0]).sqrt() > 0).any()).origin.op == "aten.sqrt"


def test_overflow_that_becomes_nan_blames_the_overflow_first():
    x = torch.tensor([1000.0, 0.0])
    t = traced(lambda: x.exp() / x.exp().sum())
    assert [o.op for o in t.origins][0] == "aten.exp" and t.origin.kind == "inf" and "aten.div" in t.origin.note
    assert t.origins[-1].op == "aten.div" and t.origins[-1].kind == "nan"


def test_inf_that_is_left_as_a_result_is_reported():
    with nanscan.trace() as t:
        y = torch.log(torch.tensor([0.0, 1.0]))
    assert t.origin.op == "aten.log" and t.origin.kind == "inf" and y[0] == -INF


def test_input_and_parameter_that_come_in_bad_are_named():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    batch = torch.tensor([[float("nan"), 1.0]])
    origin = origin_of(lambda: net(batch), net)
    assert (origin.op, origin.name, origin.kind) == ("input", "input", "nan") and origin.module == "0"
    with torch.no_grad():
        net[0].weight[0, 0] = INF
    origin = origin_of(lambda: net(torch.ones(1, 2)), net)
    assert (origin.op, origin.name, origin.kind) == ("parameter", "0.weight", "inf")


# ---- backward ------------------------------------------------------------------------------------------------------


def test_square_root_of_zero_is_an_inf_gradient_with_what_made_nan_of_it():
    re, im = leaf(0.0, 0.0, 3.0), leaf(0.0, 0.0, 4.0)

    def magnitude():
        mag = (re**2 + im**2).sqrt()  # here
        mag.sum().backward()

    t = traced(magnitude)
    origin = t.origin
    assert [o.op for o in t.origins] == ["SqrtBackward0"] and (origin.kind, origin.phase) == ("inf", "backward")
    assert origin.code.endswith("# here") and "PowBackward0 then made NaN" in origin.note
    assert origin.outputs[0].first_bad == (0,) and origin.outputs[0].inf_count == 2


def test_inf_gradient_of_a_leaf_is_found_with_the_input_value():
    x = leaf(1.0, 0.5)
    origin = origin_of(lambda: torch.acos(x).sum().backward())
    assert origin.op == "AcosBackward0" and origin.kind == "inf"
    assert [r.value_at for r in origin.inputs if r.name == "self"] == [1.0]


@pytest.mark.parametrize(("function", "node"), [(torch.sqrt, "SqrtBackward0"), (torch.log, "LogBackward0")])
def test_where_trick_blames_the_branch_not_taken(function, node):
    x = leaf(0.0 if function is torch.log else -1.0, 4.0)
    t = traced(lambda: torch.where(x > 0, function(x), x).sum().backward())
    assert [o.op for o in t.origins] == [node] and "incoming gradient was exactly 0" in t.origin.note


def test_gradient_overflow_in_a_broadcast_sum_is_found():
    bias = torch.zeros(1, dtype=torch.float16, requires_grad=True)
    x = torch.ones(300, dtype=torch.float16)
    origin = origin_of(lambda: ((x + bias) * 300).float().sum().backward())
    assert origin.phase == "backward" and origin.kind == "inf" and "sum of gradients overflowed" in origin.note


def test_grad_function_and_double_backward_map_to_the_forward_line():
    x = leaf(0.0)

    def run():
        y = x.pow(1.5).sum()  # forward line
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.sum().backward()

    origin = origin_of(run)
    assert origin.phase == "backward" and origin.kind == "inf" and origin.code.endswith("# forward line")


# ---- what must not alarm ---------------------------------------------------------------------------------------------


def double_where(x):
    safe = torch.where(x > 0, x, torch.ones_like(x))
    return torch.where(x > 0, safe.sqrt(), x).sum()


CONTROLS = {
    "masked softmax": lambda s: s.masked_fill(torch.tensor([False, False, True]), -INF).softmax(-1)[0],
    "masked logsumexp": lambda s: s.masked_fill(torch.tensor([False, False, True]), -INF).logsumexp(-1),
    "masked max": lambda s: s.masked_fill(torch.tensor([False, False, True]), -INF).amax(-1),
    "where -inf": lambda s: torch.where(s > 2, s, -INF).softmax(-1)[0],
    "filled in place": lambda s: s.clone().masked_fill_(s < 2, -INF).softmax(-1)[2],
    "-inf class": lambda s: F.cross_entropy(torch.cat([s, torch.full((1,), -INF)])[None], torch.tensor([0])),
    "norm at 0": lambda s: (s * 0).norm(),
    "cdist at 0": lambda s: torch.cdist(s[None] * 0, torch.zeros(1, 3)).sum(),
    "std of equal": lambda s: (s * 0 + 1).std(),
    "max_pool padding": lambda s: F.max_pool1d(s[None, None], 3, padding=1).sum(),
    "atan2 at 0": lambda s: torch.atan2(s * 0, s * 0).sum(),
    "angle at 0": lambda s: torch.angle(torch.complex(s * 0, s * 0)).sum(),
    "log of a mask": lambda s: (s + torch.tensor([1.0, 1.0, 0.0]).log()).softmax(-1)[0],
    "mask added twice": lambda s: (s + (torch.tensor([0.0, 0.0, -3e38]) + torch.tensor([0.0, 0.0, -3e38]))).softmax(0)[
        0
    ],
    "sigmoid by hand": lambda s: (1 / (1 + torch.exp(200 - s.detach()))).sum() + s.sum(),
    "double where": lambda s: double_where(s - 1),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_legitimate_inf_raises_no_alarm(name):
    s = leaf(1.0, 2.0, 3.0)
    t = traced(lambda: CONTROLS[name](s).backward())
    assert t.origins == []
    assert s.grad.isfinite().all()


@pytest.mark.parametrize("keep", ["float", "bool"])
def test_causal_attention_is_quiet(keep):
    q = torch.randn(2, 2, 5, 4, requires_grad=True)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    if keep == "float":
        mask = torch.zeros(5, 5).masked_fill(~mask, -INF)
    assert traced(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()).origins == []


# ---- modules ---------------------------------------------------------------------------------------------------------


class Log(nn.Module):
    def forward(self, x):
        return (x - x).log()


def test_module_path_with_and_without_a_model():
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), Log()))
    for model, path in ((net, "1.1"), (None, "Sequential.1.1")):
        origin = origin_of(lambda: net(torch.ones(1, 2)).sum().backward(), model)
        assert origin.op == "aten.log" and origin.module == path


def test_module_path_is_right_after_an_exception_inside_a_module():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("x")

    net = nn.ModuleDict({"fails": Fails(), "log": Log()})

    def run():
        with pytest.raises(KeyError):
            net["fails"](torch.ones(1))
        torch.tensor([-1.0]).sqrt()

    assert origin_of(run, net).module is None


# ---- the context manager ---------------------------------------------------------------------------------------------


def test_raise_names_the_origin():
    message = r"NaN made by aten.sqrt.*test_trace.py"
    with pytest.raises(nanscan.NonFiniteError, match=message) as caught, nanscan.trace(on_origin="raise"):
        y = torch.tensor([-1.0]).sqrt()
        for _ in range(200):
            y = y + 1
        pytest.fail("the error came too late")
    assert caught.value.origin.op == "aten.sqrt"


def test_raise_in_backward_comes_out_of_backward():
    x = leaf(0.0)
    with pytest.raises(nanscan.NonFiniteError, match="SqrtBackward0"), nanscan.trace(on_origin="raise"):
        x.sqrt().sum().backward()
        pytest.fail("backward did not raise")


def test_an_exception_inside_passes_and_what_was_found_stays():
    with pytest.raises(ZeroDivisionError), nanscan.trace() as t:
        torch.tensor([-1.0]).sqrt()
        raise ZeroDivisionError
    assert t.origin.op == "aten.sqrt"
    before = torch.autograd._engine_run_backward
    with nanscan.trace():
        pass
    assert torch.autograd._engine_run_backward is before


def test_nested_traces_both_find():
    with nanscan.trace() as outer:
        with nanscan.trace() as inner:
            x = leaf(0.0)
            x.sqrt().sum().backward()
        (x - 2).sqrt()
    assert [o.op for o in inner.origins] == ["SqrtBackward0"]
    assert [o.op for o in outer.origins] == ["SqrtBackward0", "aten.sqrt"]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [({"on_origin": "stop"}, ValueError, "'record' or 'raise'"), ({"model": 3}, TypeError, "torch.nn.Module")],
)
def test_wrong_arguments_are_explained(arguments, error, text):
    with pytest.raises(error, match=text):
        nanscan.trace(**arguments)


def test_origin_survives_json_and_pickle():
    import json
    import pickle

    origin = origin_of(lambda: torch.tensor([-1.0]).sqrt())
    assert repr(nanscan.Origin.from_dict(json.loads(json.dumps(origin.to_dict())))) == repr(origin)
    assert repr(pickle.loads(pickle.dumps(origin))) == repr(origin)
    assert "aten.sqrt" in origin.describe() and "value there -1" in origin.describe()
