"""Defines the entry of an operator, the table of entries by name, its page, and families."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hires.core.registry import Named, Registry
from hires.plan.graph import Graph, Node
from hires.plan.operators.formulas import Product
from hires.plan.tiling import Axes


@dataclass(frozen=True)
class WindowFacts:
    """What an operator reads around each output pixel."""

    axes: Callable[[Node, list[int], Graph], Axes | None]
    """(node, shape of its input, network) -> rows and columns; None if this use cannot be tiled."""
    kernel: Named
    """(:class:`~hires.parallel.window.Window`, its pixels, arguments by name) -> the value there.
    """
    ring: float | str | None = None
    """Value of the pixels outside the image, or the argument that holds it; None: none is read."""
    pads: bool = False
    """Whether torch's kernel can make the ring itself, where the image is not cut in that dim."""
    moved: Callable[[Node, list[int]], dict[str, Any]] | None = None
    """(node, order of its input's dims) -> its arguments for an input of that order; None: rows and
    columns are always the last dims."""
    strips: bool = False
    """Whether the interior is computed while the halo travels (``hires.parallel.strips``)."""


@dataclass(frozen=True)
class OperatorFacts:
    """The entry of one operator; what is left out does not hold."""

    tiling: tuple[str, ...] = ()
    """How tiles compute it (:mod:`hires.plan.rules`); of several ways the first whose condition the
    node meets.

    ``pointwise``: every number alone. ``channels``: along ``argument``, if tiles do not cut that
    dim. ``last dims``: along the last ones. ``joined``: several, along such a dim or a new one.
    ``indexed``: other places of such dims, or rows of a table for each pixel of a map of indices.
    ``compared``: two operands along such a dim. ``regrouped``, ``permuted``, ``expanded``,
    ``repeated``, ``strided``: a reshape, another order of dims, copies, every k-th row; pixels stay
    in their tile. ``product``: along the dims of ``product``. ``window``: from the tile's pixels
    and a halo. ``statistics``: with sums over all tiles first. ``reduction``: a sum, maximum ... of
    the image, after which every tile holds the whole value. ``softmax``: along rows, columns or
    pixels, from such a sum. ``constant``: of the type of its input, whatever that holds.
    ``element``: one tensor of a list.
    """
    argument: str = "dim"
    """The argument that holds the dims or sizes of ``channels``."""
    window: WindowFacts | None = None
    """The pixels that it reads; required by the tiling ``window``."""
    statistics: Callable[[Node, list[int]], int | None] | None = None
    """(node, shape of its input) -> numbers that each tile or shard sends first; 0: none; None:
    this use cannot be tiled."""
    reduction: Callable[[Node], int] | None = None
    """Numbers that each tile sends for every number of a ``reduction``; 0: this use is none."""
    random: Callable[[Node], int] | None = None
    """How many times a node draws random numbers; None: as torch declares (``Node.seeded``)."""
    positional: Literal["", "number", "channel"] = ""
    """What has a random number of its own, which follows from its place in the batch; those of
    others follow from the microbatch, for all of the value (``hires.nets.random_draws``)."""
    multiplies: Literal["output", "input"] | None = None
    """A product with a weight: one multiply-add for each number of its output (or input) and each
    number of ``weight[0]``. Others cost one operation for each number of their value."""
    weight_channels: int | None = None
    """The dim of its weight that holds the channels of its value, by which a norm behind it can be
    folded into it; None: it has no such weight."""
    product: Callable[[Node, Graph], Product] | None = None
    """Its operands dim by dim; required by the tiling ``product``."""
    squeezes_dim: bool = False
    """Whether its results lack the dim along which it works, though it takes no ``keepdim``."""
    per_channel: bool = False
    """Whether a vector operand has one number per channel; elsewhere its dim is the columns."""
    residual_arg: str = ""
    """The argument of a window that is no window: a value that lies like the result."""
    activation: Callable[[Node], list[Any] | None] | None = None
    """(node) -> what it does to each number, as ``fused_conv2d`` has it; None: not this use."""
    fused: str = ""
    """The operator that is this one with an activation behind it, and a sum with its residual."""
    view: bool = False
    converts: bool = False
    """Whether it may give its input another type."""
    may_share: bool = False
    """Whether its value may lie in its input's memory although its schema declares no alias."""
    shape_only_arg: str = ""
    """The argument that is read for its size and type alone: no gradient flows to it."""
    is_identity: bool = False
    in_place: bool = False
    """Whether it may write its value over its input, if that is ``overwritable``."""
    overwritable: bool = False
    """Whether its own backward pass does not read its value, so that a reader may overwrite it."""
    ends_gradient: bool = False
    is_selection: bool = False
    """Whether its value holds numbers of its input and no others."""
    quantized: bool = False
    copies_weight: bool = False
    """Whether its kernel holds a second copy of its weight while it runs (oneDNN's own order)."""
    kernel: Named | None = None
    """(node, :class:`~hires.parallel.context.Context`, what binds its arguments) -> the callable of
    a node with the tiling ``statistics``, ``reduction`` or ``softmax``; required by these."""
    module: str = ""
    """The module that registers it with ``torch.library``, whose import every rank needs."""
    own: Named | None = None
    """(node, context) -> what computes all of the value from arguments by name, of an operator that
    torch does not have, if it has no window."""
    packs: Named | None = None
    """(its window or what ``own`` returned, which keeps it; its input without memory; arguments by
    name) -> its weight in the order in which its kernel reads it; None: it reads the weight itself.
    In inference a rank computes also the whole value of such an operator by its window."""
    int8: Named | None = None
    """Its rule with 8-bit integers (``hires.plan.passes.int8_rules``); None: it has none, or that
    of ``is_selection``."""
    family: str = ""
    """The class whose kernels are measured together; empty: that follows from the entry."""
    keeps: str | None = None
    """What torch keeps for its backward pass, of ``inputs``, ``factors`` (inputs; none of a product
    with a number), ``value``, ``places`` (an index for each number of its value) and ``more``
    (another such tensor, of its type); None: its inputs, unless it only moves numbers."""
    has_kinks: bool = False
    """Whether its gradient jumps: rounding may choose another side."""
    kernel_per_shape: bool = False
    """Whether each shape has a kernel of 8 bits."""
    only_converts: bool = False
    """Whether it changes between real numbers and 8-bit integers, and computes nothing else."""
    rounds: bool = False


