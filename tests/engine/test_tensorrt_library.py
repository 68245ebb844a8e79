"""Stand-ins record how hires calls Torch-TensorRT and TensorRT; no engine runs here."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hires.engine import tensorrt_library
from hires.engine.tensorrt_library import EngineError, TensorRT, _LoadedEngine
from hires.quant.explicit_ops import quantize


class Recorder:
    """Network, converters and compiler at once: notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.converters: dict[Any, Any] = {}

    def convert_exported_program_to_serialized_trt_engine(self, program: Any, **keys: Any) -> bytes:
        self.calls.append(("convert", keys))
        return b"engine"

    def dynamo_tensorrt_converter(self, target: Any) -> Any:
        return lambda function: self.converters.setdefault(target, function)

    def get_trt_tensor(self, ctx: Any, value: Any, name: str, dtype: Any = None) -> Any:
        self.calls.append(("constant", value))
        return value

    def layer(self, kind: str, *args: Any) -> Any:
        layer = SimpleNamespace(axis=None, kind=kind, args=args)
        layer.get_output = lambda index: layer
        self.calls.append((kind, layer))
        return layer

    def add_quantize(self, *args: Any) -> Any:
        return self.layer("quantize", *args)

    def add_dequantize(self, *args: Any) -> Any:
        return self.layer("dequantize", *args)


@pytest.fixture
def recorded(monkeypatch) -> Recorder:
    recorder = Recorder()
    trt = SimpleNamespace(DataType=SimpleNamespace(INT8="int8", FLOAT="float"))
    own = SimpleNamespace(
        import_module=lambda name: recorder if name.startswith("torch_tensorrt") else trt
    )
    monkeypatch.setattr(tensorrt_library, "importlib", own)
    monkeypatch.setattr(
        tensorrt_library.torch.cuda, "device", lambda device: contextlib.nullcontext()
    )
    tensorrt_library._register_converters.cache_clear()
    yield recorder
    tensorrt_library._register_converters.cache_clear()


def test_engines_are_built_in_the_types_of_the_graph_and_kept_by_us(recorded):
    inputs = [torch.ones(2, 3)]
    program = torch.export.export(torch.nn.ReLU(), (inputs[0],), strict=False)
    for tf32 in (False, True):
        assert TensorRT(torch.device("cuda", 1), tf32).build(program, inputs) == b"engine"
    fp32, tf32 = (keys for name, keys in recorded.calls if name == "convert")
    assert (fp32["disable_tf32"], tf32["disable_tf32"]) == (True, False)
    assert not fp32["cache_built_engines"]
    assert not fp32["reuse_cached_engines"]
    assert fp32["device"] == torch.device("cuda", 1)
    assert fp32["arg_inputs"][0] is inputs[0]
    assert fp32["timing_cache_path"] != tf32["timing_cache_path"]


def test_roundings_become_layers_with_the_scales_of_the_graph(recorded):
    tensorrt_library._register_converters()
    ops, ctx = torch.ops.hires, SimpleNamespace(net=recorded)
    to, back = (recorded.converters[one] for one in (ops.quantize.default, ops.dequantize.default))
    numbers = to(ctx, None, ("map",), {}, "q")
    assert (numbers.kind, numbers.args[0], numbers.args[2]) == ("quantize", "map", "int8")
    assert float(numbers.args[1]) == 1.0
    real = back(ctx, None, (numbers, torch.tensor(0.5)), {}, "dq")
    assert (real.kind, real.args[0], float(real.args[1]), real.axis) == (
        "dequantize", numbers, 0.5, None
    )  # fmt: skip
    weight = torch.tensor([[-127, 3], [5, 127]], dtype=torch.int8)
    scales = torch.tensor([0.1, 2.0])
    made = back(ctx, None, (weight, scales), {}, "w")
    rounded = made.args[0]
    assert (made.axis, rounded.axis, rounded.kind) == (0, 0, "quantize")
    # What TensorRT rounds to is the weight again.
    held = rounded.args[0] / rounded.args[1].view(-1, 1)
    assert torch.equal(quantize(held), weight)


class Loaded:
    """A deserialised engine of two inputs and one output, and its context."""

    outputs = ("output0",)

    def __init__(self) -> None:
        self.addresses: dict[str, int] = {}
        self.names = ["x", *self.outputs, "y"]
        self.num_io_tensors = len(self.names)
        self.get_tensor_name = self.names.__getitem__

    def get_tensor_mode(self, name: str) -> str:
        return "out" if name in self.outputs else "in"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (2, 3)

    def create_execution_context(self) -> Loaded:
        return self

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        return stream == 7


@pytest.fixture
def runtime(recorded, monkeypatch) -> Loaded:
    loaded = Loaded()
    trt: Any = SimpleNamespace(
        Logger=lambda level: None,
        Runtime=lambda logger: SimpleNamespace(
            deserialize_cuda_engine=lambda data: loaded if data == b"good" else None
        ),
        TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out"),
    )
    trt.Logger.WARNING = 1
    monkeypatch.setattr(tensorrt_library, "_logger", lambda: None)
    own = SimpleNamespace(import_module=lambda name: trt)
    monkeypatch.setattr(tensorrt_library, "importlib", own)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(tensorrt_library.torch.cuda, "current_stream", lambda device: stream)
    return loaded


def test_engine_gets_aligned_addresses_on_the_current_stream(runtime):
    run = _LoadedEngine(b"good", [torch.empty(2, 3)], torch.device("cpu"))
    x = torch.zeros(1000)[1:7].view(2, 3)
    [made] = run(x, torch.zeros(2, 3))
    assert (made.shape, made.dtype) == ((2, 3), torch.float32)
    assert runtime.addresses.keys() == {"x", "y", "output0"}
    assert runtime.addresses["output0"] == made.data_ptr()
    assert runtime.addresses["x"] != x.data_ptr()
    with pytest.raises(EngineError, match="it has 2 inputs, not 1"):
        run(x)


def test_engine_of_other_outputs_is_refused(runtime):
    device = torch.device("cpu")
    with pytest.raises(EngineError, match="cannot read the engine"):
        _LoadedEngine(b"bad", [torch.empty(2, 3)], device)
    with pytest.raises(EngineError, match=r"its outputs are \['output0'\], and 2 were expected"):
        _LoadedEngine(b"good", [torch.empty(2, 3)] * 2, device)
    with pytest.raises(EngineError, match=r"its output0 has the shape \(2, 3\), not \(9,\)"):
        _LoadedEngine(b"good", [torch.empty(9)], device)
