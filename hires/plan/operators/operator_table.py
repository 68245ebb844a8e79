"""Registers the operators that torch itself computes, and those over the image, family by family.

To add an operator: a module in ``hires.operators`` with its entry, and its kernel if its tiling
needs one (a window, statistics or a reduction), and a test.
"""

from __future__ import annotations

import functools
import math

from hires.plan.graph import Node
from hires.plan.operators import formulas
from hires.plan.operators.operator_facts import (
    BATCH_NORM,
    GROUP_NORM,
    LAYER_NORM,
    SOFTMAX,
    OperatorFacts,
    declare,
)

_NORMS, _REDUCTION = "hires.parallel.norms:", "hires.parallel.reductions:reduction"
_SOFTMAX, _INT8 = "hires.parallel.image_softmax:softmax", "hires.plan.passes.int8_rules:"
_BY_TABLE, _FUSED = f"{_INT8}activation", "hires.parallel.fused_products:"

declare("conv1d conv3d", OperatorFacts(weight_channels=0))
declare("conv_transpose1d conv_transpose3d", OperatorFacts(weight_channels=1))

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


described = functools.partial(pointwise, activation=formulas.described())
clamps = functools.partial(pointwise, activation=formulas.clamp, has_kinks=True)
jumps = functools.partial(pointwise, has_kinks=True)

_CLAMP = f"{_INT8}clamp"
declare("relu", described(in_place=True, keeps="value", has_kinks=True, int8=_CLAMP))
declare("prelu", jumps(per_channel=True))
declare(
    "fused_norm",
    pointwise(
        per_channel=True, overwritable=True, own=f"{_FUSED}fused_norm", int8=f"{_INT8}fused_norm"
    ),
)
declare("sigmoid tanh", described(keeps="value", int8=_BY_TABLE))
declare("silu mish", described(int8=_BY_TABLE))
declare("hardswish hardsigmoid", described(has_kinks=True, int8=_BY_TABLE))
declare("hardtanh relu6 clamp", clamps(int8=_CLAMP))
declare("clamp_min clip", clamps())
leaky, gelu = formulas.described("negative_slope"), formulas.described("approximate")
declare("leaky_relu", jumps(activation=leaky, int8=_BY_TABLE))
declare("gelu", pointwise(activation=gelu, int8=_BY_TABLE))
declare("add", pointwise(overwritable=True, keeps="", int8=f"{_INT8}add"))
declare("mul", pointwise(keeps="factors", int8=f"{_INT8}mul"))
declare("multiply div divide true_divide", pointwise(keeps="factors"))
declare("clamp_max abs absolute maximum minimum fmax fmin", jumps())
declare(
    "sub subtract rsub neg negative sign positive deg2rad rad2deg floor ceil round trunc fix frac "
    "heaviside clone where masked_fill",
    pointwise(keeps=""),
)
declare(
    "reciprocal exp exp2 expm1 sqrt rsqrt tan expit special_expit special_ndtri",
    pointwise(keeps="value"),
)
declare(
    "sgn hypot copysign ldexp special_log_ndtr special_i0e special_i1 special_i1e",
    pointwise(keeps="inputs value"),
)
declare("log_sigmoid", pointwise(keeps="inputs more"))
declare("special_ndtr", pointwise(keeps="more"))
declare("float_power", pointwise(keeps="value more"))
declare(
    "elu selu celu softplus softshrink hardshrink threshold logit "
    "square pow log log1p log2 log10 logaddexp logaddexp2 xlogy special_xlog1py "
    "sin cos asin acos atan atan2 sinh cosh asinh acosh atanh sinc "
    "arcsin arccos arctan arctan2 arcsinh arccosh arctanh "
    "erf erfc erfinv special_erf special_erfc lgamma digamma i0 special_entr "
    "fmod remainder lerp addcmul addcdiv "
    "eq ne lt le gt ge equal_nan not_equal less less_equal greater greater_equal "
    "isnan isinf isfinite isposinf isneginf isclose signbit nan_to_num "
    "logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not "
    "bitwise_xor __and__ __or__ __xor__",
    pointwise(),
)
declare("_to_copy", pointwise(converts=True, keeps=""))
declare("to type_as", pointwise(may_share=True, shape_only_arg="other", converts=True, keeps=""))
declare("floor_divide", pointwise(ends_gradient=True))
declare("detach", pointwise(view=True, ends_gradient=True))
declare("zeros_like ones_like full_like", pointwise(ends_gradient=True))

