"""Operators that work element by element, and those that only copy or only look at a shape."""

from __future__ import annotations

from torch import Tensor

from ...errors import Mixing
from ..call import Call, Result, carry, elementwise, first_only
from ..layout import align
from ..operators import CONSTANT, RULES, rule

rule(
    """abs absolute acos acosh addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
    arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip complex conj_physical
    copysign cos cosh deg2rad digamma elu eq erf erfc erfinv exp exp2 expm1 fix float_power floor
    floor_divide fmax fmin fmod frac frexp gcd ge gelu greater greater_equal gt hardshrink
    hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isclose isfinite isinf isnan
    isneginf isposinf isreal lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p
    log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
    masked_fill maximum minimum mish mvlgamma nan_to_num ne nextafter not_equal polar polygamma pow
    rad2deg reciprocal relu relu6 remainder round rpow rfloordiv rlshift rrshift rmod rrelu rsqrt
    selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh
    threshold _threshold trunc xlogy bernoulli poisson binomial normal dropout native_dropout
    alpha_dropout feature_dropout feature_alpha_dropout rdiv log_sigmoid_forward
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_digamma special_entr special_erf special_erfc
    special_erfcx special_erfinv special_exp2 special_expit special_expm1 special_gammainc
    special_gammaincc special_gammaln special_hermite_polynomial_h special_hermite_polynomial_he
    special_i0 special_i0e special_i1 special_i1e special_laguerre_polynomial_l
    special_legendre_polynomial_p special_log1p special_log_ndtr special_logit
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri special_polygamma
    special_psi special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_sinc
    special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta
    fake_quantize_per_tensor_affine _fake_quantize_learnable_per_tensor_affine
    _standard_gamma _standard_gamma_grad _dirichlet_grad"""
)(elementwise)
rule("add sub rsub subtract mul multiply div divide true_divide neg negative", linear=True)(
    elementwise
)


@rule("where")
def where(call: Call) -> Result | list[Result]:
    """With one argument: indices, which only route."""
    return elementwise(call) if isinstance(call.out, Tensor) else [None] * len(call.out)


# Arguments are broadcast, and every element of the result comes from one of each.
POINTWISE = frozenset({"where", *(name for name, found in RULES.items() if found is elementwise)})


@rule("copy")
def copy(call: Call) -> Result:
    """``x.copy_(y)``: whatever x was is gone."""
    source = call.arg(1, "src", "other")
    layout = call.layout(source)
    return None if layout is None else align(layout, source.shape, call.out.shape, call.n)


rule(
    """to type type_as float double half bfloat16 int long short byte char bool cpu cuda chalf
    cfloat cdouble contiguous clone detach alias data real imag conj resolve_conj resolve_neg
    positive detach_copy alias_copy pin_memory tril triu
    _autocast_to_full_precision _autocast_to_reduced_precision""",
    linear=True,
)(first_only)


def constant(call: Call) -> Result:
    """The values do not depend on the argument's values."""
    return None


_CONSTANT = """zeros_like ones_like empty_like rand_like randn_like randint_like new_zeros new_ones
    new_empty new_empty_strided zero uniform random exponential geometric log_normal cauchy empty
    zeros ones eye rand randn randint randperm nonzero argwhere nonzero_static empty_strided
    bartlett_window blackman_window hamming_window hann_window kaiser_window tril_indices
    triu_indices"""
rule(_CONSTANT, routes=True)(constant)
CONSTANT.update(_CONSTANT.split())
rule("embedding_renorm")(constant)  # shortened for whoever looks rows up: still a table
rule("fill_diagonal unravel_index")(first_only)  # beside the diagonal; each index on its own


@rule(
    "prelu fake_quantize_per_channel_affine _fake_quantize_learnable_per_channel_affine "
    "fused_moving_avg_obs_fake_quant"
)
def by_channel(call: Call) -> Result:
    """Weights run over one axis, so samples there keep their colour too."""
    if call.name.startswith("fused") and bool(call.arg(1, "observer_on").any()):
        raise Mixing(
            "an observer takes the range of activations from the whole batch",
            "model.apply(torch.ao.quantization.disable_observer)",
        )
    return carry(call, [(call.arg(0, "input"), ())], call.out)
