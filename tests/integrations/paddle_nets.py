"""A small Paddle net with gradients, for the tests of the guard."""

import math

import numpy as np
import paddle

NAN, INF = math.nan, math.inf


def make_optimizer(name, parameters, **options):
    options = {**({"learning_rate": 0.05} if name != "Adadelta" else {}), **options}
    return getattr(paddle.optimizer, name)(parameters=parameters, **options)


def make_net():
    paddle.seed(1)
    return paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Tanh(), paddle.nn.Linear(8, 2))


def batch(step):
    generator = np.random.default_rng(step)
    return paddle.to_tensor(generator.normal(size=(16, 4)).astype("float32"))


def backward(net, step, factor=1.0):
    loss = (net(batch(step)) ** 2).mean() * factor
    loss.backward()
    return loss


def plant(param, value=NAN, index=0):
    with paddle.no_grad():
        paddle.assign(
            paddle.where(paddle.arange(param.size) == index, value, param._grad_ivar().flatten()).reshape(param.shape),
            param._grad_ivar(),
        )


def state_of(net, optimizer):
    """Bytes of every parameter and everything that the optimizer keeps."""
    found = {name: value.numpy().tobytes() for name, value in net.state_dict().items()}
    for name, value in optimizer.state_dict().items():
        found[name] = value.numpy().tobytes() if isinstance(value, paddle.Tensor) else repr(value)
    return found
