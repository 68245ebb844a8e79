"""Computes the tensors of a rewritten network from the network's own, once at the start of a rank.

    conv1.weight, bn1.running_var, bn1.weight, ...  --recipe of bn1:weight-->  bn1:weight

A recipe (``Parameter.recipe``) names its function here and the tensors that it takes, which may
have recipes themselves. All is computed in float64 and rounded once, to the type of the run. Then
the network's own are released, and read again for a checkpoint (``hires.engine.checkpoint``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hires.core.registry import Registry
from hires.engine.device import HOST
from hires.nets.constants import constant_tensor
from hires.parallel.compile_node import local_operator
from hires.parallel.context import Context
from hires.plan.graph import Node

RECIPES: Registry[Callable[[dict[str, Any], list[Tensor]], Tensor]] = Registry("recipe")
"""Name -> (recipe, the tensors that it names in its order) -> the tensor."""


class DerivedTensors:
    """The tensors of a rank's stages that have a recipe, by name; ``own`` are the network's."""

    def __init__(self, contexts: list[Context], own: dict[str, Tensor]) -> None:
        plan, stages = contexts[0].plan, {context.stage.index for context in contexts}
        self._facts, self._own, self._device = plan.graph.params, own, contexts[0].device
        self._read = {
            name for stage in stages for node in plan.nodes(stage) for name in node.params
        }
        names = (n for n in sorted(self._read) if self._facts[n].recipe is not None)
        self.tensors: dict[str, Tensor] = {
            name: nn.Parameter(self._made(name, own).to(self._device), requires_grad=False)
            for name in names
        }

    def refresh(self) -> None:
        """Computes all of them again, after the network's own have changed."""
        for name, tensor in self.tensors.items():
            tensor.data.copy_(self._made(name, self._own))

    def release(self) -> None:
        """Drops those of the network's own tensors from which these are computed and no others."""
        for name in (self._own.keys() & self._facts.keys()) - self._read:
            del self._own[name]

    def are_of(self, own: dict[str, Tensor]) -> bool:
        """Whether these tensors of the network make just these."""
        made = ((tensor, self._made(name, own)) for name, tensor in self.tensors.items())
        return all(torch.equal(tensor, other.to(tensor.dtype)) for tensor, other in made)

    @torch.no_grad()
    def _made(self, name: str, own: dict[str, Tensor]) -> Tensor:
        fact = self._facts[name]
        if fact.is_constant:
            return constant_tensor(fact).to(self._device)
        if fact.recipe is None:
            return own[name].detach()
        given = [self._made(source, own) for source in fact.recipe["params"]]
        return RECIPES[fact.recipe["make"]](fact.recipe, given)


def _scale(given: dict[str, Tensor], eps: float) -> Tensor:
    root = torch.rsqrt(given["var"] + eps)
    return root * given["scale"] if "scale" in given else root


def _by_role(recipe: dict[str, Any], given: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(recipe["roles"], (tensor.double() for tensor in given), strict=True))


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
        return weight * scale.view(-1, *[1] * (weight.dim() - 1))
    apart = weight.view(groups, -1, *weight.shape[1:])
    return (apart * scale.view(groups, 1, -1, *[1] * (weight.dim() - 2))).view(weight.shape)


@RECIPES.register("norm_scale")
def _norm_scale(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    return _scale(_by_role(recipe, tensors), recipe["eps"])


@RECIPES.register("folded_bias")
def _folded_bias(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    given = _by_role(recipe, tensors)
    bias = -given["mean"]
    if "bias" in given:
        bias = bias + given["bias"]
    bias = bias * _scale(given, recipe["eps"])
    return bias + given["shift"] if "shift" in given else bias
