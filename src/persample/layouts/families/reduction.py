"""Operators along named axes: reductions, scans, sorting, Fourier transforms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import Mixing, Reason, here
from ..call import Call, Result, axes, carry, elementwise
from ..layout import Additive, Layout, Mixed
from ..operators import rule
from ..ranking import WHY, rank

# where an operator's axes are among its arguments, and what they are by default
_AXES: dict[str, tuple[int, Any]] = {
    "norm": (2, None), "linalg_vector_norm": (2, None), "linalg_norm": (2, None),
    "linalg_matrix_norm": (2, (-2, -1)), "kthvalue": (2, -1), "quantile": (2, None),
    "nanquantile": (2, None), "glu": (1, -1), "diff": (2, -1), "topk": (2, -1), "sort": (1, -1),
    "argsort": (1, -1), "msort": (1, 0), "trapezoid": (2, -1), "trapz": (2, -1),
    "cumulative_trapezoid": (2, -1), "_softmax_backward_data": (2, -1),
    "_log_softmax_backward_data": (2, -1),
    **dict.fromkeys("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft".split(), (2, -1)),
    **dict.fromkeys(
        "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2".split(), (2, (-2, -1))
    ),
}  # fmt: skip


def _input(call: Call) -> Tensor:
    found: Tensor = call.arg(0, "input", "self", "A", "v", "y", "grad_output")
    return found


def _dims(call: Call) -> set[int]:
    """The axes that a call names, all by default; ``x.std(False)`` names none with its bool."""
    position, default = _AXES.get(call.name, (1, None))
    value = call.arg(position, "dim", "axis", default=default)
    if isinstance(value, bool) or (isinstance(value, (tuple, list)) and not value):
        value = None
    return axes(value, _input(call).dim())


def reduce_colours(call: Call, dims: set[int]) -> Layout | None:
    """Colours when ``dims`` of the first argument are reduced (kept as size one, or removed)."""
    x, out = _input(call), call.first
    return carry(call, [(x, dims)], out, () if out.dim() != x.dim() else dims)


@rule("sum nansum mean nanmean", linear=True)
def total(call: Call) -> Result:
    """Over the samples these give a sum over samples (divided by a count that is public)."""
    try:
        return reduce_colours(call, _dims(call))
    except Mixing:
        if call.name == "nanmean":
            raise Mixing("nanmean over samples divides by a count of the whole batch") from None
        return Additive()


@rule("sum_to_size", linear=True)
def sum_to_size(call: Call) -> Result:
    """Sums whatever axes broadcasting had added."""
    x, out = call.arg(0), call.out
    shift = x.dim() - out.dim()
    dims = {d for d in range(x.dim()) if d < shift or x.shape[d] != out.shape[d - shift]}
    layout = call.layout(x)
    if layout is not None and any(d in dims for d in layout.axes):
        return Additive()
    lost = {d for d in dims if d < shift}
    return carry(call, [(x, dims)], out, {d - shift for d in dims - lost})


@rule(
    "amax amin prod any all logsumexp argmax argmin count_nonzero special_logsumexp aminmax "
    "median nanmedian mode std var std_mean var_mean norm linalg_vector_norm linalg_norm "
    "frobenius_norm nuclear_norm linalg_matrix_norm kthvalue trapezoid trapz cumulative_trapezoid"
)
def reduction(call: Call) -> Result:
    """Over the axes that the call names; a spacing given as a tensor must be shared."""
    return reduce_colours(call, _dims(call))


@rule("max min")
def extremum(call: Call) -> Result:
    """With a tensor as second argument element by element, else a reduction."""
    return (
        elementwise(call)
        if isinstance(call.arg(1, "other"), Tensor)
        else reduce_colours(call, _dims(call))
    )


@rule("quantile nanquantile")
def quantile(call: Call) -> Result:
    """Several quantiles add a leading axis."""
    q, dims = call.arg(1, "q"), _dims(call)
    lead = 1 if isinstance(q, Tensor) and q.dim() == 1 else 0
    keep = bool(call.arg(3, "keepdim", default=False))
    core = set(range(lead)) | ({d + lead for d in dims} if keep else set())
    return carry(call, [(_input(call), dims)], call.out, core)


@rule("norm_except_dim renorm")
def slices(call: Call) -> Result:
    """Each slice along dim is normalised on its own."""
    x = _input(call)
    dim = call.arg(2, "dim", default=0) % max(x.dim(), 1)
    others = set(range(x.dim())) - {dim}
    return carry(call, [(x, others)], call.out, others)


def along(call: Call, dims: set[int]) -> Layout | None:
    """Same axes out as in; ``dims`` are worked along."""
    return carry(call, [(_input(call), dims)], call.first, dims)


@rule(
    "cumsum cumprod cummax cummin logcumsumexp softmax log_softmax special_softmax "
    "special_log_softmax _softmax _log_softmax _safe_softmax glu gradient"
)
def scan(call: Call) -> Result:
    """Along the axes that the call names."""
    return along(call, _dims(call))


rule(" ".join(name for name in _AXES if name.startswith("fft")), linear=True)(scan)
rule("fft_fftshift fft_ifftshift", linear=True)(scan)


@rule("diff _softmax_backward_data _log_softmax_backward_data")
def of_several(call: Call) -> Result:
    """Along one axis of all tensors: pieces before and after, or gradient and output."""
    dims = _dims(call)
    return carry(call, [(t, dims) for t in call.tensors()], call.out, dims)


@rule("sort topk msort argsort", routes=True)
def order(call: Call) -> Result | list[Result]:
    """Sorting inside samples keeps their place; sorting the samples moves them by the indices."""
    x, dims = _input(call), _dims(call)
    layout, alone = call.layout(x), call.name == "argsort"
    if layout is None or dims.isdisjoint(layout.axes):
        return along(call, dims)
    if call.name == "msort":
        raise Mixing("sorting over the samples")
    (axis,), indices = dims, call.out if alone else call.out[1]
    ids = call.colours(x).expand(x.shape)
    found = call.painted(ids.gather(axis, indices))
    if not x.is_floating_point():  # grouped by a key (experts): only routes
        return None if alone else [found, None]
    if call.name == "topk":
        why = Reason(call.name, WHY, (tuple(x.shape),), here())
        return [found.with_coupling(why), Mixed(why)]
    ranked = found.with_coupling(rank(call, x, axis, ids, indices))
    return ranked if alone else [ranked, ranked]


@rule("fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn", linear=True)
def fftn(call: Call) -> Result:
    """The named axes, or the last ones that sizes are given for, or all."""
    dim, s = call.arg(2, "dim"), call.arg(1, "s")
    if dim is None and s is not None:
        dim = tuple(range(-len(s), 0))
    return along(call, axes(dim, _input(call).dim()))


@rule("stft istft")
def stft(call: Call) -> Result:
    """A leading batch axis at most; everything else is one signal."""
    x, out = call.arg(0, "input"), call.out
    lead = x.dim() - 1 if call.name == "stft" else out.dim() - 1
    return carry(call, [(x, set(range(lead, x.dim())))], out, set(range(lead, out.dim())))
