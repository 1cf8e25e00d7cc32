"""Operators on the last axes, matrix functions above all: the axes before them are a batch."""

from __future__ import annotations

from torch import Tensor

from ..call import Call, Result, carry, carry_each, trailing
from ..layout import Layout
from ..operators import rule

# how many of the last axes are worked along: of the first argument, and of each result
_LAST: dict[str, tuple[int, ...]] = {
    "linalg_cholesky": (2, 2), "cholesky": (2, 2), "linalg_inv": (2, 2), "inverse": (2, 2),
    "linalg_pinv": (2, 2), "pinverse": (2, 2), "linalg_matrix_exp": (2, 2), "matrix_exp": (2, 2),
    "linalg_matrix_power": (2, 2), "matrix_power": (2, 2), "linalg_det": (2, 0), "det": (2, 0),
    "logdet": (2, 0), "linalg_slogdet": (2, 0, 0), "slogdet": (2, 0, 0), "linalg_qr": (2, 2, 2),
    "qr": (2, 2, 2), "linalg_svd": (2, 2, 1, 2), "svd": (2, 2, 1, 2), "linalg_svdvals": (2, 1),
    "linalg_eigh": (2, 1, 2), "linalg_eigvalsh": (2, 1), "linalg_eig": (2, 1, 2),
    "linalg_eigvals": (2, 1), "linalg_lu": (2, 2, 2, 2), "linalg_lu_factor": (2, 2, 1),
    "linalg_matrix_rank": (2, 0), "linalg_cond": (2, 0), "cholesky_inverse": (2, 2),
    "linalg_cholesky_ex": (2, 2, 0), "linalg_inv_ex": (2, 2, 0),
    "linalg_lu_factor_ex": (2, 2, 1, 0), "lu": (2, 2, 1, 0), "trace": (2, 0),
    "linalg_vander": (0, 1), "vander": (0, 1), "one_hot": (0, 1), "multinomial": (1, 1),
    "_sample_dirichlet": (1, 1), "bucketize": (0, 0), "isin": (0, 0),
    "view_as_real": (0, 1), "view_as_real_copy": (0, 1),
    "view_as_complex": (1, 0), "view_as_complex_copy": (1, 0),
}  # fmt: skip


@rule(" ".join(_LAST))
def of_last_axes(call: Call) -> Result | list[Result]:
    """Batched over leading axes; what else is given is shared by all."""
    x, (core, *cores) = (
        call.arg(0, "A", "input", "self", "x", "tensor", "elements"),
        _LAST[call.name],
    )
    return carry_each(call, [(x, trailing(x, core))], cores)


# the same of every tensor that is given, and of the results
_EACH: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "linalg_lu_solve": ((2, 1, 2), (2,)), "lu_solve": ((2, 2, 1), (2,)),
    "lu_unpack": ((2, 1), (2, 2, 2)), "ormqr": ((2, 1, 2), (2,)),
    "linalg_householder_product": ((2, 1), (2,)), "triangular_solve": ((2, 2), (2, 2)),
}  # fmt: skip


@rule(" ".join(_EACH))
def of_each(call: Call) -> Result | list[Result]:
    """Batches of matrices, and of vectors: rows that were exchanged, factors of reflectors."""
    inputs, cores = _EACH[call.name]
    pairs = zip(call.tensors(), inputs, strict=True)
    return carry_each(call, [(t, trailing(t, core)) for t, core in pairs], cores)


@rule("linalg_solve linalg_solve_ex")
def solve(call: Call) -> Result | list[Result]:
    """The right-hand side is a batch of vectors or of matrices."""
    a, b = call.arg(0, "A"), call.arg(1, "B")
    left = call.kwargs.get("left", True)
    vector = left and (b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1]))
    core = 1 if vector else 2
    out = call.first
    result = None if vector else _own_sides(call, a, b, out, left=left)
    if result is None:
        pairs = [(a, trailing(a, 2)), (b, trailing(b, core))]
        result = carry(call, pairs, out, trailing(out, core))
    return result if isinstance(call.out, Tensor) else [result, *[None] * (len(call.out) - 1)]


def _own_sides(call: Call, a: Tensor, b: Tensor, out: Tensor, *, left: bool) -> Layout | None:
    """One right-hand side for each sample, and one matrix for all: they stay where they are."""
    layout = call.layout(b)
    if layout is None or call.layout(a) is not None or out.dim() != b.dim():
        return None
    return layout if layout.axes == (b.dim() - 1 if left else b.dim() - 2,) else None


@rule("linalg_lstsq")
def least_squares(call: Call) -> Result | list[Result]:
    """Solution, residuals, rank and singular values of a batch of problems."""
    a, b = call.arg(0, "A", "input", "self"), call.arg(1, "B", "b")
    vector = b.dim() == a.dim() - 1
    inputs = [(a, trailing(a, 2)), (b, trailing(b, 1 if vector else 2))]
    return carry_each(call, inputs, (1 if vector else 2, 0 if vector else 1, 0, 1))


@rule("linalg_solve_triangular cholesky_solve")
def triangular(call: Call) -> Result | list[Result]:
    """A batch of matrices, and one of right-hand sides."""
    a, b = call.args[:2] if call.name == "linalg_solve_triangular" else call.args[1::-1]
    side = _own_sides(call, a, b, call.out, left=call.kwargs.get("left", True))
    if side is not None:
        return side
    return carry_each(call, [(a, trailing(a, 2)), (b, trailing(b, 2))], (2,))
