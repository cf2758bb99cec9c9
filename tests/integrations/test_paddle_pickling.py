"""`nanscan.find_unpicklable` looks into Paddle's layers, optimizers and states; and PyTorch users never load Paddle."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest

import nanscan


class Block(paddle.nn.Layer):
    """A block with a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = paddle.nn.Linear(2, 2)
        self.lock = threading.RLock()


class Net(paddle.nn.Layer):
    """Blocks in a list, by name and in a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = paddle.nn.LayerList([Block(), paddle.nn.Linear(2, 2)])
        self.named = paddle.nn.LayerDict({"a": Block()})
        self.body = paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.ReLU())
        self.act = lambda x: x


def found(value: Any, **options: Any) -> dict[str, Any]:
    return {problem.path: problem for problem in nanscan.find_unpicklable(value, name="it", **options)}


def test_locks_lambdas_and_hooks_in_a_layer_are_found_where_one_reaches_them() -> None:
    net = Net()
    handle = net.body[0].register_forward_post_hook(lambda *_: None)
    problems = found({"net": net})
    errors = {path for path, problem in problems.items() if problem.severity == "error"}
    hook = 'it["net"].body[0]._forward_post_hooks[' + str(next(iter(net.body[0]._forward_post_hooks))) + "]"
    assert errors == {'it["net"].act', 'it["net"].blocks[0].lock', 'it["net"].named["a"].lock', hook}
    assert "handle.remove()" in problems[hook].fix
    assert "a lock belongs to the threads" in problems['it["net"].blocks[0].lock'].reason
    assert all("state_dict() does not hold it" in problems[path].fix for path in errors)
    handle.remove()
    with pytest.raises(Exception, match="pickle"):
        pickle.dumps(net)


def test_a_layer_is_told_once_to_be_saved_as_its_state(tmp_path: Path) -> None:
    net = paddle.nn.Sequential(paddle.nn.Linear(3, 2), paddle.nn.Sequential(paddle.nn.Linear(2, 1)))
    problems = found({"net": net})
    assert list(problems) == ['it["net"]']
    (problem,) = problems.values()
    assert problem.severity == "loss" and "paddle.save refuses a Layer" in problem.reason
    assert "its 4 parameters (11 elements) come back as plain tensors" in problem.reason
    assert "layer.state_dict()" in problem.fix and "set_state_dict()" in problem.fix
    again = pickle.loads(pickle.dumps(net))  # it is as the reason says
    assert again[0].weight.name != net[0].weight.name and not hasattr(again[0].weight, "need_clip")
    with pytest.raises(ValueError, match="do not support saving"):
        paddle.save({"net": net}, str(tmp_path / "never.pdparams"))


PLAIN: dict[str, Callable[[], Any]] = {
    "tensor": lambda: paddle.ones([3]),
    "parameter": lambda: {"w": paddle.nn.Linear(1, 1).weight},
    "layer's state": lambda: Net().state_dict(),
    "optimizer's state": lambda: stepped().state_dict(),
    "grad scaler": lambda: paddle.amp.GradScaler(),
    "schedule": lambda: paddle.optimizer.lr.StepDecay(0.1, 3),
    "bfloat16": lambda: [paddle.ones([3]).astype("bfloat16"), paddle.zeros([0, 2])],
}


def stepped() -> Any:
    layer = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.Adam(paddle.optimizer.lr.StepDecay(0.1, 3), parameters=layer.parameters())
    layer(paddle.ones([1, 2])).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", PLAIN)
def test_what_pickles_and_loads_raises_no_alarm(name: str) -> None:
    value = PLAIN[name]()
    assert nanscan.find_unpicklable(value) == []
    pickle.loads(pickle.dumps(value))


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "it": (stepped, "a Paddle optimizer holds", "set_state_dict()"),
    "it.lr_lambda": (lambda: paddle.optimizer.lr.LambdaDecay(0.1, lambda e: 1.0), "a lambda", "same function"),
    "it[0]": (lambda: [paddle.CPUPlace()], "Paddle's C++ side", "__getstate__"),
    "it[1]": (
        lambda: [1, paddle.ones([2]).astype("float8_e5m2")],
        "a float8_e5m2 tensor pickles and does not load",
        "astype('bfloat16')",
    ),
    "it[2]": (lambda: [1, 2, paddle.io.DataLoader([1, 2])], "a Paddle DataLoader", "make the loader anew"),
    "it[3]": (
        lambda: [1, 2, 3, paddle.sparse.sparse_coo_tensor([[0], [1]], [1.0], [2, 2])],
        "sparse tensor",
        "to_dense()",
    ),
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_can_not_be_pickled_is_said_with_its_remedy(path: str) -> None:
    make, reason, fix = REFUSED[path]
    value = make()
    ((at, problem),) = found(value).items()
    assert (at, problem.severity) == (path, "error")
    assert reason in problem.reason and fix in problem.fix
    if path != "it[3]":  # trying that would end this process
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            pickle.loads(pickle.dumps(value))


def test_a_graph_that_is_dropped_is_a_loss() -> None:
    out = paddle.nn.Linear(2, 2)(paddle.ones([1, 2]))
    ((_, problem),) = found([out]).items()
    assert problem.severity == "loss" and "part of a graph" in problem.reason and "detach()" in problem.fix


def test_a_tensor_in_a_torch_file_is_refused_by_its_default_loader() -> None:
    ((_, problem),) = found({"w": paddle.ones([1])}, weights_only=True).items()
    assert "torch.load(weights_only=True) refuses paddle.Tensor" in problem.reason and ".pdparams" in problem.fix


def test_data_of_tensors_is_never_copied() -> None:
    net = paddle.nn.Sequential(paddle.nn.Linear(1000, 2000), paddle.nn.LSTM(2, 2))
    state = {"net": net, "weights": net.state_dict(), "lock": threading.Lock()}
    nanscan.find_unpicklable(state)
    tracemalloc.start()
    nanscan.find_unpicklable(state)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20  # the weight has 8 MB


def test_torch_users_never_import_paddle() -> None:
    program = """
import sys, tempfile, torch, nanscan
model = torch.nn.Linear(2, 2)
nanscan.scan(model), nanscan.scan([torch.ones(2)]), nanscan.check_batch({"x": torch.ones(2, 2), "y": "text"})
nanscan.BatchSpec.from_model(model), nanscan.find_unpicklable({"m": model, "f": lambda x: x})
nanscan.load(nanscan.save(model.state_dict(), tempfile.mkdtemp() + "/m.pt"))
assert not any(name.split(".")[0] == "paddle" for name in sys.modules)
import nanscan.paddle_objects
class Odd:  # a module of that name that is no PaddlePaddle, or only half imported
    pass
sys.modules["paddle"] = Odd()
nanscan.scan(model), nanscan.check_batch({"x": torch.ones(2, 2)}), nanscan.find_unpicklable(model)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
