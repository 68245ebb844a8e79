"""Registers all operators that hires relies on, family by family.

To add an operator: its entry here, its kernel in ``hires.parallel`` if its tiling needs one (a
window, statistics or a reduction), and a test. A window of pixels:

    output rows of a tile           a       b                 kernel k, stride s, padding p,
                                    :       :                 dilation d
    input rows that they need   a*s - p  ... (b-1)*s - p + d*(k-1)

A need beyond the tile's own rows is a halo, a need beyond the image is the ring.
"""

from __future__ import annotations

import functools
import math

from hires.plan.graph import Node
from hires.plan.operators import activations, products, windows
from hires.plan.operators.operator_facts import OperatorFacts, WindowFacts, declare

windowed = functools.partial(OperatorFacts, ("window",))


declare(
    "conv2d",
    windowed(
        window=WindowFacts(windows.convolution, ring=0.0, pads=True, strips=True),
        multiplies="output",
        overwritable=True,
        weight_channels=0,
        fused="fused_conv2d",
    ),
)
declare(
    "fused_conv2d",  # of networks that hires.plan.passes rewrites
    windowed(
        window=WindowFacts(windows.convolution, ring=0.0, pads=True, strips=True),
        multiplies="output",
        beside="other",
        overwritable=True,
    ),
)
declare(
    "conv_transpose2d",
    windowed(
        window=WindowFacts(windows.convolution),
        multiplies="input",
        weight_channels=1,
    ),
)
declare("conv1d conv3d", OperatorFacts(weight_channels=0))
declare("conv_transpose1d conv_transpose3d", OperatorFacts(weight_channels=1))
declare(
    "max_pool2d",
    windowed(window=WindowFacts(windows.pool, ring=-math.inf, pads=True), moves=True),
)
declare("avg_pool2d", windowed(window=WindowFacts(windows.pool, ring=0.0, pads=True)))


declare(
    "pad constant_pad_nd",
    windowed(window=WindowFacts(windows.pad, ring="value", moved=windows.moved_pads), moves=True),
)
declare("reflection_pad2d replication_pad2d", windowed(window=WindowFacts(windows.pad), moves=True))
declare(
    "roll",
    OperatorFacts(
        ("window",),
        "dims",
        window=WindowFacts(windows.roll, moved=windows.moved_dims),
        moves=True,
    ),
)
declare(
    "slice",
    OperatorFacts(
        ("window", "channels", "strided"),
        window=WindowFacts(windows.cut_out, ring=0.0, moved=windows.moved_dim),
        moves=True,
    ),
)
declare(
    "upsample_nearest2d _upsample_nearest_exact2d",
    windowed(window=WindowFacts(windows.interpolation), moves=True),
)
declare(
    "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    windowed(window=WindowFacts(windows.interpolation)),
)
declare("pixel_shuffle", windowed(window=WindowFacts(windows.pixel_shuffle), moves=True))
declare("pixel_unshuffle", windowed(window=WindowFacts(windows.pixel_unshuffle), moves=True))

# The kernels into which torch's dispatcher turns a convolution; no graph holds them.
declare(
    "convolution mkldnn_convolution convolution_backward "
    "_convolution_pointwise _convolution_pointwise_",
    OperatorFacts(copies_weight=True),
)


pointwise = functools.partial(OperatorFacts, tiling=("pointwise",))
"""Makes an entry; the operands align because equal maps are cut into equal tiles."""


def _drops(node: Node) -> bool:
    return bool(node.args["train"]) and 0 < node.args["p"] < 1


