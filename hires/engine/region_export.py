"""Exports a region as a graph of ATen operators, with its weights, for a library of engines.

    region     conv2d  bn  relu  conv2d  add      callables of hires
    exported   aten.conv2d(x, w) aten.relu ...    torch.export, weights as constants

8-bit integers enter and leave it signed, with explicit roundings around products
(:mod:`hires.parallel.explicit_int8`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from hires.engine.device import to_host
from hires.parallel.compiled_region import CompiledRegion
from hires.parallel.context import Context
from hires.parallel.explicit_int8 import explicit_operator
from hires.quant.explicit_ops import signed


class RegionModule(nn.Module):
    """A region of a rank that holds whole maps, as a function of its inputs, in their order."""

    def __init__(
        self, region: CompiledRegion, context: Context, tensors: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self._inputs, self._outputs = region.inputs, region.outputs
        self._steps = [
            (node.name, explicit_operator(node, context, tensors, run))
            for node, run in region.steps
        ]

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Returns the region's outputs in their order."""
        values: dict[str, Any] = dict(zip(self._inputs, tensors, strict=True))
        for name, run in self._steps:
            values[name] = run(values)
        return tuple(values[name] for name in self._outputs)


@torch.no_grad()
def exported(module: RegionModule, inputs: Sequence[Tensor]) -> ExportedProgram:
    """Returns the graph of a region for inputs of these shapes and types."""
    return torch.export.export(module, tuple(inputs), strict=False)


def entering(tensor: Tensor) -> Tensor:
    """Returns what an engine takes for a tensor: dense, numbers signed."""
    if tensor.dtype == torch.uint8:
        tensor = signed(tensor)
    return tensor.contiguous()


def leaving(tensor: Tensor) -> Tensor:
    """Returns what an engine's output is in hires: its signed integers are unsigned."""
    return signed(tensor) if tensor.dtype == torch.int8 else tensor


def program_facts(program: ExportedProgram, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """Returns what an engine depends on of its graph: operators, constants and inputs."""
    constants = hashlib.sha256()
    for name, one in sorted({**program.state_dict, **program.constants}.items()):
        assert isinstance(one, Tensor), f"{name} is no tensor"
        held = to_host(one).contiguous()
        constants.update(f"{name} {held.dtype} {[*held.shape]};".encode())
        constants.update(held.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return {
        "graph": hashlib.sha256(str(program.graph).encode()).hexdigest(),
        "constants": constants.hexdigest(),
        "inputs": [[str(one.dtype), [*one.shape]] for one in inputs],
    }
