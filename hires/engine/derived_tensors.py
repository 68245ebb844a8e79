"""Computes the tensors of a rewritten network from the network's own, once at the start of a rank.

    conv1.weight, bn1.running_var, bn1.weight, ...  --recipe of bn1:weight-->  bn1:weight

A recipe (``Parameter.recipe``) names its function here and the tensors that it takes, which may
have recipes themselves. All is computed in float64 and rounded once, to the type of the run. The
network's own are released meanwhile: an inference saves no checkpoint.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hires.core.registry import Registry
from hires.engine.device import HOST
from hires.nets.build_network import constant_tensor
from hires.parallel.compile_node import local_operator
from hires.parallel.context import Context
from hires.plan.graph import Graph, Node
from hires.quant.emptied_weights import empty

PIECE_ELEMENTS = 2**19
"""Of a weight, that are computed in float64 at once."""
RECIPES: Registry[Callable[[dict[str, Any], list[Tensor]], Tensor]] = Registry("recipe")
"""Name -> (recipe, the tensors that it names in its order) -> the tensor."""


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
        sizes = {name: _source_elements(name, plan.graph) for name in self._read if self._is(name)}
        self._names = sorted(sizes, key=lambda name: (sizes[name], name))
        self.tensors: dict[str, Tensor] = {}
        self._computed: dict[str, Tensor] = {}  # of the layer at work
        sources = {name: plan.graph.own_params([name]) for name in self._names}
        uses = Counter(itertools.chain.from_iterable(sources.values()))
        for _, names in itertools.groupby(self._names, lambda name: name.partition(":")[0]):
            for name in names:
                self.tensors[name] = self._placed(name)
                uses.subtract(sources[name])
                for source in sources[name] if releases else ():
                    if not uses[source] and source not in self._read:
                        own.pop(source, None)
            self._computed.clear()

    def release(self) -> None:
        """Drops those of the network's own tensors from which these are computed and no others."""
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

    def _is(self, name: str) -> bool:
        return self._facts[name].recipe is not None

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


def _source_elements(name: str, graph: Graph) -> int:
    return max((graph.params[one].num_elements for one in graph.own_params([name])), default=0)


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
    weight, scale, groups = (
        given["weight"],
        _scale(given, recipe["eps"]),
        recipe["transposed_groups"],
    )
    if not groups:
        scale = scale.view(-1, *[1] * (weight.dim() - 1))
        folded = torch.empty_like(weight, dtype=torch.float64)
        for rows in row_pieces(weight):
            torch.mul(weight[rows].double(), scale[rows], out=folded[rows])
        return folded
    apart = weight.double().view(groups, -1, *weight.shape[1:])
    return (apart * scale.view(groups, 1, -1, *[1] * (weight.dim() - 2))).view(weight.shape)


@RECIPES.register("norm_scale")
def norm_scale(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    """Returns the factor of each channel, (C,) in float64, of a norm with stored statistics."""
    return _scale(_by_role(recipe, tensors), recipe["eps"])


@RECIPES.register("folded_bias")
def _folded_bias(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    given = _by_role(recipe, tensors)
    bias = -given["mean"].double()
    if "bias" in given:
        bias = bias + given["bias"]
    bias = bias * _scale(given, recipe["eps"])
    return bias + given["shift"] if "shift" in given else bias
