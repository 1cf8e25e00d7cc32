"""Matrix functions: all axes but the last two are batch axes."""

from __future__ import annotations

from torch import Tensor

from ..errors import Mixing
from .call import Call, Result, carry, trailing
from .table import rule

# core axes of each result; the argument's core is the last two
_RESULTS: dict[str, tuple[int, ...]] = {
    "linalg_cholesky": (2,), "cholesky": (2,), "linalg_inv": (2,), "inverse": (2,),
    "linalg_pinv": (2,), "pinverse": (2,), "linalg_matrix_exp": (2,), "matrix_exp": (2,),
    "linalg_matrix_power": (2,), "matrix_power": (2,), "linalg_det": (0,), "det": (0,),
    "logdet": (0,), "linalg_slogdet": (0, 0), "slogdet": (0, 0), "linalg_qr": (2, 2),
    "qr": (2, 2), "linalg_svd": (2, 1, 2), "svd": (2, 1, 2), "linalg_svdvals": (1,),
    "linalg_eigh": (1, 2), "linalg_eigvalsh": (1,), "linalg_eig": (1, 2), "linalg_eigvals": (1,),
    "linalg_lu": (2, 2, 2), "linalg_lu_factor": (2, 1), "linalg_matrix_rank": (0,),
    "linalg_cond": (0,), "cholesky_inverse": (2,), "linalg_cholesky_ex": (2, 0),
    "linalg_inv_ex": (2, 0), "linalg_lu_factor_ex": (2, 1, 0),
}  # fmt: skip


@rule(" ".join(_RESULTS))
def matrix_function(call: Call) -> Result | list[Result]:
    """Batched over leading axes."""
    x = call.arg(0, "A", "input", "self")
    cores = _RESULTS[call.name]
    if isinstance(call.out, Tensor):
        return carry(call, [(x, trailing(x, 2))], call.out, trailing(call.out, cores[0]))
    return [
        carry(call, [(x, trailing(x, 2))], out, trailing(out, core))
        for out, core in zip(call.out, cores, strict=True)
    ]


@rule("linalg_solve linalg_solve_ex")
def solve(call: Call) -> Result | list[Result]:
    """The right-hand side is a batch of vectors or of matrices."""
    a, b = call.arg(0, "A"), call.arg(1, "B")
    left = call.kwargs.get("left", True)
    vector = left and (b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1]))
    core = 1 if vector else 2
    out = call.out if isinstance(call.out, Tensor) else call.out[0]
    layout = call.layout(b)
    if not vector and layout is not None and call.layout(a) is None:
        free = b.dim() - 1 if left else b.dim() - 2  # one right-hand side each
        if layout.axes == (free,) and out.dim() == b.dim():
            return layout if out is call.out else [layout, *[None] * (len(call.out) - 1)]
    result = carry(call, [(a, trailing(a, 2)), (b, trailing(b, core))], out, trailing(out, core))
    return result if isinstance(call.out, Tensor) else [result, *[None] * (len(call.out) - 1)]


@rule("linalg_solve_triangular cholesky_solve triangular_solve linalg_householder_product")
def triangular(call: Call) -> Result:
    """Two batches of matrices."""
    a, b = call.args[0], call.args[1]
    core = 1 if call.name == "linalg_householder_product" else 2
    if not isinstance(call.out, Tensor):
        raise Mixing(f"{call.name} is deprecated")
    pairs = [(a, trailing(a, 2)), (b, trailing(b, core))]
    return carry(call, pairs, call.out, trailing(call.out, 2))


@rule("linalg_vander vander")
def vander(call: Call) -> Result:
    """Powers along a new last axis."""
    x = call.arg(0, "x")
    return carry(call, [(x, ())], call.out, trailing(call.out, 1))
