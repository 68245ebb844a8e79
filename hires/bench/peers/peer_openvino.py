"""OpenVINO's CPU device in one thread: inference in fp32, bf16, and int8 by NNCF's speed preset."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hires.bench.bench_rows import BenchRow
from hires.bench.precision_inputs import calibration_samples, missing_packages, network_file
from hires.bench.race import Runner
from hires.core.precisions import INT8
from hires.engine.device import RankDevice
from hires.engine.network_files import INPUT

CONVERTED = True
_HINTS = {"fp32": "f32", "bf16": "bf16", INT8: "f32"}
"""OpenVINO's type of what is not quantised; hires, too, computes that in fp32 beside 8 bits."""


def lacks(row: BenchRow) -> str:
    """Returns why it cannot run a row."""
    if row.training or row.config.precision.name not in _HINTS:
        return "it has inference in fp32, bf16 and int8 alone"
    return missing_packages("onnx", "onnxscript", "openvino", "nncf")


def build(row: BenchRow, rank: int, device: RankDevice) -> Runner:
    """Returns a compiled model of the network."""
    return ModelSteps(row)


class ModelSteps(Runner):
    """The steps of a compiled model."""

    def __init__(self, row: BenchRow) -> None:
        (path, images), precision = network_file(row), row.config.precision.name
        core = import_module("openvino").Core()
        model = core.read_model(path)
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": 1,
            "INFERENCE_PRECISION_HINT": _HINTS[precision],
            "ENABLE_CPU_PINNING": False,  # nor are the threads of the others bound to a core
        }
        model = _quantised(model, row) if precision == INT8 else model
        self.request = core.compile_model(model, "CPU", options).create_infer_request()
        self.feed = {INPUT: images.numpy()}

    def step(self) -> Tensor:
        """Returns the outputs."""
        outputs = self.request.infer(self.feed, share_inputs=True, share_outputs=True)
        return torch.from_numpy(outputs[0])


def _quantised(model: Any, row: BenchRow) -> Any:
    nncf = import_module("nncf")
    samples = [sample.numpy() for sample in calibration_samples(row)]
    shape = [*model.input(0).shape]
    model.reshape([*samples[0].shape])
    speed, cpu = nncf.QuantizationPreset.PERFORMANCE, nncf.TargetDevice.CPU
    how = {"subset_size": len(samples), "preset": speed, "target_device": cpu}
    quantised = nncf.quantize(model, nncf.Dataset(samples), **how)
    quantised.reshape(shape)
    return quantised
