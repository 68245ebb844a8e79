r"""States how far a layout may be from one process in float64.

In float64 all that differs is the order of sums: 1e-10. A lower precision rounds every number, by u
= 2^-8 of itself in bf16, 2^-11 in fp16 and tf32, 2^-24 in fp32; the coarser type counts, of what is
computed or of the messages. How errors grow:

Forward. Each of d operators on the way rounds what it makes, and each product its weights, too. The
errors are independent, so they grow with sqrt(d): to u sqrt(d / 3) of a usual number, as a rounding
error is spread evenly over [-u, u]. The largest error of 10^8 numbers is 6 standard deviations. So
outputs, losses and statistics, relative to the largest number, are within

    F = 6 u sqrt(d / 3) < 4 u sqrt(d)

Backward. The way is twice as long: 4 u sqrt(2 d). And where an error crosses a kink, as that of a
ReLU, the gradient is passed or not instead of the other way round. A number with a spread of 1 is
within the error e of the kink, u sqrt(d / 3), with the probability e / 3 (density 0.4 at the kink,
mean error 0.8 e), so of k kinks on the way each changes sqrt(e / 3) of the gradient's norm, and all
together sqrt(k e / 3). Twice that for the largest number:

    B = 4 u sqrt(2 d) + 2 sqrt(k u sqrt(d) / 5)

Sums over pixels, samples and ranks are in fp32 and average these errors. But a sum of N pixels, as
the mean of a batch norm, may round each of its partial sums: N operators more of u = 2^-24, which
count in fp32 alone. Gradients that are summed in a lower type are rounded once more for each rank,
which d counts as one operator.

``MOST`` bounds both: a gradient that is averaged over two tiles, not summed, is wrong by 0.5. Where
one process in the same precision is off by more than half of that (batch norms of a few pixels,
say), a tensor is ``lost``: nothing can be said of it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hires.core.config.precision_config import PrecisionConfig
from hires.core.config.run_config import RunConfig
from hires.core.precisions import INT8, SIGNIFICANT_BITS
from hires.plan.graph import INPUT, Graph
from hires.plan.operators.operator_facts import facts_of
from hires.plan.operators.operator_table import KINKS

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
    lost: float = math.inf
    """Tensors in which one process differs by more are not judged."""

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
    """Returns the precision with the fewest bits among those of the arithmetic and the messages."""
    names = {config.precision.name, config.comm.dtype} - {"value"}
    return min(names, key=lambda name: (SIGNIFICANT_BITS[name], name))  # fp16 has those of tf32


def bounds_of(config: RunConfig, graph: Graph) -> Bounds:
    """Returns how far a layout of a network may be from one process in float64."""
    name = coarsest(config)
    if config.precision.name == INT8:
        return BITWISE
    if name == "fp64":
        return EXACT
    unit, (rounded, kinks) = 2.0 ** -SIGNIFICANT_BITS[name], longest_way(graph)
    samples, _, height, width = graph.input_shape
    summed = samples * height * width * (2.0 ** -SIGNIFICANT_BITS["fp32"] / unit) ** 2
    steps, kinks = rounded + 1 + summed, kinks + 1  # the messages of sums; the loss
    forward = 4 * unit * math.sqrt(steps)
    crossed = 2 * math.sqrt(kinks * unit * math.sqrt(steps) / 5)
    backward = 4 * unit * math.sqrt(2 * steps) + crossed
    kinds = {"gradients": backward, "parameters": backward}
    by_kind = {kind: min(MOST, kinds.get(kind, forward)) for kind in KINDS}
    return Bounds(by_kind, 3.0, MOST, 1e-2, MOST / 2)


def longest_way(graph: Graph) -> tuple[int, int]:
    """Returns the most roundings, and the most kinks, on a way from the images to any value."""
    steps, kinks = {INPUT: 1}, {INPUT: 0}
    for node in graph.nodes:
        facts = facts_of(node.kind)
        rounds = 0 if facts.view else 2 if facts.multiplies else 1
        steps[node.name] = rounds + max((steps[name] for name in node.inputs), default=0)
        before = max((kinks[name] for name in node.inputs), default=0)
        kinks[node.name] = before + (node.kind in KINKS)
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


class Rerun(NamedTuple):
    """What a repeated step changes."""

    ulps: int = 0
    """Each pixel is moved by so many, up or down at random."""
    in_float32: bool = False
    """Whether the ulps are those of float32."""
    shift: int | None = None
    """The samples are reversed and then rotated by so many."""

    def moved(self, images: Tensor) -> Tensor:
        """Returns images (n, C, H, W) whose pixels are moved, in their own type."""
        if not self.ulps:
            return images
        pixels = images.float() if self.in_float32 else images
        generator = torch.Generator().manual_seed(self.ulps)
        up = torch.rand(pixels.shape, generator=generator).to(images.device) < 0.5
        towards = torch.where(up, torch.inf, -torch.inf).to(pixels.dtype)
        for _ in range(self.ulps):
            pixels = torch.nextafter(pixels, towards)
        return pixels.to(images)

    def order(self, num_samples: int) -> Tensor:
        """Returns the place in the batch of each sample, (n,)."""
        places = torch.arange(num_samples)
        return places if self.shift is None else places.flip(0).roll(self.shift)


AS_IS = Rerun()


def reruns(draws: bool, lowers: bool) -> list[Rerun]:
    """Returns the repeated steps that measure the noise of a network.

    A network that ``draws`` masks draws them for the place of a sample: its samples stay where they
    are. In one that ``lowers`` a part to float32, an ulp of float64 is lost: it is moved by those
    of float32.
    """
    moves = [Rerun(ulps, lowers) for ulps in (1, 2, 3, 4)]
    return moves if draws else [moves[0], Rerun(shift=0), *moves[1:], Rerun(shift=1)]
