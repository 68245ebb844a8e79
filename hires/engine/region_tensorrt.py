"""Compiles the regions of a rank with Torch-TensorRT, for inference on NVIDIA GPUs.

    region --> torch.export --> torch_tensorrt.dynamo.compile --> one function for each input shape

**Never run**: no engine has been built by hires yet. This is written from the documentation and
the source of Torch-TensorRT 2.13, whose public functions are all that it calls. Operators that it
cannot convert stay in torch; a region that it cannot compile runs node by node, with a warning
that names the cause. Engines are built again at each start: Torch-TensorRT's own cache is pickled.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hires.core.config.run_config import RunConfig
from hires.engine.build import RankEngine
from hires.engine.region_calls import Compilation, Input, RegionCall, blank, calls_of
from hires.parallel.compiled_region import CompiledRegion

Function = Callable[..., Sequence[Tensor]]
Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class RegionModule(nn.Module):
    """A region of a rank that holds whole maps, as a function of its inputs, in their order."""

    def __init__(self, region: CompiledRegion) -> None:
        super().__init__()
        self._region = region

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Returns the region's outputs in their order."""
        region = self._region
        values: dict[str, Any] = dict(zip(region.inputs, tensors, strict=True))
        for node, run in region.steps:
            values[node.name] = run(values)
        return tuple(values[name] for name in region.outputs)


def compile_with_tensorrt(engine: RankEngine, config: RunConfig) -> Compilation:
    """Compiles each region for the inputs of a step; ``compile_s`` is left to the caller."""
    calls, result = calls_of(engine, config), Compilation(0.0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="hires-tensorrt-") as folder, torch.no_grad():
        build = functools.partial(
            importlib.import_module("torch_tensorrt").dynamo.compile,
            device=engine.device.torch,
            disable_tf32=config.precision.name != "tf32",
            min_block_size=1,
            cache_built_engines=False,
            reuse_cached_engines=False,
            # By default one file in /tmp, which all ranks and users would write.
            timing_cache_path=str(Path(folder) / "timing"),
        )
        for direction, module in enumerate(engine.modules):
            for number, region in enumerate(module.regions):
                result.regions += 1
                try:
                    _compile(region, calls.get((direction, number), ()), engine.device.torch, build)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # of any class: the library's, torch's, the system's
                    region.give_up(error, "TensorRT")
                    result.failed += 1
    return result


def _compile(
    region: CompiledRegion,
    calls: Sequence[RegionCall],
    device: torch.device,
    build: Callable[..., Function],
) -> None:
    functions: dict[Shapes, Function] = {}
    for call in calls:
        if not all(isinstance(item, Input) for item in call.inputs):
            raise TypeError("it reads a list of tensors, and an engine reads tensors only")
        inputs = [blank(item, device).detach().contiguous() for item in call.inputs]
        program = torch.export.export(RegionModule(region), tuple(inputs), strict=False)
        functions[_shapes(inputs)] = build(program, arg_inputs=inputs)

    def run(*inputs: Tensor) -> tuple[Tensor, ...] | None:
        function = functions.get(_shapes(inputs))
        if function is None:
            return None  # the region runs node by node
        return tuple(function(*(tensor.contiguous() for tensor in inputs)))

    region.use(run)


def _shapes(tensors: Sequence[Tensor]) -> Shapes:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
