"""Hints for gradients: infinite slopes, the where trick, decompositions, overflow; each with a healthy near miss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hint_cases import Case, case, check, leaf, params

HALF = torch.float16


def covariance_loss(jitter: float) -> torch.Tensor:
    covariance = torch.zeros(2, 2, requires_grad=True) + jitter * torch.eye(2)
    normal = torch.distributions.MultivariateNormal(torch.zeros(2), covariance, validate_args=False)
    return normal.log_prob(torch.ones(2))


def ctc_loss_of(scores: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([4]), torch.tensor([2])
    return torch.nn.functional.ctc_loss(scores.requires_grad_(), torch.tensor([[1, 2]]), *lengths)


def spectral(weight: float) -> torch.Tensor:
    layer = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(layer.weight, weight)
    return torch.nn.utils.parametrizations.spectral_norm(layer)(torch.ones(1, 3))


def root_where_positive(safe: bool) -> Tensor:
    x = leaf(-1.0, 4.0)
    inner = torch.where(x > 0, x, torch.ones_like(x)) if safe else x
    return torch.where(x > 0, torch.sqrt(inner), x)


def inverse_where_nonzero(safe: bool) -> Tensor:
    x = leaf(0.0, 4.0)
    inner = torch.where(x != 0, x, torch.ones_like(x)) if safe else x
    return torch.where(x != 0, 1 / inner, x)


def vectors(spectrum: tuple[float, ...]) -> Tensor:
    values, vectors = torch.linalg.eigh(torch.diag(torch.tensor(spectrum)).requires_grad_())
    return vectors * torch.arange(1.0, len(values) + 1)


def singular_vectors(spectrum: tuple[float, ...], columns: int | None = None) -> Tensor:
    matrix = torch.diag(torch.tensor(spectrum))[:, :columns].requires_grad_()
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u.sum() + vh.sum()


def scaled(scale: float) -> Tensor:
    weight = torch.ones(2, requires_grad=True)
    return (weight.half() * 10).float().sum() * scale


def convolved(scale: float) -> Tensor:
    conv = nn.Conv1d(1, 1, 3).half()
    out: Tensor = conv(torch.full((1, 1, 8), 100.0, dtype=HALF))
    return (out * scale).float()


def large_gradient(factor: float) -> Tensor:
    """Values stay small: what comes back is multiplied up."""
    small = leaf(1e-38, 1.0) * factor
    return small * 1e30


def linear_in(dtype: torch.dtype, weight: float) -> Tensor:
    layer = nn.Linear(4, 4).to(dtype)
    nn.init.constant_(layer.weight, weight)
    out: Tensor = layer(torch.full((2, 4), weight, dtype=dtype))
    return out.float()


GRADIENTS = [
    case(
        "the where trick",
        "SqrtBackward at [0]",
        "its incoming gradient was exactly 0, so this is the where trick",
        "Fix the input before the op",
        bad=lambda: root_where_positive(safe=False),
        healthy=lambda: root_where_positive(safe=True),
    ),
    case(
        "the where trick",
        "its incoming gradient was exactly 0, so this is the where trick",
        bad=lambda: inverse_where_nonzero(safe=False),
        healthy=lambda: inverse_where_nonzero(safe=True),
    ),
    case(
        "sqrt at 0",
        "inf at x = 0",
        "2 of 3 elements, flat indices [0, 1]",
        bad=lambda: (leaf(0.0, 0.0, 3.0) ** 2 + leaf(0.0, 0.0, 4.0) ** 2).sqrt(),
        healthy=lambda: (leaf(0.0, 0.0, 3.0) ** 2 + leaf(0.0, 0.0, 4.0) ** 2 + 1e-12).sqrt(),
    ),
    case(
        "sqrt at 0",
        "1 of 1 element",
        bad=lambda: torch.zeros(3, requires_grad=True).square().sum().sqrt(),
        healthy=lambda: torch.zeros(3, requires_grad=True).norm(),
    ),
    case(
        "fractional power at 0",
        "x ** 0.5",
        "inf at x = 0 (at [0])",
        bad=lambda: leaf(0.0, 2.0) ** 0.5,
        healthy=lambda: leaf(0.0, 2.0) ** 1.5,
    ),
    case(
        "exponent of a base that is not positive",
        "(at [0]) takes log(-1)",
        bad=lambda: torch.tensor([-1.0, 2.0]) ** leaf(2.0, 2.0),
        healthy=lambda: torch.tensor([1.0, 2.0]) ** leaf(2.0, 2.0),
    ),
    case(
        "acos or asin at ±1",
        "acos is infinite at exactly 1 (at [0])",
        bad=lambda: leaf(1.0, 0.5).acos(),
        healthy=lambda: leaf(1.0, 0.5).clamp(-1 + 1e-6, 1 - 1e-6).acos(),
    ),
    case(
        "acos or asin at ±1",
        "asin is infinite at exactly -1 (at [1])",
        bad=lambda: leaf(0.5, -1.0).asin(),
        healthy=lambda: leaf(0.5, -0.999).asin(),
    ),
    case(
        "acosh at 1",
        "acosh is infinite at exactly 1",
        bad=lambda: leaf(1.0, 2.0).acosh(),
        healthy=lambda: leaf(1.0 + 1e-6, 2.0).acosh(),
    ),
    case(
        "hypot at 0",
        "hypot(0, 0) at [0]",
        bad=lambda: torch.hypot(leaf(0.0, 1.0), leaf(0.0, 1.0)),
        healthy=lambda: torch.abs(torch.complex(leaf(0.0, 1.0), leaf(0.0, 1.0))),
    ),
    case(
        "entr or xlogy at 0",
        "entr of a probability of 0 (at [1])",
        "-1e4",
        bad=lambda: torch.special.entr(leaf(0.5, 0.0)),
        healthy=lambda: torch.special.entr(leaf(0.5, 1e-30)),
    ),
    case(
        "entr or xlogy at 0",
        "xlogy of a probability of 0 (at [1])",
        bad=lambda: (lambda p: torch.special.xlogy(p, p))(leaf(0.5, 0.0)),
        healthy=lambda: torch.special.xlogy(leaf(0.5, 0.0), torch.tensor([0.5, 0.0])),
    ),
    case(
        "norm layer with an eps too small for float16",
        "beyond 65504 in float16 for a group that is constant (at [0, 0])",
        bad=lambda: F.layer_norm(torch.ones(3, 4, dtype=torch.float16, requires_grad=True), (4,), eps=1e-12),
        healthy=lambda: F.layer_norm(torch.ones(3, 4, dtype=torch.float16, requires_grad=True), (4,), eps=1e-5),
    ),
    case(
        "gradient of a division by a tiny number",
        "1e-30 (at [0])",
        bad=lambda: torch.ones(2) / leaf(1e-30, 1.0),
        healthy=lambda: torch.ones(2) / leaf(1e-15, 1.0),
    ),
    case(
        "gradient of log, rsqrt or lgamma near 0",
        "gradient of log at 9.99995e-41",
        bad=lambda: leaf(1e-40, 1.0).log(),
        healthy=lambda: leaf(1e-30, 1.0).log(),
    ),
    case(
        "gradient of log, rsqrt or lgamma near 0",
        "gradient of rsqrt at 1e-30",
        bad=lambda: leaf(1e-30, 1.0).rsqrt(),
        healthy=lambda: leaf(1e-20, 1.0).rsqrt(),
    ),
    case(
        "gradient of a large exp",
        "times an incoming gradient of 1e+10",
        bad=lambda: (leaf(70.0, 1.0).exp() * 1e-10).mul(1e20),
        healthy=lambda: (leaf(70.0, 1.0).exp() * 1e-10).mul(1e10),
    ),
    case(
        "loss-scale overflow",
        "beyond 65504",
        "incoming gradients up to 131072",
        bad=lambda: scaled(131072.0),
        healthy=lambda: scaled(1024.0),
    ),
    case(
        "loss-scale overflow",
        "ConvolutionBackward",
        bad=lambda: convolved(500.0),
        healthy=lambda: convolved(1.0),
    ),
    case(
        "gradient that grew too large",
        "incoming gradients up to 1e+30 overflowed float32",
        bad=lambda: large_gradient(1e10),
        healthy=lambda: large_gradient(1e5),
    ),
]

MORE_GRADIENTS = [
    case(
        "gradient of log, rsqrt or lgamma near 0",
        "gradient of lgamma at 9.99995e-41",
        bad=lambda: leaf(1e-40, 1.0).lgamma(),
        healthy=lambda: leaf(1e-30, 1.0).lgamma(),
    ),
    case(
        "gradient that grew too large",
        "incoming gradients up to 1e+30 overflowed float32 in MmBackward",
        bad=lambda: (torch.full((2, 2), 1e-38, requires_grad=True) @ torch.full((2, 2), 1e10)) * 1e30,
        healthy=lambda: (torch.full((2, 2), 1e-38, requires_grad=True) @ torch.full((2, 2), 1e5)) * 1e30,
    ),
]

DECOMPOSITIONS = [
    case(
        "eigh, eig or svd with equal eigenvalues",
        "two eigenvalues are equal or nearly so (1 and 1)",
        bad=lambda: vectors((1.0, 1.0, 2.0)),
        healthy=lambda: vectors((1.0, 2.0, 3.0)),
    ),
    case(
        "eigh, eig or svd with equal eigenvalues",
        "two singular values are equal or nearly so",
        bad=lambda: singular_vectors((1.0, 1.0)),
        healthy=lambda: torch.linalg.svdvals(torch.eye(2, requires_grad=True)),
    ),
    case(
        "svd with a singular value of 0",
        "smallest singular value is 0",
        bad=lambda: singular_vectors((2.0, 0.0, 0.0), 2),
        healthy=lambda: singular_vectors((2.0, 1.0, 0.0), 2),
    ),
    case(
        "qr without full rank",
        "shape [2, 2] has no full rank",
        bad=lambda: torch.linalg.qr(torch.zeros(2, 2, requires_grad=True))[0],
        healthy=lambda: torch.linalg.qr(torch.eye(2, requires_grad=True))[0],
    ),
    case(
        "cholesky of a semi-definite matrix",
        "shape [2, 2] is hardly positive-definite: its factor has a 1e-10 on the diagonal",
        bad=lambda: covariance_loss(1e-20),
        healthy=lambda: covariance_loss(1e-2),
    ),
    case(
        "CTC of numbers that are no log-probabilities",
        "sum to exp(",
        bad=lambda: ctc_loss_of(torch.randn(4, 1, 3) * 400),
        healthy=lambda: ctc_loss_of((torch.randn(4, 1, 3) * 20).log_softmax(-1)),
    ),
    case(
        "spectral_norm of a zero weight",
        "the spectral norm of the weight is 0 (at [0, 0])",
        bad=lambda: spectral(0.0),
        healthy=lambda: spectral(1.0),
    ),
    case(
        "cholesky of a semi-definite matrix",
        "shape [2, 2] is only semi-definite",
        bad=lambda: torch.linalg.cholesky_ex(torch.zeros(2, 2, requires_grad=True))[0],
        healthy=lambda: torch.linalg.cholesky_ex(torch.eye(2, requires_grad=True))[0],
    ),
    case(
        "matrix exponential overflow",
        "entries up to 200 overflows float32",
        bad=lambda: torch.matrix_exp(torch.diag(leaf(200.0, 1.0))),
        healthy=lambda: torch.matrix_exp(torch.diag(leaf(20.0, 1.0))),
    ),
    case(
        "singular matrix",
        "singular matrix (shape [2, 2])",
        bad=lambda: torch.linalg.slogdet(torch.zeros(2, 2, requires_grad=True)).logabsdet,
        healthy=lambda: torch.linalg.slogdet(torch.eye(2, requires_grad=True)).logabsdet,
    ),
]

OVERFLOW = [
    case(
        "float16 overflow of a matrix product or convolution",
        "addmm overflowed float16 (beyond 65504)",
        "up to",
        bad=lambda: linear_in(HALF, 300.0),
        healthy=lambda: linear_in(torch.bfloat16, 300.0),
    ),
    case(
        "overflow of a matrix product or convolution",
        "mm overflowed float32",
        bad=lambda: torch.full((2, 2), 1e30) @ torch.full((2, 2), 1e30),
        healthy=lambda: torch.full((2, 2), 1e15) @ torch.full((2, 2), 1e15),
    ),
    case(
        "float16 overflow of a sum",
        "sum of 2 elements up to 60000 is beyond 65504",
        bad=lambda: leaf(6e4, 6e4, dtype=HALF).sum(),
        healthy=lambda: leaf(6e4, 6e4, dtype=HALF).sum(dtype=torch.float32),
    ),
    case(
        "float16 overflow of a sum",
        "mse_loss of 4 elements up to 300",
        bad=lambda: F.mse_loss(torch.full((4,), 300.0, dtype=HALF), torch.zeros(4, dtype=HALF)),
        healthy=lambda: F.mse_loss(torch.full((4,), 300.0), torch.zeros(4)),
    ),
    case(
        "overflow of a product over many",
        "cumprod of 200 elements up to 2",
        bad=lambda: torch.full((200,), 2.0).cumprod(0),
        healthy=lambda: leaf(0.0, 2.0, 0.0).cumprod(0),
    ),
    case(
        "overflow of a sum",
        "in float32",
        bad=lambda: torch.full((4,), 2e38).sum(),
        healthy=lambda: torch.full((4,), 2e37).sum(),
    ),
    case(
        "float16 overflow of a product or sum of two",
        "pow of 300 and 2 at [0] is beyond 65504",
        bad=lambda: leaf(300.0, 1.0, dtype=HALF) ** 2,
        healthy=lambda: leaf(250.0, 1.0, dtype=HALF) ** 2,
    ),
    case(
        "overflow of a product or sum of two",
        "mul of 1e+30 and 1e+30 at [0]",
        bad=lambda: leaf(1e30, 1.0) * 1e30,
        healthy=lambda: leaf(1e30, 1.0) * 1e5,
    ),
]

CASES: list[Case] = [*GRADIENTS, *MORE_GRADIENTS, *DECOMPOSITIONS, *OVERFLOW]


@params(CASES)
def test_the_row_speaks_in_its_words_and_not_of_its_healthy_twin(given: Case) -> None:
    check(given)