declare("channel_shuffle", OperatorFacts(("pointwise",), per_channel=True, is_selection=True))

drawn = functools.partial(pointwise, positional="number")
"""Makes the entry of an operator whose random numbers follow from their place in the batch."""
declare("dropout", drawn(random=_drops, may_share=True, keeps="more"))
declare("feature_dropout", drawn(random=_drops, positional="channel", may_share=True, keeps=""))
declare("alpha_dropout", drawn(random=_drops, keeps="more"))
declare("feature_alpha_dropout", drawn(random=_drops, positional="channel", keeps=""))


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
    OperatorFacts(
        ("statistics",),
        statistics=_mean_and_variance,
        kernel=f"{_NORMS}batch_norm",
        overwritable=True,
        family=BATCH_NORM,
        int8=f"{_INT8}norm",
    ),
)
sample_norm = functools.partial(
    OperatorFacts, statistics=_mean_and_variance, kernel=f"{_NORMS}sample_norm"
)
declare("group_norm instance_norm", sample_norm(("statistics",), family=GROUP_NORM))
declare("layer_norm", sample_norm(("last dims", "statistics"), family=LAYER_NORM))
declare("rms_norm", OperatorFacts(("last dims",), family=LAYER_NORM, keeps="inputs more"))


def _order_of(node: Node) -> int:
    """One number for each sum of powers; none for a maximum, whose gradient ties share."""
    order = node.args.get("ord", node.args.get("p", 2))
    return int(isinstance(order, (int, float)) and 0 < order < math.inf)


along = functools.partial(OperatorFacts, ("channels",))
declare("glu any all", along())
declare("chunk split split_with_sizes tensor_split cumsum index_select index_fill", along(keeps=""))
declare("_safe_softmax", along(keeps="value"))
declare("cumprod logcumsumexp", along(keeps="inputs value"))
declare("cummax cummin", along(keeps="inputs places"))
declare("topk sort argsort kthvalue median nanmedian mode", along(keeps="places"))
declare(
    "softmax log_softmax",
    OperatorFacts(("channels", "softmax"), kernel=_SOFTMAX, family=SOFTMAX, keeps="value"),
)
joined = functools.partial(OperatorFacts, ("joined",))
declare("cat", joined(keeps="", int8=f"{_INT8}cat"))
declare("concat stack concatenate slice_scatter", joined(keeps=""))
declare("gather", joined())
declare("take_along_dim", joined(keeps="inputs places"))
declare("scatter scatter_add", joined(keeps=""))
declare("scatter_reduce", joined(keeps="inputs value"))
declare("index", OperatorFacts(("indexed",), keeps=""))
declare("embedding", OperatorFacts(("indexed",)))
declare("cosine_similarity", OperatorFacts(("compared",), keeps="inputs more"))
declare("unbind select count_nonzero", along(squeezes_dim=True, keeps=""))
declare("flip", OperatorFacts(("channels",), "dims", is_selection=True))
reduced = functools.partial(OperatorFacts, ("channels", "reduction"), kernel=_REDUCTION)
declare("sum", reduced(reduction=lambda node: 1, keeps=""))
declare("prod logsumexp", reduced(reduction=lambda node: 1, keeps="inputs value"))
declare("mean", reduced(reduction=lambda node: 1, keeps="", int8=f"{_INT8}mean"))
declare("amax amin", reduced(reduction=lambda node: 2, has_kinks=True, keeps="inputs value"))


