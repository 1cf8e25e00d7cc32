"""Operators along named axes: reductions, scans, sorting, Fourier transforms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import Mixing, Reason, here
from ..call import Call, Result, axes, carry, elementwise
from ..layout import Additive, Layout, Mixed, explicit, ids_of
from ..operators import rule
from ..reshaping import squeeze_colours

# name -> (position of dim, names of dim)
_DIM_SECOND = ("dim", "axis")


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else next(o for o in out if isinstance(o, Tensor))


def reduce_colours(call: Call, dims: set[int], *, lost: bool | None = None) -> Layout | None:
    """Colours when ``dims`` of the first argument are reduced (kept as size one, or removed)."""
    x, out = call.arg(0, "input", "self"), _first(call.out)
    if lost is None:
        lost = out.dim() != x.dim()
    return carry(call, [(x, dims)], out, () if lost else dims)


def _dims(call: Call, position: int, *names: str) -> set[int]:
    x = call.arg(0, "input", "self")
    value = call.arg(position, *(names or _DIM_SECOND))
    if isinstance(value, (tuple, list)) and not value:
        value = None
    if isinstance(value, bool):
        value = None
    return axes(value, x.dim())


@rule("sum nansum mean nanmean", linear=True)
def total(call: Call) -> Result:
    """Over the samples these give a sum over samples (divided by a count that is public)."""
    dims = _dims(call, 1)
    try:
        return reduce_colours(call, dims)
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
    "median nanmedian mode"
)
def reduce_second(call: Call) -> Result:
    """Reductions whose second argument is the dim."""
    return reduce_colours(call, _dims(call, 1))


@rule("max min")
def extremum(call: Call) -> Result:
    """With a tensor as second argument element by element, else a reduction."""
    if isinstance(call.arg(1, "other"), Tensor):
        return elementwise(call)
    return reduce_colours(call, _dims(call, 1))


@rule("std var std_mean var_mean")
def std_and_var(call: Call) -> Result:
    """``x.std(False)`` reduces everything: a bool is not a dim."""
    return reduce_colours(call, _dims(call, 1))


@rule("norm linalg_vector_norm linalg_norm frobenius_norm nuclear_norm")
def norm(call: Call) -> Result:
    """The order comes before the dim, except for the two named matrix norms."""
    position = 1 if call.name in ("frobenius_norm", "nuclear_norm") else 2
    return reduce_colours(call, _dims(call, position))


@rule("linalg_matrix_norm")
def matrix_norm(call: Call) -> Result:
    """Over two axes, the last two by default."""
    x = call.arg(0, "A", "input")
    return reduce_colours(call, axes(call.arg(2, "dim", default=(-2, -1)), x.dim()))


@rule("kthvalue")
def kthvalue(call: Call) -> Result:
    """One axis, the last by default."""
    x = call.arg(0, "input")
    return reduce_colours(call, axes(call.arg(2, *_DIM_SECOND, default=-1), x.dim()))


@rule("quantile nanquantile")
def quantile(call: Call) -> Result:
    """Several quantiles add a leading axis."""
    x, q, out = call.arg(0, "input"), call.arg(1, "q"), call.out
    dims = axes(call.arg(2, *_DIM_SECOND), x.dim())
    lead = 1 if isinstance(q, Tensor) and q.dim() == 1 else 0
    keep = bool(call.arg(3, "keepdim", default=False))
    core = set(range(lead)) | ({d + lead for d in dims} if keep else set())
    return carry(call, [(x, dims)], out, core)


@rule("norm_except_dim renorm")
def slices(call: Call) -> Result:
    """Each slice along dim is normalised on its own."""
    x = call.arg(0, "v", "input", "self")
    dim = call.arg(2, "dim", default=0) % max(x.dim(), 1)
    others = set(range(x.dim())) - {dim}
    return carry(call, [(x, others)], call.out, others)


def along(call: Call, dims: set[int]) -> Layout | None:
    """Same axes out as in; ``dims`` are worked along."""
    return carry(call, [(call.arg(0, "input", "self"), dims)], _first(call.out), dims)


@rule(
    "cumsum cumprod cummax cummin logcumsumexp softmax log_softmax special_softmax "
    "special_log_softmax _softmax _log_softmax _safe_softmax"
)
def scan(call: Call) -> Result:
    """One axis, named by the second argument."""
    x = call.arg(0, "input", "self")
    return along(call, axes(call.arg(1, *_DIM_SECOND), x.dim()))


@rule("_softmax_backward_data _log_softmax_backward_data")
def softmax_backward(call: Call) -> Result:
    """Along the axis of the softmax, of gradient and output alike."""
    grad, output = call.arg(0, "grad_output"), call.arg(1, "output")
    dims = axes(call.arg(2, "dim"), grad.dim())
    return carry(call, [(grad, dims), (output, dims)], call.out, dims)


@rule("glu")
def glu(call: Call) -> Result:
    """Halves one axis."""
    x = call.arg(0, "input")
    return along(call, axes(call.arg(1, "dim", default=-1), x.dim()))


@rule("diff")
def diff(call: Call) -> Result:
    """Shortens one axis; prepended and appended pieces keep theirs."""
    x = call.arg(0, "input")
    dims = axes(call.arg(2, "dim", default=-1), x.dim())
    pieces = [x, call.arg(3, "prepend"), call.arg(4, "append")]
    return carry(call, [(p, dims) for p in pieces if p is not None], call.out, dims)


@rule("trapezoid trapz cumulative_trapezoid")
def trapezoid(call: Call) -> Result:
    """Along one axis (lost, or shortened); spacing given as a tensor must be shared."""
    y, out = call.arg(0, "y"), call.out
    dims = axes(call.kwargs.get("dim", -1), y.dim())
    return carry(call, [(y, dims)], out, () if out.dim() < y.dim() else dims)


_RANKED = "the place of a sample's values depends on how they compare with other samples'"


@rule("sort topk msort", routes=True)
def order(call: Call) -> Result | list[Result]:
    """Sorting inside samples keeps their place; sorting the samples moves them by the indices."""
    x = call.arg(0, "input", "self")
    if call.name == "topk":
        dim = call.arg(2, "dim", default=-1)
    else:
        dim = 0 if call.name == "msort" else call.arg(1, "dim", default=-1)
    dims = axes(dim, x.dim())
    layout = call.layout(x)
    if layout is None or not any(d in dims for d in layout.axes):
        return along(call, dims)
    if call.name == "msort":
        raise Mixing("sorting over the samples")
    (axis,) = dims
    ids = ids_of(layout, x.shape, call.n, x.device).expand(x.shape)
    found = explicit(squeeze_colours(ids.gather(axis, call.out[1]), call.n), call.n)
    if not x.is_floating_point():  # grouped by a key (experts): only routes
        return [found, None]
    why = Reason(call.name, _RANKED, (tuple(x.shape),), here())
    return [found.with_coupling(why), Mixed(why)]


@rule("argsort", routes=True)
def argsort(call: Call) -> Result:
    """Indices inside samples belong to them; keys grouped over samples only route."""
    x = call.arg(0, "input", "self")
    dims = axes(call.arg(1, "dim", default=-1), x.dim())
    layout = call.layout(x)
    if layout is not None and any(d in dims for d in layout.axes):
        if x.is_floating_point():
            raise Mixing(_RANKED)
        return None
    return along(call, dims)


@rule("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", linear=True)
def fft(call: Call) -> Result:
    """One axis, the last by default."""
    x = call.arg(0, "input")
    return along(call, axes(call.arg(2, "dim", default=-1), x.dim()))


@rule("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2", linear=True)
def fft2(call: Call) -> Result:
    """Two axes, the last ones by default."""
    x = call.arg(0, "input")
    return along(call, axes(call.arg(2, "dim", default=(-2, -1)), x.dim()))


@rule("fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn", linear=True)
def fftn(call: Call) -> Result:
    """The named axes, or the last ones that sizes are given for, or all."""
    x = call.arg(0, "input")
    dim, s = call.arg(2, "dim"), call.arg(1, "s")
    if dim is None and s is not None:
        dim = tuple(range(-len(s), 0))
    return along(call, axes(dim, x.dim()))


@rule("fft_fftshift fft_ifftshift", linear=True)
def fftshift(call: Call) -> Result:
    """Rolls the named axes."""
    x = call.arg(0, "input")
    return along(call, axes(call.arg(1, "dim"), x.dim()))


@rule("stft istft")
def stft(call: Call) -> Result:
    """A leading batch axis at most; everything else is one signal."""
    x, out = call.arg(0, "input"), call.out
    lead = x.dim() - 1 if call.name == "stft" else out.dim() - 1
    return carry(call, [(x, set(range(lead, x.dim())))], out, set(range(lead, out.dim())))


@rule("gradient")
def gradient(call: Call) -> Result:
    """Finite differences along the named axes; each result has the input's axes."""
    x = call.arg(0, "input")
    return along(call, axes(call.kwargs.get("dim"), x.dim()))


@rule("multinomial")
def multinomial(call: Call) -> Result:
    """Draws within rows."""
    x = call.arg(0, "input")
    return carry(call, [(x, {x.dim() - 1})], call.out, {call.out.dim() - 1})
