"""Operators on the last axes, matrix functions above all: the axes before them are a batch."""

from __future__ import annotations

from torch import Tensor

from ..call import Call, Result, carry_each, trailing
from ..operators import rule

# how many of the last axes are worked along: of the arguments, and of each result
_LAST = {
    "linalg_cholesky": "2 -> 2", "cholesky": "2 -> 2", "linalg_inv": "2 -> 2", "inverse": "2 -> 2",
    "linalg_pinv": "2 -> 2", "pinverse": "2 -> 2", "linalg_matrix_exp": "2 -> 2",
    "matrix_exp": "2 -> 2", "linalg_matrix_power": "2 -> 2", "matrix_power": "2 -> 2",
    "linalg_det": "2 -> 0", "det": "2 -> 0", "logdet": "2 -> 0", "linalg_slogdet": "2 -> 0 0",
    "slogdet": "2 -> 0 0", "linalg_qr": "2 -> 2 2", "qr": "2 -> 2 2", "linalg_svd": "2 -> 2 1 2",
    "svd": "2 -> 2 1 2", "linalg_svdvals": "2 -> 1", "linalg_eigh": "2 -> 1 2",
    "linalg_eigvalsh": "2 -> 1", "linalg_eig": "2 -> 1 2", "linalg_eigvals": "2 -> 1",
    "linalg_lu": "2 -> 2 2 2", "linalg_lu_factor": "2 -> 2 1", "linalg_matrix_rank": "2 -> 0",
    "linalg_cond": "2 -> 0", "cholesky_inverse": "2 -> 2", "linalg_cholesky_ex": "2 -> 2 0",
    "linalg_inv_ex": "2 -> 2 0", "linalg_lu_factor_ex": "2 -> 2 1 0", "lu": "2 -> 2 1 0",
    "trace": "2 -> 0", "linalg_vander": "0 -> 1", "vander": "0 -> 1", "one_hot": "0 -> 1",
    "multinomial": "1 -> 1", "_sample_dirichlet": "1 -> 1", "bucketize": "0 -> 0", "isin": "0 -> 0",
    "view_as_real": "0 -> 1", "view_as_real_copy": "0 -> 1", "view_as_complex": "1 -> 0",
    "view_as_complex_copy": "1 -> 0", "linalg_lu_solve": "2 1 2 -> 2", "lu_solve": "2 2 1 -> 2",
    "lu_unpack": "2 1 -> 2 2 2", "ormqr": "2 1 2 -> 2", "linalg_householder_product": "2 1 -> 2",
    "triangular_solve": "2 2 -> 2 2",
}  # fmt: skip


@rule(" ".join(_LAST))
def of_last_axes(call: Call) -> Result | list[Result]:
    """Batched over leading axes; what else is given is shared by all."""
    inputs, cores = ([int(c) for c in side.split()] for side in _LAST[call.name].split("->"))
    pairs = zip(call.tensors(), inputs, strict=False)
    return carry_each(call, [(t, trailing(t, core)) for t, core in pairs], cores)


@rule("linalg_solve linalg_solve_ex linalg_lstsq linalg_solve_triangular cholesky_solve")
def solve(call: Call) -> Result | list[Result]:
    """A batch of matrices, and one of right-hand sides: of vectors or of matrices."""
    a, b = call.arg(0, "A", "input", "self"), call.arg(1, "B", "b", "input2", "L")
    if call.name == "cholesky_solve":
        a, b = b, a
    left, least = call.kwargs.get("left", True), call.name == "linalg_lstsq"
    vectors = b.dim() == 1 or b.shape == a.shape[:-1]
    vectors = vectors and left and call.name in ("linalg_solve", "linalg_solve_ex", "linalg_lstsq")
    layout, core = call.layout(b), 1 if vectors else 2
    if layout is not None and call.layout(a) is None and not (vectors or least):
        if layout.axes == (b.dim() - 1 if left else b.dim() - 2,) and call.first.dim() == b.dim():
            return layout if isinstance(call.out, Tensor) else [layout, None]
    cores = (core, core - 1, 0, 1) if least else (core, 0)
    return carry_each(call, [(a, trailing(a, 2)), (b, trailing(b, core))], cores)
