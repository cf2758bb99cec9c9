"""A trace changes nothing: not a bit of any result, no random number, no hook of the user's, no memory afterwards."""

import gc
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanscan
from nanscan.origin.backward import GraphWatch


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = F.dropout(self.relu(self.bn(self.conv(x))), 0.3, self.training)
        x += 1
        return self.head(F.max_pool2d(x, 2).mean((2, 3)))


class Text(nn.Module):
    def __init__(self, sparse=False, reentrant=None):
        super().__init__()
        self.emb = nn.Embedding(20, 8, sparse=sparse)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.emb((x.flatten(1)[:, :6].abs() * 10).long() % 20)
        x = self.layer(x) if self.reentrant is None else checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return self.rnn(x)[0][:, -1, :3]


class Odd(nn.Module):
    """Complex numbers, a custom Function, views written to in place, double backward, half precision, autocast."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x):
        x = self.lin(x.flatten(1)[:, :16])
        z = torch.fft.fft(x).abs()
        y = Exp.apply(z.clamp(max=2.0))
        w = y.clone()
        w[:, ::2].mul_(0.5)
        (g,) = torch.autograd.grad(w.pow(2).sum(), x, create_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.lin(g * 1e-3)
        return (h.float() + w.half().float())[:, :3]


MODELS = {
    "convolutions": Conv,
    "transformer and LSTM": Text,
    "sparse embedding": lambda: Text(sparse=True),
    "checkpoint": lambda: Text(reentrant=False),
    "re-entrant checkpoint": lambda: Text(reentrant=True),
    "odd things": Odd,
}


def run(make, context):
    """Two SGD steps; everything that came out of them, and the state of the generators."""
    torch.manual_seed(3)
    random.seed(3)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    results = []
    for _ in range(2):
        with context():
            optimizer.zero_grad()
            out = model(images)
            loss = F.cross_entropy(out, labels)
            loss.backward()
            optimizer.step()
        results += [out.detach(), loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [*results, *model.state_dict().values(), torch.get_rng_state(), random.random()]


@pytest.mark.parametrize("name", MODELS)
def test_results_are_bitwise_the_same_with_and_without_a_trace(name):
    plain, traced = run(MODELS[name], torch.enable_grad), run(MODELS[name], nanscan.trace)
    assert len(plain) == len(traced)
    for a, b in zip(plain, traced, strict=True):
        if isinstance(a, torch.Tensor):
            a, b = (t.coalesce().values() if t.is_sparse else t for t in (a, b))
            assert a.dtype == b.dtype and torch.equal(a, b)
        else:
            assert a == b


@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_step_gives_no_origin(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    with nanscan.trace(model) as t:
        F.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.tensor([0, 1, 2, 0])).backward()
    assert t.origins == []


def test_gradients_are_stolen_not_copied_as_without_a_trace():
    weight = nn.Parameter(torch.ones(3))
    seen = []
    weight.register_hook(lambda g: seen.append(g.data_ptr()))
    with nanscan.trace():
        (weight * torch.ones(3)).sum().backward()
    plain = nn.Parameter(torch.ones(3))
    (plain * torch.ones(3)).sum().backward()
    assert weight.grad.stride() == plain.grad.stride() and torch.equal(weight.grad, plain.grad)


def test_no_tensor_module_or_hook_is_kept_afterwards():
    model = Conv()
    with nanscan.trace(model) as t:
        out = model(torch.randn(2, 1, 8, 8))
        loss = (out - out).sqrt().sum()
        loss.backward(retain_graph=True)
    assert t.origin is not None
    refs = [weakref.ref(x) for x in (model, out, loss)]
    model.zero_grad()
    before = t.origins
    loss.backward()  # the same graph once more: its hooks are gone
    assert t.origins == before
    del model, out, loss
    gc.collect()
    assert [r() for r in refs] == [None, None, None]


def test_its_hooks_are_off_the_graph_and_the_leaves_afterwards(monkeypatch):
    calls = []
    for name in ("_after", "_before_leaf"):
        method = getattr(GraphWatch, name)
        monkeypatch.setattr(GraphWatch, name, lambda self, *a, _method=method: calls.append(1) or _method(self, *a))
    weight = nn.Parameter(torch.ones(3))
    with nanscan.trace():
        loss = weight.exp().sum()
        loss.backward(retain_graph=True)
    assert len(calls) >= 2
    del calls[:]
    loss.backward()
    weight.sin().sum().backward()  # the same leaf
    assert calls == []


def test_hooks_of_the_user_keep_working():
    packed, unpacked, grads = [], [], []
    x = torch.ones(3, requires_grad=True)
    x.register_hook(grads.append)
    with (
        nanscan.trace() as t,
        torch.autograd.graph.saved_tensors_hooks(
            lambda v: packed.append(1) or v.numpy().copy(), lambda v: unpacked.append(1) or torch.from_numpy(v)
        ),
    ):
        (x.detach().requires_grad_() * x).exp().sum().backward()
    assert t.origins == [] and len(packed) == len(unpacked) > 0 and len(grads) == 1


def test_compiled_model_is_traced_as_the_eager_one_and_it_is_said():
    class Net(nn.Module):
        def forward(self, x):
            return (x - x).log()

    compiled = torch.compile(Net(), backend="eager")
    with pytest.warns(UserWarning, match="eager model"), nanscan.trace(compiled) as t:
        compiled(torch.ones(2))
    assert t.origin.op == "aten.log" and t.origin.module == "" and "(x - x).log()" in t.origin.code


def test_a_bad_gradient_that_a_later_node_masks_before_any_leaf_is_no_fault():
    x = torch.randn(2, 3, requires_grad=True)
    with nanscan.trace() as t:
        masked = x.masked_fill(torch.tensor([[True] * 3, [False] * 3]), -float("inf")).logsumexp(-1)
        masked[masked > -float("inf")].sum().backward()
        (torch.tensor([-1.0, 4.0], requires_grad=True).relu().sqrt()).sum().backward()
    assert t.origins == [] and x.grad.isfinite().all()
    with nanscan.trace() as t:
        y = torch.tensor([-1.0, 4.0], requires_grad=True)
        (y.relu().sqrt() + y.mul(0).sqrt()).sum().backward()
    assert t.origin.op == "SqrtBackward0"


def test_an_inf_of_forward_that_is_laundered_counts_although_a_relu_masks_its_gradient():
    x = torch.tensor([-1.0, 4.0], requires_grad=True)
    with nanscan.trace() as t:
        x.relu().log().nan_to_num(neginf=0.0).sum().backward()
    assert x.grad.isfinite().all() and t.origin.op == "aten.log"


def test_the_gradients_that_a_caller_asks_for_count_although_they_are_no_leaves():
    with nanscan.trace() as t:
        inner = torch.tensor([-1.0, 4.0], requires_grad=True).relu()
        torch.autograd.grad(inner.sqrt().sum(), inner)
    assert t.origin.op == "SqrtBackward0"
    with nanscan.trace() as t:
        inner = torch.tensor([-1.0, 4.0], requires_grad=True).relu()
        inner.retain_grad()
        inner.sqrt().sum().backward(inputs=[inner])
    assert t.origin.op == "SqrtBackward0"


def test_a_loss_that_a_written_mask_made_infinite_is_named():
    def scores():
        return torch.zeros(2, 3, requires_grad=True).masked_fill(torch.tensor([True, False, False]), -float("inf"))

    with nanscan.trace() as t:
        torch.nn.functional.cross_entropy(scores(), torch.tensor([0, 1])).backward()
    assert [(o.op, o.kind, o.phase) for o in t.origins] == [("aten.nll_loss_forward", "inf", "forward")]
    with nanscan.trace() as t:
        (-scores().log_softmax(-1)[:, 0].mean()).backward()  # the loss
    assert [(o.op, o.kind) for o in t.origins] == [("aten.neg", "inf")]
    assert t.origin.code.endswith("# the loss") and "masked -inf" in t.origin.hint
    with nanscan.trace() as t:  # a row of nothing but -inf: its logsumexp is right, the gradient of it is not
        (torch.zeros(2, requires_grad=True) - float("inf")).logsumexp(-1).backward()
    assert [(o.op, o.kind, o.phase) for o in t.origins] == [("LogsumexpBackward0", "nan", "backward")]
    assert "logsumexp of nothing but -inf" in t.origin.hint
    with nanscan.trace() as t:  # masked scores as the output of a model, with a gradient given
        scores().backward(torch.ones(2, 3))
    assert t.origins == []


def test_running_statistics_that_become_nan_are_found_although_the_output_is_finite():
    norm = torch.nn.BatchNorm1d(3)

    def forward(rows):
        arguments = norm.weight, norm.bias, norm.running_mean, norm.running_var
        return torch.batch_norm(torch.randn(rows, 3), *arguments, True, 0.1, 1e-5, False)

    with nanscan.trace(norm) as t:
        out = forward(1)
    assert out.isfinite().all() and (t.origin.op, t.origin.kind) == ("aten.native_batch_norm", "nan")
    assert "running_var" in [r.name for r in t.origin.outputs if r.nan_count]
    with nanscan.trace(norm) as t:  # an earlier step did it: not this one's fault, and the output does not depend on it
        forward(4)
    assert t.origins == []
    norm.eval()
    with nanscan.trace(norm) as t:
        norm(torch.randn(4, 3))
    assert (t.origin.op, t.origin.name) == ("parameter", "running_var")


def test_running_statistics_of_a_healthy_or_frozen_layer_are_no_origin():
    norm = torch.nn.BatchNorm2d(3)
    with nanscan.trace(norm) as t:
        norm(torch.randn(2, 3, 4, 4)).sum().backward()
        norm.eval()(torch.randn(2, 3, 4, 4))
        torch.nn.BatchNorm2d(3, track_running_stats=False)(torch.randn(2, 3, 4, 4))
    assert t.origins == []


def test_a_bad_input_is_called_what_the_user_calls_it_and_shown_as_the_user_has_it():
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0)
    x = torch.randn(2, 3, 8)
    x[1, 2, 3] = float("nan")
    with nanscan.trace(layer) as t:
        layer(x)  # which transposes it first
    assert (t.origin.op, t.origin.name, t.origin.outputs[0].shape) == ("input", "src", (2, 3, 8))
    assert t.origin.outputs[0].first_bad == (1, 2, 3) and "first in sample 1" in t.origin.hint

    def attend():
        values = torch.tensor([[[1.0, 1.0], [float("nan"), 1.0]]])
        keep = torch.tensor([[[True, False]]])
        zeros = torch.zeros(1, 2, 2)
        return torch.nn.functional.scaled_dot_product_attention(zeros, zeros, values, attn_mask=keep)  # the line

    with nanscan.trace() as t:
        attend()  # has returned when its ops are scanned
    assert (t.origin.op, t.origin.name) == ("input", "values") and t.origin.code.endswith("# the line")


def test_a_number_written_into_a_weight_is_named_by_the_weight():
    layer = torch.nn.Linear(3, 2)
    with nanscan.trace(layer) as t, torch.no_grad():
        layer.weight[0, 1] = float("nan")
        layer(torch.ones(1, 3))
    assert (t.origin.op, t.origin.name) == ("input", "the number written into weight")
    with nanscan.trace() as t:
        scores = torch.zeros(3)
        scores[1] = float("nan")
    assert t.origin.name == "the number written into scores"


def test_asking_whether_a_value_is_finite_is_no_fault_and_using_it_is():
    data = torch.tensor([1.0, float("nan")])
    with nanscan.trace() as t:
        torch.where(torch.isfinite(data), data, 0.0).sum()
    assert t.origins == []
    with nanscan.trace() as t:
        torch.isfinite(data).all()
        data.mul(2)
    assert (t.origin.op, t.origin.name) == ("input", "data")
    with nanscan.trace() as t:
        data.abs().sum()
    assert (t.origin.op, t.origin.name) == ("input", "data")


def test_sparse_results_are_traced():
    matrix = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).to_sparse()
    with nanscan.trace() as t:
        torch.sparse.mm(matrix, matrix)
    assert t.origins == []
    with nanscan.trace() as t:
        (matrix / 0.0).to_dense().sum()
    assert t.origin.op == "aten.div"


def test_nested_tensors_are_described_as_far_as_they_can_be():
    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)])
    with nanscan.trace() as t:
        rows.mul(float("nan"))
    assert (t.origin.op, t.origin.outputs[0].nan_count, t.origin.outputs[0].shape) == ("aten.mul", 9, (2, -1, -1))


def test_an_instance_norm_that_spoils_its_statistics_is_named_and_not_what_copied_them():
    norm = torch.nn.InstanceNorm1d(3, track_running_stats=True)
    with nanscan.trace(norm) as t:
        norm(torch.randn(4, 3, 5) * 1e25)
    assert t.origin.op == "aten.native_batch_norm"
