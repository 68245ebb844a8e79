"""Libraries that read the network from a file of ONNX, on the CPU in one thread: inference alone.

Both hold every value of the network at once while they calibrate 8 bits, and were killed on a
machine of 23 GiB by one image of 1024x1024 pixels. Ranges are single numbers, so those of images of
at most 512x512 pixels serve a network of the same weights for any batch and size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module, util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hires.bench.bench_rows import PEERS, BenchRow, PeerSteps, in_float32
from hires.bench.peers.peer_torch import calibration_images, plain_module, whole_batch
from hires.core.config.precision_config import INT8
from hires.core.programs import adding
from hires.engine.device import RankDevice
from hires.engine.network_files import INPUT, write_onnx
from hires.plan.checks import lacks_instructions

CALIBRATED_PIXELS = 512  # rows and columns that the libraries calibrate on, at most
HINTS = {"fp32": "f32", "bf16": "bf16", INT8: "f32"}
"""OpenVINO's type of what is not quantised; hires, too, computes that in fp32 beside 8 bits."""


class FileSteps(PeerSteps):
    """The steps of a library that reads the network from a file."""

    converted = True

    def __init__(self, row: BenchRow, rank: int, device: RankDevice) -> None:
        super().__init__(row, rank, device)
        path, images = network_file(row)
        self.feed = {INPUT: images.numpy()}
        self.open(path)

    def open(self, path: Path) -> None:
        """Reads the file."""
        raise NotImplementedError

    def run(self) -> Any:
        """Returns the outputs of all images, as numpy has them."""
        raise NotImplementedError

    def step(self) -> None:
        """Runs one step."""
        outputs = torch.from_numpy(self.run())
        self.values = outputs.chunk(self.row.config.parallel.pieces)


@PEERS.register("onnxruntime")
class SessionSteps(FileSteps):
    """ONNX Runtime's CPU provider with its defaults.

    8 bits: QDQ, unsigned values, signed weights with a scale for each channel, min-max. Weights
    have 7 bits on processors that saturate sums of 16, as its guide to CPUs says.
    """

    @staticmethod
    def lacks(row: BenchRow) -> str:
        """Returns why it cannot run a row."""
        if row.training or row.config.precision.name not in ("fp32", INT8):
            return "its CPU provider has inference in fp32 and int8 alone"
        return _missing("onnx", "onnxscript", "onnxruntime")

    def open(self, path: Path) -> None:
        """Makes a session of the network."""
        library = import_module("onnxruntime")
        if self.row.config.precision.name == INT8:
            path = self._quantised(path)
        options = library.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = library.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(self) -> Any:
        """Returns the outputs."""
        return self.session.run(None, self.feed)[0]

    def _quantised(self, network: Path) -> Path:
        quantization = import_module("onnxruntime.quantization")
        shapes = import_module("onnxruntime.quantization.shape_inference")
        quantizer = import_module("onnxruntime.quantization.qdq_quantizer")
        loading = import_module("onnxruntime.quantization.quant_utils")
        registry = import_module("onnxruntime.quantization.registry")
        samples, prepared = calibration_samples(self.row), []
        for path in (network, network_file(self.row, samples[0])[0]):
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


@PEERS.register("openvino")
class RequestSteps(FileSteps):
    """OpenVINO's CPU device, in 8 bits by NNCF's speed preset."""

    @staticmethod
    def lacks(row: BenchRow) -> str:
        """Returns why it cannot run a row."""
        if row.training or row.config.precision.name not in HINTS:
            return "it has inference in fp32, bf16 and int8 alone"
        return _missing("onnx", "onnxscript", "openvino", "nncf")

    def open(self, path: Path) -> None:
        """Compiles the network."""
        core, precision = import_module("openvino").Core(), self.row.config.precision.name
        model = core.read_model(path)
        options: Mapping[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": 1,
            "INFERENCE_PRECISION_HINT": HINTS[precision],
            "ENABLE_CPU_PINNING": False,  # nor are the threads of the others bound to a core
        }
        model = self._quantised(model) if precision == INT8 else model
        self.request = core.compile_model(model, "CPU", options).create_infer_request()

    def run(self) -> Any:
        """Returns the outputs."""
        return self.request.infer(self.feed, share_inputs=True, share_outputs=True)[0]

    def _quantised(self, model: Any) -> Any:
        nncf = import_module("nncf")
        samples = [sample.numpy() for sample in calibration_samples(self.row)]
        shape = [*model.input(0).shape]
        model.reshape([*samples[0].shape])
        speed, cpu = nncf.QuantizationPreset.PERFORMANCE, nncf.TargetDevice.CPU
        how = {"subset_size": len(samples), "preset": speed, "target_device": cpu}
        quantised = nncf.quantize(model, nncf.Dataset(samples), **how)
        quantised.reshape(shape)
        return quantised


def _missing(*names: str) -> str:
    missing = ", ".join(name for name in names if util.find_spec(name) is None)
    return f"{missing} not installed; {adding('peers')}" if missing else ""


def network_file(row: BenchRow, sample: Tensor | None = None) -> tuple[Path, Tensor]:
    """Returns the network of a row in fp32 for its images, or for one sample; and the images."""
    config, name = in_float32(row.config), "network.onnx"
    if sample is not None:
        config, name = replace(config, image=[*sample.shape[2:]], batch=1), "sample.onnx"
    images = whole_batch(config)[0].contiguous() if sample is None else sample
    path = Path(row.settings["folder"]) / name
    if not path.exists():
        with torch.no_grad():
            write_onnx(plain_module(config, trick=False).eval(), images, path)
    return path, images


def calibration_samples(row: BenchRow) -> list[Tensor]:
    """Returns the images to calibrate on one by one (1, C, h, w), of large ones the middle."""
    images = calibration_images(in_float32(row.config), row.settings["statistics"])
    for dim in (2, 3):
        kept = min(images.shape[dim], CALIBRATED_PIXELS)
        images = images.narrow(dim, (images.shape[dim] - kept) // 2, kept)
    return [image[None] for image in images.contiguous()]
