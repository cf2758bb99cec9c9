"""Hints for decompositions: equal eigenvalues, singular matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from nanscan.origin.hints.row import Row, names
from nanscan.origin.hints.view import View, short

__all__ = ["ROWS"]


def _gap(values: Tensor) -> tuple[float, float, float] | None:
    """The two neighbouring values that are nearest to each other, and the largest of all; of any matrix of a batch."""
    if values.shape[-1] < 2:
        return None
    rows = (values.abs() if values.is_complex() else values).reshape(-1, values.shape[-1]).sort(-1).values
    gaps = rows[:, 1:] - rows[:, :-1]
    place = int(gaps.argmin())
    row, column = divmod(place, gaps.shape[1])
    return float(rows[row, column]), float(rows[row, column + 1]), float(rows.abs().max())


def _degenerate(view: View) -> str | None:
    values, kind = view.event.saved.get("eigenvalues"), "eigenvalues"
    if values is None:
        values, kind = view.event.saved.get("S"), "singular values"
    found = _gap(values) if isinstance(values, Tensor) else None
    if found is None:
        return None
    low, high, largest = found
    if high - low > 1e-3 * max(largest, torch.finfo(torch.float32).tiny):
        return None
    return f"two {kind} are equal or nearly so ({short(low)} and {short(high)}), and the gradient divides by their gap"


def _zero_singular(view: View) -> str | None:
    values = view.event.saved.get("S")
    if not isinstance(values, Tensor) or values.numel() == 0 or float(values.min()) > 1e-6 * float(values.max()):
        return None
    return f"the smallest singular value is {short(float(values.min()))}, and the gradient divides by it"


def _singular_r(view: View) -> str | None:
    r = view.event.saved.get("R")
    if not isinstance(r, Tensor) or float(r.diagonal(dim1=-2, dim2=-1).abs().min()) != 0:
        return None
    return f"the matrix of shape {list(r.shape)} has no full rank (R has a 0 on its diagonal)"


def _zero_diagonal(view: View) -> str | None:
    factor = view.event.saved.get("L")
    if not isinstance(factor, Tensor):
        return None
    smallest = float(factor.diagonal(dim1=-2, dim2=-1).abs().min())
    if smallest > 1e-6:
        return None
    kind = "only semi-definite" if smallest == 0 else "hardly positive-definite"
    return f"the matrix of shape {list(factor.shape)} is {kind}: its factor has a {short(smallest)} on the diagonal"


def _exponential(view: View) -> str | None:
    matrix = view.operand(0)
    if not isinstance(matrix, Tensor) or not bool(matrix.isfinite().all()):
        return None
    return f"the exponential of a matrix with entries up to {short(float(matrix.abs().max()))} overflows {view.dtype}"


def _singular(view: View) -> str | None:
    matrix = view.operand(0)
    if not isinstance(matrix, Tensor) or not bool(matrix.isfinite().all()):
        return None
    return f"{view.name.strip('_')} of a singular matrix (shape {list(matrix.shape)})"


_SVD = "Clamp or jitter the matrix (A + 1e-6 * torch.randn_like(A)), use only gauge-free results (values), or float64"

ROWS = (
    Row(
        "eigh, eig or svd with equal eigenvalues",
        names("LinalgEighBackward LinalgEigBackward LinalgSvdBackward SvdBackward"),
        "the gradient of eigenvectors divides by the gaps of the eigenvalues, which are 0 (identity, symmetry)",
        _SVD,
        _degenerate,
    ),
    Row(
        "svd with a singular value of 0",
        names("LinalgSvdBackward SvdBackward"),
        "the gradient divides by singular values",
        _SVD,
        _zero_singular,
    ),
    Row(
        "qr without full rank",
        names("LinalgQrBackward"),
        "the gradient solves with R, which is singular",
        "Add a small multiple of the identity to the matrix, or orthogonalise with torch.nn.utils.parametrizations",
        _singular_r,
    ),
    Row(
        "cholesky of a semi-definite matrix",
        names("LinalgCholeskyExBackward"),
        "the gradient divides by the diagonal of the factor; a covariance of too few or constant samples",
        "Add a small multiple of the identity before the factorisation (A + 1e-6 * torch.eye(n))",
        _zero_diagonal,
    ),
    Row(
        "matrix exponential overflow",
        names("linalg_matrix_exp"),
        "matrix_exp grows like exp of the largest eigenvalue, which ends at 88.7 in float32",
        "Scale the matrix down, or bound its entries (tanh) before the exponential",
        _exponential,
    ),
    Row(
        "singular matrix",
        names(
            "linalg_inv_ex _linalg_slogdet _linalg_det linalg_inv _linalg_solve_ex linalg_solve logdet "
            "linalg_solve_triangular triangular_solve cholesky_inverse cholesky_solve linalg_lu_solve"
        ),
        "the inverse and the log of the determinant of a singular matrix are infinite",
        "Add a small multiple of the identity (A + 1e-6 * torch.eye(n)), or use torch.linalg.pinv or lstsq",
        _singular,
    ),
)