OPERATORS: Registry[OperatorFacts] = Registry("operator", "hires.plan.operators", "hires.operators")
"""Name without overload -> its entry: ``conv2d`` of ATen, ``mine::blur`` of ``torch.library``."""

UNKNOWN = OperatorFacts(keeps="")
"""The entry of an operator that has none: tiles gather its inputs and compute it whole."""


def kept_of(facts: OperatorFacts) -> list[str]:
    """Returns what torch keeps for the backward pass of an operator, as ``keeps`` names it."""
    if facts.keeps is None:
        return [] if facts.view or facts.is_selection else ["inputs"]
    return facts.keeps.split()


def declare(names: str, facts: OperatorFacts) -> None:
    """Registers one entry for each of the operators, whose names are separated by spaces."""
    for name in names.split():
        OPERATORS.register(name)(facts)


def windowed(window: WindowFacts, **facts: Any) -> OperatorFacts:
    """Returns the entry of an operator that reads a window of pixels in every use."""
    return OperatorFacts(("window",), window=window, **facts)


def facts_of(kind: str) -> OperatorFacts:
    """Returns the entry of an operator by its name without overload."""
    return OPERATORS.get(kind) or UNKNOWN


def activation_of(node: Node) -> list[Any] | None:
    """Returns the activation that a node is, as ``fused_conv2d`` has it; None: it is none."""
    describe = facts_of(node.kind).activation
    return None if describe is None else describe(node)


def num_draws(node: Node) -> int:
    """Returns how many times a node draws random numbers, each time for a whole tensor."""
    draws = facts_of(node.kind).random
    return int(node.seeded if draws is None else draws(node))


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    return num_draws(node) > 0


def gradient_inputs(node: Node) -> list[str]:
    """Returns the values that a node reads and to which its gradient flows."""
    like = node.args.get(facts_of(node.kind).shape_only_arg)
    return [value for value in node.inputs if like != {"value": value}]


def flops_of(node: Node, weight: list[int] | None, source: list[int]) -> int:
    """Returns the floating-point operations of a node's forward pass, an estimate.

    ``weight`` is the shape of its first parameter of two or more dims, ``source`` its input's.
    """
    if node.shape is None:
        return 0
    multiplies = facts_of(node.kind).multiplies
    if multiplies is None or weight is None:
        return node.num_elements
    numbers = node.num_elements if multiplies == "output" else math.prod(source)
    return 2 * numbers * math.prod(weight[1:])


def operator_rows() -> dict[str, dict[str, str]]:
    """Returns the entry of every operator in words, by name in alphabetical order."""
    return {name: _row(OPERATORS[name]) for name in sorted(OPERATORS)}


def _row(facts: OperatorFacts) -> dict[str, str]:
    absent = facts.is_identity or facts.copies_weight  # the latter is a kernel of torch
    names = ("in_place", "overwritable", "may_share", "view", "copies_weight", "ends_gradient")
    memory = ", ".join(name.replace("_", " ") for name in names if getattr(facts, name))
    flops = f"2 per {facts.multiplies} number and weight[0]" if facts.multiplies else "1 per number"
    return {
        "tiles": "not in the graph" if absent else " or ".join(facts.tiling) or "no",
        "memory": memory or "-",
        "flops": "-" if absent else flops,
    }


CONV, CONV_1X1, GROUPED, TRANSPOSED = "convolution", "1x1 convolution", "grouped", "transposed"
PRODUCT, BATCH_NORM, GROUP_NORM, LAYER_NORM = "product", "batch norm", "group norm", "layer norm"
POINTWISE, POOL, RESIZE, SOFTMAX = "pointwise", "pool", "resize", "softmax"
COPY, REDUCTION, OTHER = "copy", "reduction", "other"
"""Families of operators whose kernels are measured together."""
