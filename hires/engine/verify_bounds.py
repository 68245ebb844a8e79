r"""States how far a layout may be from one process in float64.

In float64 all that differs is the order of sums: 1e-10. A lower precision rounds every number, by u
= 2^-8 of itself in bf16, 2^-11 in fp16 and tf32, 2^-24 in fp32. How errors grow:

Forward. Each of d operators on the way rounds what it makes, and each product its weights, too.
Independent errors grow with sqrt(d): to u sqrt(d / 3) of a usual number, as they are spread evenly
over [-u, u]. The largest of 10^8 is 6 standard deviations, so outputs, losses and statistics,
relative to the largest number, are within

    F = 6 u sqrt(d / 3) < 4 u sqrt(d)

Backward. The way is twice as long: 4 u sqrt(2 d). Where an error crosses a kink, as that of a ReLU,
the gradient is passed or not instead of the other way round. A number with a spread of 1 is within
the error e of the kink, u sqrt(d / 3), with the probability e / 3 (density 0.4, mean error 0.8 e),
so k kinks change sqrt(k e / 3) of the gradient's norm. Twice that for the largest number:

    B = 4 u sqrt(2 d) + 2 sqrt(k u sqrt(d) / 5)

A sum of N pixels, as the mean of a batch norm, may round each of its partial sums in fp32: N
operators more of u = 2^-24, which count in fp32 alone.

Messages. A codec changes a number by its own u at each of m messages on the way, so that u sqrt(d)
becomes sqrt(u^2 d + u_codec^2 m). No way has more messages than all stages together have exchanges
of pixels, and one between every two stages. Sums of gradients are coded twice, as terms and as
sums, and an update of the parameters once more.

``MOST`` bounds both: a gradient that is averaged over two tiles, not summed, is wrong by 0.5.

Int8. A layout computes the integers of one process, also where layers stay in float that every rank
computes whole or number by number. Others sum in an order that follows from the tiles: two such
sums differ by sqrt(2) times the error of one, so d operators behind the first allow 4 u sqrt(2 d),
u = 2^-24. If such a value is rounded to 8 bits again, one that lies half way between two integers
may become the one or the other: then u = 2^-8, and d counts what rounds to 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hires.core.codecs import CODECS
from hires.core.config.precision_config import INT8, SIGNIFICANT_BITS, PrecisionConfig
from hires.core.config.run_config import RunConfig
from hires.plan.bands import bands_of
from hires.plan.graph import INPUT, Graph, Node
from hires.plan.groups import coded_error
from hires.plan.operators.operator_facts import facts_of
from hires.plan.plan import Plan, Stage
from hires.plan.rules import CROP, GATHER, rule_in

if TYPE_CHECKING:  # commands that start ranks read bounds without torch
    from torch import Tensor

KINDS = ("output", "loss", "gradients", "parameters", "running_stats")
TOLERANCE = 1e-10
"""In float64, relative to the largest value of each tensor."""
MOST = 0.4
"""In any precision."""
ZERO = 1e-6
"""A tensor whose largest float64 value is below this part of the largest of its kind is zero but
for rounding, as the gradient of a bias before a norm: its error is a part of the largest, too."""


class Bounds(NamedTuple):
    """How far tensors may be from float64."""

    by_kind: dict[str, float]
    noise_factor: float
    """A layout may differ by so many times what one process does, ..."""
    most: float
    """... but not by more than this."""
    floor: float
    """A tensor whose largest value is below this part of the largest of its kind is compared with
    that part."""

    @property
    def exact(self) -> bool:
        """Whether they are those of float64."""
        return max(self.by_kind.values()) == TOLERANCE


EXACT = Bounds(dict.fromkeys(KINDS, TOLERANCE), 10.0, 1e-6, 1e-4)
"""A layout adds in more orders than the reversed one, which measures the noise of float64."""
BITWISE = EXACT._replace(by_kind=dict.fromkeys(KINDS, 0.0), most=0.0)
"""A quantised network is compared with itself on one process, whose integers are the same."""
LOWERED = EXACT._replace(most=1e-4)
"""Where the network computes a part in float32."""


def coarsest(config: RunConfig) -> str:
    """Returns the precision with the fewest bits, of the arithmetic or most like a codec."""
    units = {name: 2.0 ** -SIGNIFICANT_BITS[name] for name in ("fp32", "fp16", "bf16")}
    coded = [CODECS[name].unit for name in config.comm.codecs.values()]
    names = {config.precision.name} | {
        next((name for name in units if units[name] >= unit), "bf16") for unit in coded if unit
    }
    return min(names, key=lambda name: (SIGNIFICANT_BITS[name], name))  # fp16 has those of tf32


def bounds_of(config: RunConfig, plan: Plan) -> Bounds:
    """Returns how far a layout of a network may be from one process in float64."""
    name, graph, coded = config.precision.name, plan.graph, coded_error(plan)
    if name == INT8:
        return BITWISE
    if name == "fp64" and not coded:
        return EXACT
    rounded, kinks = longest_way(graph)
    unit = 0.0 if name == "fp64" else 2.0 ** -SIGNIFICANT_BITS[name]
    samples, _, height, width = graph.input_shape
    summed = samples * height * width * 4.0 ** -SIGNIFICANT_BITS["fp32"] if unit else 0.0
    # Of one more operator for the sums of gradients, and one more kink for the loss.
    error, kinks = math.sqrt(unit**2 * (rounded + 1) + summed + coded**2), kinks + 1
    forward, crossed = 4 * error, 2 * math.sqrt(kinks * error / 5)
    backward = 4 * math.sqrt(2) * error + crossed
    kinds = {"gradients": backward, "parameters": backward}
    by_kind = {kind: min(MOST, kinds.get(kind, forward)) for kind in KINDS}
    return Bounds(by_kind, 3.0, MOST, 1e-2)


def lowers(graph: Graph) -> bool:
    """Whether a network computes a part in float32, as an attention behind ``x.float()``."""
    return any(
        facts_of(node.kind).converts
        and node.dtype == "float32"
        and (node.needs_grad or node.name in graph.of_images)
        for node in graph.nodes
    )


def longest_way(graph: Graph) -> tuple[int, int]:
    """Returns the most roundings, and the most kinks, on a way from the images to any value."""
    steps, kinks = {INPUT: 1}, {INPUT: 0}
    for node in graph.nodes:
        steps[node.name] = _roundings(node) + max((steps[n] for n in node.inputs), default=0)
        before = max((kinks[name] for name in node.inputs), default=0)
        kinks[node.name] = before + facts_of(node.kind).has_kinks
    return max(steps.values()), max(kinks.values())


def lowest(config: RunConfig) -> RunConfig:
    """Returns the config in which one process shows what rounding alone does."""
    weights = "fp32" if config.precision.weights == "fp32" else "auto"
    return replace(config, precision=PrecisionConfig(coarsest(config), weights))


def in_float64(config: RunConfig) -> RunConfig:
    """Returns the config of the process with which a layout is compared."""
    # Engines of TensorRT have no fp64, and the reference is computed without any.
    engine = replace(config.engine, compile="off")
    return replace(config, precision=PrecisionConfig("fp64"), engine=engine)


class FloatSums(NamedTuple):
    """What a layout of a quantised network sums in float, in an order that follows from it."""

    nodes: list[str]
    bounds: Bounds
    """How far outputs may be from one process: not at all without such sums."""


def float_sums(plan: Plan) -> FloatSums:
    """Returns what the ranks of a plan sum in float where one process sums in another order."""
    plan = bands_of(plan).plan if plan.band_rows else plan
    graph, nodes = plan.graph, list[str]()
    # Most roundings of fp32, and to 8 bits, behind the first such sum, on any way.
    steps, integer_steps = {INPUT: 0}, {INPUT: 0}
    stages = [stage for stage in plan.stages for _ in range(stage.first, stage.last)]
    for stage, node in zip(stages, graph.nodes, strict=True):
        name, facts = node.name, facts_of(node.kind)
        before = max((steps[one] for one in node.inputs), default=0)
        integers = max((integer_steps[one] for one in node.inputs), default=0)
        sums = _sums_in_parts(stage, node, plan)
        nodes += [name] if sums else []
        steps[name] = before + _roundings(node) if before or sums else 0
        rounds_to_8 = facts.rounds or (node.dtype == "uint8" and not facts.is_selection)
        integer_steps[name] = integers + (rounds_to_8 and before > 0)
    if not nodes:
        return FloatSums(nodes, BITWISE)
    coarse, fine = max(integer_steps.values()), max(steps.values())
    unit = 2.0 ** -SIGNIFICANT_BITS[INT8 if coarse else "fp32"]
    bound = min(MOST, 4 * unit * math.sqrt(2 * (coarse or fine)))
    kinds = BITWISE.by_kind | dict.fromkeys(("output", "loss"), bound)
    return FloatSums(nodes, BITWISE._replace(by_kind=kinds))


def _roundings(node: Node) -> int:
    facts = facts_of(node.kind)
    return 0 if facts.view else 2 if facts.multiplies else 1


def _sums_in_parts(stage: Stage, node: Node, plan: Plan) -> bool:
    facts = facts_of(node.kind)
    if facts.quantized or facts.is_selection or node.kind in (GATHER, CROP):
        return False
    rule = rule_in(stage, node, plan.graph)
    if rule.kind == "whole":
        return False
    # A norm of single rows sums all of them alike, however many there are.
    is_by_row = rule.kind == "pointwise" and "layer_norm" in node.kind
    ways = {*facts.tiling} & {"window", "statistics", "reduction", "softmax", "product"}
    return bool(ways or facts.multiplies) and not is_by_row


def tensor_error(
    tensor: Tensor, expected: Tensor, name: str, largest: Mapping[str, float], bounds: Bounds
) -> float:
    """Returns the largest error of a tensor ``kind/name``, over its largest expected value.

    ``largest`` is that of each kind, over which the error of a zero is (:data:`ZERO`). Infinite:
    the shapes differ, or it is NaN.
    """
    if tensor.shape != expected.shape:
        return math.inf
    size, most = _size(expected), largest[name.split("/")[0]]
    scale = most if size < ZERO * most else max(size, bounds.floor * most)
    # Where all of a kind are zero, so is the scale, and an error is one all the same.
    error = _size(tensor.double() - expected.double()) / (scale or 1.0)
    return error if error == error else math.inf


def largest_values(reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the largest value of each kind."""
    sizes = {name: _size(tensor) for name, tensor in reference.items()}
    each = {kind: [size for n, size in sizes.items() if n.startswith(f"{kind}/")] for kind in KINDS}
    return {kind: max(some, default=0.0) for kind, some in each.items()}


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