def _extremes(node: Node) -> int:
    """Equal extremes share the gradient; along a dim the first has it, which has a row and column.

    An index of all numbers is no number of the image.
    """
    if "dim" in node.args:
        return 0 if node.args["dim"] is None else 3
    return 2


declare(
    "max min",  # of channels, of everything, or of two maps
    OperatorFacts(
        ("channels", "pointwise", "reduction"),
        reduction=_extremes,
        kernel=_REDUCTION,
        has_kinks=True,
        keeps="inputs value places",
    ),
)
declare("argmax argmin", reduced(reduction=_extremes))
declare("var var_mean", reduced(reduction=lambda node: 2))
declare("std std_mean", reduced(reduction=lambda node: 2, keeps="inputs value"))
declare("linalg_vector_norm norm", reduced(reduction=_order_of, keeps="inputs value"))


def _drops_weights(node: Node) -> bool:
    return bool(node.args["dropout_p"] > 0)


product = functools.partial(OperatorFacts, ("product",))
declare(
    "linear",
    product(
        multiplies="output",
        product=formulas.linear,
        weight_channels=0,
        fused="fused_linear",
        int8=f"{_INT8}linear",
    ),
)
declare(
    "fused_linear",
    product(
        multiplies="output",
        product=formulas.linear,
        own=f"{_FUSED}fused_linear",
        int8=f"{_INT8}linear",
    ),
)
declare("matmul mm mv bmm addmm baddbmm", product(product=formulas.matmul))
declare("einsum", product(product=formulas.einsum))
declare("tensordot", product(product=formulas.tensordot))
declare(
    "scaled_dot_product_attention",
    product(random=_drops_weights, product=formulas.attention, keeps="inputs value"),
)


def _draws(node: Node) -> bool:
    return bool(node.args.get("training", True))


def _drops_between_layers(node: Node) -> int:
    drops = node.args["train"] and node.args["dropout"] > 0
    return node.args["num_layers"] - 1 if drops else 0


declare("getitem", OperatorFacts(("element",), view=True, may_share=True))

moved = functools.partial(OperatorFacts, view=True, is_selection=True)
"""Makes an entry: pixels stay in their tile, in another order of dims (``hires.plan.factors``)."""

declare("view _unsafe_view", moved(("regrouped",)))
declare(
    "flatten unflatten reshape squeeze unsqueeze ravel atleast_1d atleast_2d atleast_3d view_as "
    "reshape_as",
    moved(("regrouped",), may_share=True),
)
declare("as_strided view_as_complex view_as_real", moved(is_selection=False))
declare(
    "permute transpose t numpy_T mT mH matrix_H movedim moveaxis swapaxes swapdims",
    moved(("permuted",)),
)
declare("repeat tile", OperatorFacts(("repeated",), is_selection=True))
declare("expand", OperatorFacts(("expanded",), is_selection=True))

declare("alias", OperatorFacts(is_identity=True, view=True))
declare("contiguous", OperatorFacts(is_identity=True, may_share=True))
declare("lift_fresh_copy _assert_tensor_metadata", OperatorFacts(is_identity=True))

declare("empty_like", pointwise(ends_gradient=True))
declare(
    "new_empty new_full new_ones new_zeros",
    OperatorFacts(("constant",), ends_gradient=True),
)
declare(
    "rand_like randn_like randint_like bernoulli uniform normal_functional exponential random",
    drawn(random=_draws, ends_gradient=True),
)
declare("rrelu", drawn(random=_draws, has_kinks=True, keeps="inputs more"))
declare("rrelu_with_noise_functional", drawn(random=_draws))
declare("rand randn randint normal", drawn(tiling=(), random=_draws, ends_gradient=True))
declare(
    "lstm gru rnn_tanh rnn_relu", OperatorFacts(random=_drops_between_layers, keeps="value more")
)
declare(
    "multinomial poisson log_normal cauchy geometric randperm",
    OperatorFacts(random=_draws, ends_gradient=True),
)
