"""Computes the tensors of a rewritten network from the network's own, once at the start of a rank.

    conv1.weight, bn1.running_var, bn1.weight, ...  --recipe of bn1:weight-->  bn1:weight

A recipe (``Parameter.recipe``) names its function here and the tensors that it takes, which may
have recipes themselves. All is computed in float64 and rounded once, to the type of the run. The
network's own are released meanwhile: an inference saves no checkpoint.

Of quantised layers these are 8-bit weights, factors and offsets, so that a layer is sum(integers *
x_q) * multiplier + offset:

    weight  -> integers     round(weight / scale), a scale for each output channel
            -> multiplier   s_in * scale / s_out
    bias    -> offset       bias / s_out + z_out - z_in * multiplier * sum(its integers)

The s and z of input and output stand in the recipes, as ``factor`` (s_in / s_out), ``bias_factor``
(1 / s_out), ``add`` and ``zero_point``, and so does the ``largest`` integer of a weight. A
transposed convolution of stride s computes s x s phases of its output as channels, each with every
s-th row and column of the kernel (``hires.parallel.quantized_kernels``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.registry import Registry
from hires.engine.device import HOST
from hires.nets.build_network import constant_tensor
from hires.parallel.compile_node import local_operator
from hires.parallel.context import Context
from hires.plan.graph import Node
from hires.quant.int8_kernels import empty

PIECE_ELEMENTS = 2**19
"""Of a weight, that are computed in float64 at once."""
RECIPES: Registry[Callable[[dict[str, Any], list[Tensor]], Tensor]] = Registry("recipe")
"""Name -> (recipe, the tensors that it names in its order) -> the tensor."""
WEIGHT_RECIPE = "quantized_weight"
"""The recipe that rounds a float weight."""
Place = Callable[[str, Tensor], None]
"""Brings a tensor of that name, in place, to the type and the order of a run."""


class DerivedTensors:
    """The tensors of a rank's stages that have a recipe, by name; ``own`` are the network's.

    Layer by layer, small ones first, each recipe runs once; at most one layer is there in float64.
    ``releases``: the network's own tensors that no node reads leave ``own`` as soon as all that is
    computed from them is there.
    """

    def __init__(
        self,
        contexts: list[Context],
        own: dict[str, Tensor],
        place: Place = lambda name, tensor: None,
        releases: bool = False,
    ) -> None:
        plan, stages = contexts[0].plan, {context.stage.index for context in contexts}
        self._facts, self._own, self._device = plan.graph.params, own, contexts[0].device
        self._place = place
        self._read = {
            name for stage in stages for node in plan.nodes(stage) for name in node.params
        }
        # Layers shrink as they are quantised, so the largest ones come when most others have.
        facts, made = self._facts, [n for n in self._read if self._facts[n].recipe is not None]
        sources = {name: plan.graph.own_params([name]) for name in made}
        sizes = {n: max((facts[s].num_elements for s in sources[n]), default=0) for n in made}
        self.tensors: dict[str, Tensor] = {}
        self._computed: dict[str, Tensor] = {}  # of the layer at work
        uses = Counter(itertools.chain.from_iterable(sources.values()))
        made.sort(key=lambda name: (sizes[name], name))
        for _, names in itertools.groupby(made, lambda name: name.partition(":")[0]):
            for name in names:
                self.tensors[name] = self._placed(name)
                uses.subtract(sources[name])
                for source in sources[name] if releases else ():
                    if not uses[source] and source not in self._read:
                        own.pop(source, None)
            self._computed.clear()

    def release(self) -> None:
        """Drops the network's own tensors that no node reads."""
        for name in (self._own.keys() & self._facts.keys()) - self._read:
            del self._own[name]

    def empty(self, name: str) -> None:
        """Leaves a tensor its shape alone, as kernels keep it; the network's own leave ``own``."""
        tensor = self.tensors.get(name)
        tensor = self._own.pop(name) if tensor is None else tensor
        empty(tensor)

    def made(self, name: str) -> Tensor:
        """Returns one of them, or one from which they are computed, from the network's own."""
        value = self._value(name)
        self._computed.clear()
        return value

    def _placed(self, name: str) -> Tensor:
        held = nn.Parameter(self._value(name).to(self._device), requires_grad=False)
        self._computed.pop(name, None)  # in float64 it goes as soon as it is rounded
        self._place(name, held)
        return held

    def _value(self, name: str) -> Tensor:
        # A tensor as its recipe returns it.
        fact = self._facts[name]
        if fact.is_constant:
            return constant_tensor(fact).to(self._device)
        if fact.recipe is None:
            return self._own[name].detach()
        if name not in self._computed:
            sources = [*map(self._value, fact.recipe["params"])]
            with torch.no_grad():
                self._computed[name] = RECIPES[fact.recipe["make"]](fact.recipe, sources)
        return self._computed[name]


