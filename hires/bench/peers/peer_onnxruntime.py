"""ONNX Runtime's CPU provider with its defaults, in one thread: inference in fp32 and int8.

8 bits: QDQ, unsigned values, signed weights with a scale for each channel, min-max. Weights have 7
bits on processors that saturate sums of 16, as its guide to CPUs says.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hires.bench.bench_rows import BenchRow
from hires.bench.precision_inputs import calibration_samples, missing_packages, network_file
from hires.bench.race import Runner
from hires.core.precisions import INT8
from hires.engine.device import RankDevice
from hires.engine.network_files import INPUT
from hires.plan.checks import lacks_instructions

CONVERTED = True


def lacks(row: BenchRow) -> str:
    """Returns why it cannot run a row."""
    if row.training or row.config.precision.name not in ("fp32", INT8):
        return "its CPU provider has inference in fp32 and int8 alone"
    return missing_packages("onnx", "onnxscript", "onnxruntime")


def build(row: BenchRow, rank: int, device: RankDevice) -> Runner:
    """Returns a session of the network."""
    return SessionSteps(row)


class SessionSteps(Runner):
    """The steps of a session."""

    def __init__(self, row: BenchRow) -> None:
        library = import_module("onnxruntime")
        path, images = network_file(row)
        path = _quantised(row, path) if row.config.precision.name == INT8 else path
        options = library.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = library.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.feed = {INPUT: images.numpy()}

    def step(self) -> Tensor:
        """Returns the outputs."""
        return torch.from_numpy(self.session.run(None, self.feed)[0])


def _quantised(row: BenchRow, network: Path) -> Path:
    quantization = import_module("onnxruntime.quantization")
    shapes = import_module("onnxruntime.quantization.shape_inference")
    quantizer = import_module("onnxruntime.quantization.qdq_quantizer")
    loading = import_module("onnxruntime.quantization.quant_utils")
    registry = import_module("onnxruntime.quantization.registry")
    samples, prepared = calibration_samples(row), []
    for path in (network, network_file(row, samples[0])[0]):
        prepared.append(path.with_name(f"{path.stem}-prepared.onnx"))
        shapes.quant_pre_process(str(path), str(prepared[-1]), skip_symbolic_shape=True)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc,name-defined]
        def get_next(self) -> dict[str, Any] | None:
            return {INPUT: samples.pop().numpy()} if samples else None

    calibrator = quantization.create_calibrator(
        prepared[1],
        augmented_model_path=str(network.with_name("augmented.onnx")),
        calibrate_method=quantization.CalibrationMethod.MinMax,
    )
    calibrator.collect_data(Reader())
    quantised = quantizer.QDQQuantizer(
        loading.load_model_with_shape_infer(prepared[0]),
        per_channel=True,
        reduce_range=lacks_instructions(INT8),
        weight_qType=quantization.QuantType.QInt8,
        activation_qType=quantization.QuantType.QUInt8,
        tensors_range=calibrator.compute_data(),
        nodes_to_quantize=[],
        nodes_to_exclude=[],
        op_types_to_quantize=sorted({*registry.QLinearOpsRegistry, *registry.QDQRegistry}),
        extra_options={},
    )
    quantised.quantize_model()
    path = network.with_name("onnxruntime-int8.onnx")
    quantised.model.save_model_to_file(str(path), False)
    return path