declare("relu", pointwise(in_place=True, activation=activations.plain))
declare("prelu", pointwise(vectors=True))
declare("fused_norm", pointwise(vectors=True, overwritable=True))
declare("sigmoid tanh silu hardswish hardsigmoid mish", pointwise(activation=activations.plain))
declare("relu6 hardtanh clamp clamp_min clip", pointwise(activation=activations.clamp))
declare("leaky_relu", pointwise(activation=activations.leaky_relu))
declare("gelu", pointwise(activation=activations.gelu))
declare("add", pointwise(overwritable=True))
declare(
    "elu selu celu log_sigmoid softplus softshrink hardshrink threshold clamp_max logit "
    "sub subtract rsub mul multiply div divide true_divide neg negative abs absolute sign sgn "
    "reciprocal square pow float_power hypot positive "
    "exp exp2 expm1 log log1p log2 log10 logaddexp logaddexp2 xlogy special_xlog1py "
    "sqrt rsqrt sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh sinc "
    "arcsin arccos arctan arctan2 arcsinh arccosh arctanh deg2rad rad2deg "
    "erf erfc erfinv special_erf special_erfc special_expit expit lgamma digamma i0 special_ndtri "
    "special_ndtr special_entr special_log_ndtr special_i0e special_i1 special_i1e "
    "floor ceil round trunc fix frac fmod remainder copysign heaviside ldexp "
    "maximum minimum fmax fmin lerp addcmul addcdiv "
    "eq ne lt le gt ge equal_nan not_equal less less_equal greater greater_equal "
    "isnan isinf isfinite isposinf isneginf isclose signbit nan_to_num where masked_fill "
    "logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not "
    "bitwise_xor __and__ __or__ __xor__ clone",
    pointwise(),
)
declare("_to_copy", pointwise(converts=True))
declare("to type_as", pointwise(may_share=True, like="other", converts=True))
declare("floor_divide", pointwise(ends_gradient=True))
declare("detach", pointwise(view=True, ends_gradient=True))
declare("zeros_like ones_like full_like", pointwise(ends_gradient=True))

declare("channel_shuffle", OperatorFacts(("pointwise",), vectors=True, moves=True))

drawn = functools.partial(pointwise, positional=True)
"""Makes the entry of an operator whose random numbers follow from their place in the batch."""
declare("dropout feature_dropout", drawn(random=_drops, may_share=True))
declare("alpha_dropout feature_alpha_dropout", drawn(random=_drops))


KINKS = (
    *("relu", "relu6", "leaky_relu", "prelu", "rrelu", "hardtanh", "hardswish", "hardsigmoid"),
    *("clamp", "clamp_min", "clamp_max", "clip", "abs", "absolute", "max_pool2d"),
    *("adaptive_max_pool2d", "amax", "amin", "max", "min", "maximum", "minimum", "fmax", "fmin"),
)
"""Operators whose gradient jumps: rounding may choose another side."""


def uses_batch_statistics(node: Node) -> bool:
    """Whether a node normalises by the microbatch's own mean and variance, as in training."""
    return node.kind == "batch_norm" and bool(node.args["training"])


def updates_statistics(node: Node) -> bool:
    """Whether a node also updates running statistics, as norms with ``running_mean`` do."""
    by_sample = node.kind == "instance_norm" and bool(node.args["use_input_stats"])
    return (uses_batch_statistics(node) or by_sample) and bool(node.args.get("running_mean"))


def has_stored_statistics(node: Node) -> bool:
    """Whether a node is a norm whose mean and variance do not depend on its input."""
    switch = {"batch_norm": "training", "instance_norm": "use_input_stats"}.get(node.kind)
    return switch is not None and not node.args[switch] and node.args["running_mean"] is not None


def norm_groups(node: Node, shape: list[int]) -> int | None:
    """Returns how many means each sample of an (n, C, H, W) map is normalised by.

    0: none, by running statistics. None: not by those of whole groups of channels.
    """
    if node.kind == "group_norm":
        return int(node.args["num_groups"])
    if node.kind == "instance_norm":
        return shape[1] if node.args["use_input_stats"] else 0
    normalised = len(node.args["normalized_shape"])
    return {3: 1, 2: shape[1]}.get(normalised)


def _mean_and_variance(node: Node, shape: list[int]) -> int | None:
    if node.kind == "batch_norm":
        return 2 * shape[1] if uses_batch_statistics(node) else 0
    groups = norm_groups(node, shape) if len(shape) == 4 else None
    return None if groups is None else 2 * shape[0] * groups


declare(
    "batch_norm",
    OperatorFacts(("statistics",), statistics=_mean_and_variance, overwritable=True),
)
declare(
    "group_norm instance_norm",
    OperatorFacts(("statistics",), statistics=_mean_and_variance),
)
declare(
    "layer_norm",
    OperatorFacts(("last dims", "statistics"), statistics=_mean_and_variance),
)
declare("rms_norm", OperatorFacts(("last dims",)))


def _order_of(node: Node) -> int:
    """One number for each sum of powers; none for a maximum, whose gradient ties share."""
    order = node.args.get("ord", node.args.get("p", 2))
    return int(isinstance(order, (int, float)) and 0 < order < math.inf)


