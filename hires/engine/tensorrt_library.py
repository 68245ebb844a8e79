"""Builds and runs engines by Torch-TensorRT and TensorRT; both are imported when they are needed.

    torch.export graph --> Torch-TensorRT --> serialized engine      once; hires keeps the file
    serialized engine  --> TensorRT's runtime --> a function          at the start of each rank

Types are those of the graph: TensorRT computes each layer in the type of its operands. Products
between ``hires::quantize`` and ``hires::dequantize`` become int8 layers. No engine has been
built or run yet: this is written from the libraries' documentation and source (2.13 and 2.14).
"""

from __future__ import annotations

import functools
import importlib
import logging
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.export import ExportedProgram

from hires.engine.device import to_host

ALIGNMENT = 256
"""Bytes to which TensorRT wants the addresses of its inputs and outputs aligned."""

log = logging.getLogger(__name__)

Run = Callable[..., tuple[Tensor, ...]]


class EngineError(Exception):
    """Why TensorRT cannot build or run an engine."""


class TensorRT:
    """The library on one GPU."""

    name = "TensorRT"

    def __init__(self, device: torch.device, tf32: bool = False) -> None:
        self.device, self.tf32 = device, tf32

    def facts(self) -> dict[str, Any]:
        """Returns what an engine depends on beside its graph: versions, GPU, arithmetic."""
        gpu = torch.cuda.get_device_properties(self.device)
        return {
            "torch_tensorrt": metadata.version("torch_tensorrt"),
            "tensorrt": str(importlib.import_module("tensorrt").__version__),
            "cuda": str(torch.version.cuda),
            "gpu": gpu.name,
            "capability": [gpu.major, gpu.minor],
            "tf32": self.tf32,
        }

    def build(self, program: ExportedProgram, inputs: Sequence[Tensor]) -> bytes:
        """Returns the engine of a graph for inputs of these shapes; takes seconds to minutes."""
        _register_converters()
        dynamo = importlib.import_module("torch_tensorrt.dynamo")
        # Its default is one file in /tmp, which all ranks and users would write.
        with (
            torch.cuda.device(self.device),
            tempfile.TemporaryDirectory(prefix="hires-engine-") as folder,
        ):
            made = dynamo.convert_exported_program_to_serialized_trt_engine(
                program,
                arg_inputs=tuple(inputs),
                device=self.device,
                disable_tf32=not self.tf32,
                cache_built_engines=False,
                reuse_cached_engines=False,
                timing_cache_path=str(Path(folder) / "timing"),
            )
        return bytes(made)

    def load(self, data: bytes, outputs: Sequence[Tensor]) -> Run:
        """Returns the function that an engine computes.

        It has as many ``outputs``, of these shapes and types. EngineError: it is of another
        version or GPU, or has other inputs or outputs.
        """
        return _LoadedEngine(data, outputs, self.device)


class _LoadedEngine:
    """An engine with its memory, and the order of its inputs and outputs."""

    def __init__(self, data: bytes, outputs: Sequence[Tensor], device: torch.device) -> None:
        trt = importlib.import_module("tensorrt")
        self._device = device
        with torch.cuda.device(device):
            self._runtime = trt.Runtime(_logger())
            self._engine = self._runtime.deserialize_cuda_engine(data)
            if self._engine is None:
                raise EngineError("TensorRT cannot read the engine; its message is above")
            self._context = self._engine.create_execution_context()
            if self._context is None:
                raise EngineError("TensorRT has no memory for the engine's values")
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        modes = {name: self._engine.get_tensor_mode(name) for name in names}
        self._inputs = [name for name in names if modes[name] == trt.TensorIOMode.INPUT]
        # Torch-TensorRT numbers them; the order in which an engine lists them is not promised.
        self._outputs = [f"output{number}" for number in range(len(outputs))]
        held = {name for name in names if modes[name] == trt.TensorIOMode.OUTPUT}
        if held != {*self._outputs}:
            raise EngineError(f"its outputs are {sorted(held)}, and {len(outputs)} were expected")
        self._like = [(tuple(one.shape), one.dtype) for one in outputs]
        for name, (shape, _) in zip(self._outputs, self._like, strict=True):
            made = tuple(self._engine.get_tensor_shape(name))
            if made != shape:
                raise EngineError(f"its {name} has the shape {made}, not {shape}")

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns its outputs, which the current stream of the GPU computes."""
        if len(inputs) != len(self._inputs):
            raise EngineError(f"it has {len(self._inputs)} inputs, not {len(inputs)}")
        given = [_aligned(tensor) for tensor in inputs]
        made = [torch.empty(s, dtype=t, device=self._device) for s, t in self._like]
        names = [*self._inputs, *self._outputs]
        for name, tensor in zip(names, [*given, *made], strict=True):
            if not self._context.set_tensor_address(name, tensor.data_ptr()):
                raise EngineError(f"it does not take the address of {name}")
        stream = torch.cuda.current_stream(self._device)
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise EngineError("TensorRT could not run the engine; its message is above")
        # The allocator gives memory back in the order of the stream, so ``given`` may go.
        return tuple(made)


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


@functools.cache
def _logger() -> Any:
    trt = importlib.import_module("tensorrt")
    return trt.Logger(trt.Logger.WARNING)


@functools.cache
def _register_converters() -> None:
    """Registers converters for the two operators of explicit rounding with Torch-TensorRT."""
    trt = importlib.import_module("tensorrt")
    conversion = importlib.import_module("torch_tensorrt.dynamo.conversion")
    constant = importlib.import_module(
        "torch_tensorrt.dynamo.conversion.converter_utils"
    ).get_trt_tensor
    ops = torch.ops.hires

    @conversion.dynamo_tensorrt_converter(ops.quantize.default)  # type: ignore[untyped-decorator]
    def quantize(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
        scale = constant(ctx, torch.ones(()), f"{name}_scale", dtype=torch.float32)
        return _rounding(ctx, args[0], scale, name, per_channel=False)

    @conversion.dynamo_tensorrt_converter(ops.dequantize.default)  # type: ignore[untyped-decorator]
    def dequantize(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
        numbers, factors = args
        with unset_fake_temporarily():
            factors = to_host(factors).float()
            per_channel = factors.dim() > 0
            scale = constant(ctx, factors, f"{name}_scale", dtype=torch.float32)
            if isinstance(numbers, Tensor):
                # A weight: TensorRT rounds real ones to these numbers again, and keeps them.
                held = to_host(numbers).float()
                shape = [-1, *[1] * (held.dim() - 1)] if per_channel else []
                held = constant(ctx, held * factors.view(shape), f"{name}_weight")
                numbers = _rounding(ctx, held, scale, name, per_channel)
        layer = ctx.net.add_dequantize(numbers, scale, trt.DataType.FLOAT)
        if per_channel:
            layer.axis = 0
        layer.name = f"{name}_dequantize"
        return layer.get_output(0)

    def _rounding(ctx: Any, x: Any, scale: Any, name: str, per_channel: bool) -> Any:
        layer = ctx.net.add_quantize(x, scale, trt.DataType.INT8)
        if per_channel:
            layer.axis = 0
        layer.name = f"{name}_quantize"
        return layer.get_output(0)