def _scale(given: dict[str, Tensor], eps: float) -> Tensor:
    root = torch.rsqrt(given["var"].double() + eps)
    return root * given["scale"] if "scale" in given else root


def row_pieces(tensor: Tensor) -> list[slice]:
    """Returns slices of the first dim, so that each is computed in little memory beside it."""
    rows = max(1, PIECE_ELEMENTS * len(tensor) // max(1, tensor.numel()))
    return [slice(first, first + rows) for first in range(0, max(1, len(tensor)), rows)]


def _by_role(recipe: dict[str, Any], given: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(recipe["roles"], given, strict=True))


@RECIPES.register("computed")
def _computed(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    # What nodes of the network make of parameters, in the type in which they would compute it.
    dtype = getattr(torch, recipe["dtype"])
    cast = (t.to(dtype) if t.is_floating_point() else t for t in tensors)
    params = dict(zip(recipe["params"], cast, strict=True))
    device = tensors[0].device if tensors else HOST
    values: dict[str, Any] = {}
    for node in (Node(**fields) for fields in recipe["nodes"]):
        values[node.name] = local_operator(node, device, params)(values)
    return values[recipe["value"]]  # type: ignore[no-any-return]


@RECIPES.register("folded_weight")
def _folded_weight(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    # (K, C / groups, ...), or (C, K / groups, ...) of a transposed convolution.
    given = _by_role(recipe, tensors)
    weight, scale = given["weight"], _scale(given, recipe["eps"])
    groups = recipe["transposed_groups"]
    if not groups:
        scale = scale.view(-1, *[1] * (weight.dim() - 1))
        folded = torch.empty_like(weight, dtype=torch.float64)
        for rows in row_pieces(weight):
            torch.mul(weight[rows].double(), scale[rows], out=folded[rows])
        return folded
    apart = weight.double().view(groups, -1, *weight.shape[1:])
    return (apart * scale.view(groups, 1, -1, *[1] * (weight.dim() - 2))).view(weight.shape)


@RECIPES.register("norm_scale")
def _norm_scale(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    # The factor of each channel, (C,) in float64, of a norm with stored statistics.
    return _scale(_by_role(recipe, tensors), recipe["eps"])


@RECIPES.register("folded_bias")
def _folded_bias(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    given = _by_role(recipe, tensors)
    bias = -given["mean"].double()
    if "bias" in given:
        bias = bias + given["bias"]
    bias = bias * _scale(given, recipe["eps"])
    return bias + given["shift"] if "shift" in given else bias


@RECIPES.register("quantized_scale")
def _quantized_scale(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    # Of each output channel, in float64.
    return _scales(recipe, _weight(recipe, tensors[0])).flatten()


@RECIPES.register(WEIGHT_RECIPE)
def _quantized_weight(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    # The integers of a weight, int8: (K, C / groups, rows, columns).
    weight, scales = _weight(recipe, tensors[0]), tensors[1]
    largest = recipe["largest"]
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for rows in row_pieces(weight):
        real = weight[rows] / scales[rows].view(-1, 1, 1, 1)
        numbers[rows] = real.round_().clamp_(-largest, largest).to(torch.int8)
    return numbers


def rounded_weight(recipe: dict[str, Any], weight: Tensor) -> Tensor:
    """Returns a float weight after rounding, in float64 and in its own shape.

    ``recipe`` is that of its integers.
    """
    scales = _scales(recipe, _weight(recipe, weight))
    numbers = _quantized_weight(recipe, [weight, scales.flatten()])
    real = numbers * scales
    if "stride" not in recipe:
        return real.view(weight.shape)
    # Each weight of a transposed convolution has one place among its phases; the others are 0.
    places = torch.arange(1, weight.numel() + 1, device=weight.device).view(weight.shape)
    place = _weight(recipe, places)
    made = torch.empty(weight.numel(), dtype=real.dtype, device=weight.device)
    made[place[place > 0].long() - 1] = real[place > 0]
    return made.view(weight.shape)


@RECIPES.register("quantized_multiplier")
def _quantized_multiplier(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    factors: Tensor = tensors[0] * recipe["factor"]
    return factors.float()


@RECIPES.register("quantized_offset")
def _quantized_offset(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    # Of each output channel, in fp32: of its integers, factor and bias.
    numbers, multiplier, *bias = tensors
    sums = torch.cat([numbers[r].sum((1, 2, 3), dtype=torch.int64) for r in row_pieces(numbers)])
    of_zeros = recipe["zero_point"] * sums.double() * multiplier
    offset: Tensor = recipe["add"] - of_zeros
    if bias:
        real = bias[0].double() * recipe["bias_factor"]
        offset = offset + real.repeat_interleave(len(offset) // len(real))
    return offset.float()


@RECIPES.register("norm_weight")
def _norm_weight(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    # Of a norm with stored statistics: it multiplies every channel, as a convolution can.
    return _norm_scale(recipe, tensors).view(-1, 1, 1, 1)


def _weight(recipe: dict[str, Any], weight: Tensor) -> Tensor:
    # As a convolution of stride 1 has it, in float64.
    weight = weight.double()
    if "stride" not in recipe:
        return weight if weight.dim() == 4 else weight[:, :, None, None]
    return _phases(weight, recipe["groups"], recipe["stride"], recipe["dilation"])


def _scales(recipe: dict[str, Any], weight: Tensor) -> Tensor:
    # (K, 1, 1, 1); the phases of a transposed convolution's channel have one scale.
    phases = recipe["stride"][0] * recipe["stride"][1] if "stride" in recipe else 1
    most = torch.cat([weight[rows].abs().amax((1, 2, 3)) for rows in row_pieces(weight)])
    most = most.view(-1, phases).amax(1, keepdim=True)
    scales = torch.where(most > 0, most / recipe["largest"], 1.0)
    return scales.expand(-1, phases).reshape(-1, 1, 1, 1)


def _phases(weight: Tensor, groups: int, stride: list[int], dilation: list[int]) -> Tensor:
    # (C, K / groups, rows, columns) -> (K * phases, C / groups, taps, taps)
    channels, outputs, *_ = weight.shape
    weight = weight.view(groups, channels // groups, outputs, *weight.shape[2:]).transpose(1, 2)
    weight = weight.reshape(groups * outputs, channels // groups, *weight.shape[3:])
    for dim, (step, apart) in enumerate(zip(stride, dilation, strict=True), start=2):
        reach = apart * (weight.shape[dim] - 1) + 1
        spread = weight.new_zeros([*weight.shape[:dim], reach, *weight.shape[dim + 1 :]])
        spread.narrow(dim, 0, reach)[(slice(None),) * dim + (slice(0, reach, apart),)] = weight
        missing = -reach % step
        weight = F.pad(spread, (0, 0) * (3 - dim) + (0, missing))
    taps = [size // step for size, step in zip(weight.shape[2:], stride, strict=True)]
    apart_phases = weight.view(len(weight), -1, taps[0], stride[0], taps[1], stride[1])
    # The last tap of a phase reads the earliest input: a convolution has it first.
    by_phase = apart_phases.flip(2, 4).permute(0, 3, 5, 1, 2, 4)
    return by_phase.reshape(-1, channels // groups, *taps)