declare(
    "chunk split split_with_sizes tensor_split _safe_softmax glu "
    "cumsum cumprod logcumsumexp cummax cummin topk sort argsort kthvalue median nanmedian mode "
    "any all index_select index_fill",
    OperatorFacts(("channels",)),
)
declare("softmax log_softmax", OperatorFacts(("channels", "softmax")))
declare("cat concat concatenate stack slice_scatter", OperatorFacts(("joined",)))
declare("gather take_along_dim scatter scatter_add scatter_reduce", OperatorFacts(("joined",)))
declare("index embedding", OperatorFacts(("indexed",)))
declare("cosine_similarity", OperatorFacts(("compared",)))
declare("unbind select count_nonzero", OperatorFacts(("channels",), drops=True))
declare("flip", OperatorFacts(("channels",), "dims", moves=True))
reduced = functools.partial(OperatorFacts, ("channels", "reduction"))
declare("sum mean prod logsumexp", reduced(reduction=lambda node: 1))
declare("amax amin", reduced(reduction=lambda node: 2))


def _extremes(node: Node) -> int:
    """Equal extremes share the gradient; along a dim the first has it, which has a row and column.

    An index of all numbers is no number of the image.
    """
    if "dim" in node.args:
        return 0 if node.args["dim"] is None else 3
    return 2


declare(
    "max min",  # of channels, of everything, or of two maps
    OperatorFacts(("channels", "pointwise", "reduction"), reduction=_extremes),
)
declare("argmax argmin", reduced(reduction=_extremes))
declare("var std var_mean std_mean", reduced(reduction=lambda node: 2))
declare("linalg_vector_norm norm", reduced(reduction=_order_of))
pooled = functools.partial(OperatorFacts, ("reduction", "window"), "output_size")
declare("adaptive_avg_pool2d", pooled(reduction=lambda node: 1, window=WindowFacts(windows.bins)))
declare("adaptive_max_pool2d", pooled(reduction=lambda node: 3, window=WindowFacts(windows.bins)))


def _drops_weights(node: Node) -> bool:
    return bool(node.args["dropout_p"] > 0)


product = functools.partial(OperatorFacts, ("product",))
declare(
    "linear",
    product(
        multiplies="output",
        product=products.linear,
        weight_channels=0,
        fused="fused_linear",
    ),
)
declare("fused_linear", product(multiplies="output", product=products.linear))
declare("matmul mm mv bmm addmm baddbmm", product(product=products.matmul))
declare("einsum", product(product=products.einsum))
declare("tensordot", product(product=products.tensordot))
declare(
    "scaled_dot_product_attention",
    product(random=_drops_weights, product=products.attention),
)


def _draws(node: Node) -> bool:
    return bool(node.args.get("training", True))


def _drops_between_layers(node: Node) -> int:
    drops = node.args["train"] and node.args["dropout"] > 0
    return node.args["num_layers"] - 1 if drops else 0


declare("getitem", OperatorFacts(("element",), view=True, may_share=True))

moved = functools.partial(OperatorFacts, view=True, moves=True)
"""Makes an entry: pixels stay in their tile, in another order of dims (``hires.plan.factors``)."""

declare("view _unsafe_view", moved(("regrouped",)))
declare(
    "flatten unflatten reshape squeeze unsqueeze ravel atleast_1d atleast_2d atleast_3d view_as "
    "reshape_as",
    moved(("regrouped",), may_share=True),
)
declare("as_strided view_as_complex view_as_real", moved(moves=False))
declare(
    "permute transpose t numpy_T mT mH matrix_H movedim moveaxis swapaxes swapdims",
    moved(("permuted",)),
)
declare("repeat tile", OperatorFacts(("repeated",), moves=True))
declare(
    "repeat_interleave",
    OperatorFacts(("channels", "window"), window=WindowFacts(windows.interleave), moves=True),
)
declare("expand", OperatorFacts(("expanded",), moves=True))

declare("alias", OperatorFacts(same_value=True, view=True))
declare("contiguous", OperatorFacts(same_value=True, may_share=True))
declare("lift_fresh_copy _assert_tensor_metadata", OperatorFacts(same_value=True))

declare("empty_like", pointwise(ends_gradient=True))
declare(
    "new_empty new_full new_ones new_zeros",
    OperatorFacts(("constant",), ends_gradient=True),
)
declare(
    "rand_like randn_like randint_like bernoulli uniform normal_functional exponential random",
    drawn(random=_draws, ends_gradient=True),
)
declare("rrelu rrelu_with_noise_functional", drawn(random=_draws))
declare("rand randn randint normal", drawn(tiling=(), random=_draws, ends_gradient=True))
declare("lstm gru rnn_tanh rnn_relu", OperatorFacts(random=_drops_between_layers))
declare(
    "multinomial poisson log_normal cauchy geometric randperm",
    OperatorFacts(random=_draws, ends_gradient=True),
)
