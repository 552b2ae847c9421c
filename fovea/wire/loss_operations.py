"""The operations allowed in a traced loss, under the names that torch.fx records.

Operations that write in place, draw random numbers, read files or devices, call back into Python, or derive a size from
values are excluded on purpose. fovea_services/trainer/losses/graph_evaluation.py maps each name to a callable.
"""

_UNARY = """
abs absolute acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac
isfinite isinf isnan lgamma log log10 log1p log2 logical_not logit nan_to_num neg negative positive rad2deg reciprocal
relu round rsqrt sgn sigmoid sign sin sinc sinh sqrt square tan tanh trunc bitwise_not
""".split()

_BINARY = """
add atan2 bitwise_and bitwise_or bitwise_xor clamp clamp_max clamp_min clip copysign div divide eq float_power
floor_divide fmax fmin fmod ge greater greater_equal gt heaviside hypot isclose le less less_equal lerp logaddexp
logaddexp2 logical_and logical_or logical_xor lt maximum minimum mul multiply ne not_equal pow remainder sub subtract
true_divide where xlogy addcdiv addcmul
""".split()

_REDUCTIONS = """
all amax amin aminmax any argmax argmin count_nonzero cummax cummin cumprod cumsum diff dist kthvalue log_softmax
logcumsumexp logsumexp max mean median min nanmean nanmedian nanquantile nansum prod quantile softmax std sum var
argsort sort topk msort
""".split()

_SHAPES = """
broadcast_to chunk clone detach diag diag_embed diagonal flatten flip gather index_select masked_fill masked_select
movedim narrow numel permute ravel reshape roll select squeeze swapaxes swapdims t take take_along_dim tensor_split tile
trace transpose tril triu unbind unflatten unsqueeze
""".split()

_PRODUCTS = "bmm dot inner matmul mm mv outer vdot".split()

_TORCH_ONLY = """
cat concat concatenate cosine_similarity hstack stack std_mean var_mean vstack
arange eye full full_like linspace ones ones_like scalar_tensor zeros zeros_like
functional.norm functional.split
_C._linalg.linalg_norm _C._linalg.linalg_vector_norm
_C._nn.gelu _C._nn.log_sigmoid _C._nn.softplus
_C._special.special_digamma _C._special.special_entr _C._special.special_erf _C._special.special_erfc
_C._special.special_exp2 _C._special.special_expit _C._special.special_expm1 _C._special.special_gammaln
_C._special.special_log1p _C._special.special_log_ndtr _C._special.special_log_softmax _C._special.special_logit
_C._special.special_logsumexp _C._special.special_ndtr _C._special.special_sinc _C._special.special_softmax
_C._special.special_xlog1py _C._special.special_xlogy
nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits nn.functional.elu
nn.functional.hardsigmoid nn.functional.hardtanh nn.functional.huber_loss nn.functional.kl_div nn.functional.l1_loss
nn.functional.leaky_relu nn.functional.log_softmax nn.functional.margin_ranking_loss nn.functional.mish
nn.functional.mse_loss nn.functional.normalize nn.functional.pad nn.functional.relu nn.functional.relu6
nn.functional.selu nn.functional.sigmoid nn.functional.silu nn.functional.smooth_l1_loss nn.functional.softmax
nn.functional.softmin nn.functional.softsign nn.functional.tanh nn.functional.tanhshrink
""".split()

_METHOD_ONLY = """
bfloat16 bool contiguous cpu dim double expand expand_as float half int long ndimension nelement new_full new_ones
new_zeros norm repeat size split to type_as view view_as
""".split()

_OPERATOR = """
abs add and_ eq floordiv ge getitem gt invert le lt matmul mod mul ne neg or_ pos pow sub truediv xor
""".split()

_MATH = """
acos asin atan atan2 ceil copysign cos cosh erf erfc exp expm1 fabs floor fmod hypot isfinite isinf isnan log log10
log1p log2 pow sin sinh sqrt tan tanh trunc
""".split()

_TENSOR = (*_UNARY, *_BINARY, *_REDUCTIONS, *_SHAPES, *_PRODUCTS)

GETATTR = "getattr"

TORCH_FUNCTIONS = frozenset(f"torch.{name}" for name in (*_TENSOR, *_TORCH_ONLY))
OPERATORS = frozenset(f"operator.{name}" for name in _OPERATOR)
MATH_FUNCTIONS = frozenset(f"math.{name}" for name in _MATH)
FUNCTIONS = TORCH_FUNCTIONS | OPERATORS | MATH_FUNCTIONS | {GETATTR}
"""Allowed targets of `call_function`."""

METHODS = frozenset((*_TENSOR, *_METHOD_ONLY))
"""Allowed targets of `call_method`; all are methods of a tensor."""

ATTRIBUTES = frozenset({"T", "device", "dtype", "indices", "mT", "ndim", "shape", "values"})
"""Attributes that `getattr` may read."""

CONSTANTS = {
    "dtype": frozenset({"bfloat16", "bool", "float16", "float32", "float64", "int32", "int64"}),
    "device": frozenset({"cpu"}),
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format"}),
}

WORDS = frozenset(
    """
    batchmean constant cpu floor fro higher linear lower mean midpoint nearest none reflect replicate sum tanh trunc
    """.split()
)
"""Allowed string arguments: kinds of reduction, rounding, interpolation and padding."""

FORBIDDEN_KEYWORDS = frozenset({"generator", "out", "pin_memory"})
"""Keyword arguments that must be absent or null."""
