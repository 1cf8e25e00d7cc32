"""Operators along named axes (reductions, scans, sorting, Fourier transforms), and over groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import Mixing, Reason, here
from ..call import Call, Result, axes, carry, elementwise
from ..couplings import WHY, rank
from ..layout import Additive, Layout, Mixed, explicit, ids_of
from ..operators import rule
from ..reshaping import colour_groups

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
    **dict.fromkeys(
        "fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn".split(), (2, None)
    ),
}  # fmt: skip


def _input(call: Call) -> Tensor:
    found: Tensor = call.arg(0, "input", "self", "A", "v", "y", "grad_output")
    return found


def _dims(call: Call) -> set[int]:
    """The axes that a call names, all by default; ``x.std(False)`` names none with its bool.

    Fourier transforms over several axes may name sizes alone: those of the last axes.
    """
    position, default = _AXES.get(call.name, (1, None))
    value = call.arg(position, "dim", "axis", default=default)
    if isinstance(value, bool) or (isinstance(value, (tuple, list)) and not value):
        value = None
    if value is None and call.name.endswith("fftn") and call.arg(1, "s") is not None:
        value = range(-len(call.arg(1, "s")), 0)
    return axes(value, _input(call).dim())


@rule("sum nansum mean nanmean", linear=True)
def total(call: Call) -> Result | list[Result]:
    """Over the samples these give a sum over samples (divided by a count that is public)."""
    try:
        return reduction(call)
    except Mixing:
        if call.name == "nanmean":
            raise Mixing("nanmean over samples divides by a count of the whole batch") from None
        return Additive()


@rule("sum_to_size", linear=True)
def sum_to_size(call: Call) -> Result:
    """Sums whatever axes broadcasting had added."""
    x, sizes = call.arg(0), call.out.shape
    shift = x.dim() - len(sizes)
    gone = {d for d, size in enumerate(x.shape) if d < shift or size != sizes[d - shift]}
    try:
        return carry(call, [(x, gone)], call.out, {d - shift for d in gone if d >= shift})
    except Mixing:
        return Additive()


@rule(
    "amax amin prod any all logsumexp argmax argmin count_nonzero special_logsumexp aminmax "
    "median nanmedian mode std var std_mean var_mean norm linalg_vector_norm linalg_norm "
    "frobenius_norm nuclear_norm linalg_matrix_norm kthvalue trapezoid trapz cumulative_trapezoid "
    "gradient"
)
def reduction(call: Call) -> Result:
    """Over the axes that the call names; a spacing given as a tensor must be shared."""
    x, out, dims = _input(call), call.first, _dims(call)
    return carry(call, [(x, dims)], out, () if out.dim() != x.dim() else dims)


@rule("max min")
def extremum(call: Call) -> Result | list[Result]:
    """With a tensor as second argument element by element, else a reduction."""
    return elementwise(call) if isinstance(call.arg(1, "other"), Tensor) else reduction(call)


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
    """Same axes out as in all tensors; ``dims`` are worked along."""
    return carry(call, [(t, dims) for t in call.tensors()], call.first, dims)


@rule(
    "cumsum cumprod cummax cummin logcumsumexp softmax log_softmax special_softmax "
    "special_log_softmax _softmax _log_softmax _safe_softmax glu diff _softmax_backward_data "
    "_log_softmax_backward_data"
)
def scan(call: Call) -> Result:
    """Along the axes that the call names."""
    return along(call, _dims(call))


rule(" ".join(name for name in _AXES if name.startswith("fft")), linear=True)(scan)
rule("fft_fftshift fft_ifftshift", linear=True)(scan)


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


@rule("stft istft")
def stft(call: Call) -> Result:
    """A leading batch axis at most; everything else is one signal."""
    x, out = call.arg(0, "input"), call.out
    lead = x.dim() - 1 if call.name == "stft" else out.dim() - 1
    return carry(call, [(x, set(range(lead, x.dim())))], out, set(range(lead, out.dim())))


@rule("segment_reduce", routes=True)
def segments(call: Call) -> Result:
    """Runs of rows, each of one sample."""
    x, axis = call.arg(0, "data"), call.kwargs.get("axis", 0)
    lengths, offsets = call.kwargs.get("lengths"), call.kwargs.get("offsets")
    given = lengths if lengths is not None else offsets
    layout = call.layout(x)
    if layout is None or axis or given is None or given.dim() != 1:
        raise Mixing("segments along other axes than the first")
    if 0 not in layout.axes:
        return layout
    if layout.axes != (0,):
        raise Mixing("segments of rows that hold several samples")
    counts = lengths if lengths is not None else given.diff()
    count = call.out.shape[0]
    segment = torch.arange(count, device=x.device).repeat_interleave(counts.to(x.device))
    rows = call.colours(x).flatten()[: segment.numel()]
    why = "a segment holds rows of several samples"
    colours = colour_groups(segment, rows, count, why=why)
    return explicit(colours.view(-1, *(1,) * (call.out.dim() - 1)), call.n)


@rule(
    "unique unique_consecutive histc histogram combinations cartesian_prod cov corrcoef",
    routes=True,
)
def of_all_rows(call: Call) -> Result:
    """Which keys there are, counts, and pairs of rows depend on the whole batch."""
    fix = "to route rows by their keys: for key in keys.unique().tolist()"
    raise Mixing(
        f"{call.name} looks at the whole batch", fix if call.name.startswith("unique") else ""
    )


@rule("searchsorted", routes=True)
def searchsorted(call: Call) -> Result:
    """Rows of sorted sequences are searched on their own."""
    keys, values = call.arg(0, "sorted_sequence"), call.arg(1, "input")
    core = {values.dim() - 1} if keys.dim() > 1 else set()
    return carry(call, [(keys, {keys.dim() - 1}), (values, core)], call.out, core)


@rule("to_sparse coalesce")
def sparse(call: Call) -> Result:
    """The same elements; nothing is read off the shape of a sparse tensor without a look."""
    x = call.arg(0, "input", "self")
    layout = call.layout(x)
    if layout is None or layout.ids is not None:
        return layout
    return Layout(layout.axis, 1, ids_of(layout, x.shape, call.n, x.device))


@rule("to_dense")
def dense(call: Call) -> Result:
    """The same elements."""
    layout = call.layout(call.arg(0, "input", "self"))
    return layout if layout is None or layout.ids is None else explicit(layout.ids, call.n)
