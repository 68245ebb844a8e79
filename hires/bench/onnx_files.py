"""Writes a network as the files that ONNX Runtime and OpenVINO read, in fp32 and in 8 bits.

    network of hires -- torch.onnx --> network.onnx --+-- quantize_static --> onnxruntime-int8.onnx
                                                      +-- NNCF ------------> openvino-int8.xml, .bin

A process of its own writes each file when it is first needed, so that what a conversion allocates
is no part of a library's memory. Both calibrations read the images that the scales of hires are
found on. Each library has its documented defaults for a CPU, and a scale for each channel of the
weights.

Both libraries hold every value of the network at once while they calibrate, and were killed on a
machine of 23 GiB: ONNX Runtime by one image of 1024x1024 pixels in a U-Net or AmoebaNet-D. The
ranges are of single numbers, so those of a network
for one image of 512x512 pixels serve one of the same weights for any batch and size:

    images (n, C, H, W) -- middle of each --> (1, C, 512, 512) -- network.onnx of that size
                                          --> ranges by name   -- network.onnx of all pixels
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hires.bench.ranks import run_program
from hires.bench.runners import plain_module
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import RunError
from hires.core.precisions import INT8
from hires.core.python_command import module_command
from hires.core.store.naming import plain
from hires.engine.network_files import INPUT, write_onnx
from hires.plan.checks import lacks_instructions

IMAGES, CALIBRATION = "images.npy", "calibration.npy"
"""Images of a step (batch, C, H, W), and those to calibrate on, a whole number of batches."""
NETWORK, ONNXRUNTIME_INT8 = "network.onnx", "onnxruntime-int8.onnx"
OPENVINO_INT8 = "openvino-int8.xml"
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf")
"""What ``pip install 'hires[peers]'`` brings."""
INSTALL = "pip install 'hires[peers]'"
CALIBRATED_PIXELS = 512
"""Rows and columns that the libraries calibrate on, at most."""
_SAMPLE, _OF_SAMPLE = "sample.onnx", "sample-"
"""The network for one image as it is calibrated on; what the names of its files begin with."""
_PREFIXES = {NETWORK: "", _SAMPLE: _OF_SAMPLE}
_MODULE = "hires.bench.onnx_files"
_LIMIT_S = 3600.0


def require_packages() -> None:
    """Raises a RunError that names what is missing and how to install it."""
    missing = [name for name in PACKAGES if util.find_spec(name) is None]
    if missing:
        raise RunError(f"{', '.join(missing)} not installed: {INSTALL}")


def written(name: str, config: RunConfig, folder: Path) -> Path:
    """Returns a file of the folder of a case, which is written first if it is not there.

    RunError: the conversion failed.
    """
    path = folder / name
    if not path.exists():
        task = {"file": name, "config": plain(config), "folder": str(folder)}
        try:
            run_program(f"writing {name}", module_command(_MODULE, json.dumps(task)), _LIMIT_S)
        except RunError:
            path.unlink(missing_ok=True)  # perhaps half of it was written
            raise
    return path


def samples(folder: Path) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the images to calibrate on one by one, of large ones the middle."""
    images = np.load(folder / CALIBRATION, mmap_mode="r")
    rows, columns = (slice(*_middle(size)) for size in images.shape[2:])
    for first in range(len(images)):
        yield np.ascontiguousarray(images[first : first + 1, :, rows, columns])


def _middle(size: int) -> tuple[int, int]:
    kept = min(size, CALIBRATED_PIXELS)
    return (size - kept) // 2, (size - kept) // 2 + kept


def write_network(config: RunConfig, folder: Path) -> None:
    """Exports the network, whose norms become part of the convolutions before them."""
    module = plain_module(config, trick=False).eval()
    images = torch.from_numpy(np.load(folder / IMAGES))
    write_onnx(module, images, folder / NETWORK)


def write_sample_network(config: RunConfig, folder: Path) -> None:
    """Exports the network for a single image of those to calibrate on."""
    sample = torch.from_numpy(next(samples(folder)))
    config = dataclasses.replace(config, image=[*sample.shape[2:]], batch=1)
    write_onnx(plain_module(config, trick=False).eval(), sample, folder / _SAMPLE)


def write_onnxruntime_int8(config: RunConfig, folder: Path) -> None:
    """Quantises with ONNX Runtime: QDQ, unsigned values, signed weights per channel, min-max.

    Weights have 7 bits on processors that saturate sums of 16, as its guide to CPUs says.
    """
    quantization = import_module("onnxruntime.quantization")
    shapes = import_module("onnxruntime.quantization.shape_inference")
    quantizer = import_module("onnxruntime.quantization.qdq_quantizer")
    loading = import_module("onnxruntime.quantization.quant_utils")
    prepared = {name: folder / f"{prefix}prepared.onnx" for name, prefix in _PREFIXES.items()}
    for name, path in prepared.items():
        network = written(name, config, folder)
        shapes.quant_pre_process(str(network), str(path), skip_symbolic_shape=True)
    calibrator = quantization.create_calibrator(
        prepared[_SAMPLE],
        augmented_model_path=str(folder / f"{_OF_SAMPLE}augmented.onnx"),
        calibrate_method=quantization.CalibrationMethod.MinMax,
    )
    calibrator.collect_data(_reader(quantization, folder))
    made = quantizer.QDQQuantizer(
        loading.load_model_with_shape_infer(prepared[NETWORK]),
        True,  # a scale for each channel
        lacks_instructions(INT8),  # 7 bits
        quantization.QuantType.QInt8,
        quantization.QuantType.QUInt8,
        calibrator.compute_data(),
        [],  # nodes: all
        [],
        _quantised_types(),
        {},
    )
    made.quantize_model()
    made.model.save_model_to_file(str(folder / ONNXRUNTIME_INT8), False)


def _quantised_types() -> list[str]:
    registry = import_module("onnxruntime.quantization.registry")
    return sorted({*registry.QLinearOpsRegistry, *registry.QDQRegistry})


def _reader(quantization: Any, folder: Path) -> Any:
    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._samples = samples(folder)

        def get_next(self) -> dict[str, Any] | None:
            sample = next(self._samples, None)
            return None if sample is None else {INPUT: sample}

    return Reader()


def write_openvino_int8(config: RunConfig, folder: Path) -> None:
    """Quantises with NNCF after training: its preset for speed."""
    openvino, nncf = import_module("openvino"), import_module("nncf")
    parts = [*samples(folder)]
    network = openvino.Core().read_model(written(NETWORK, config, folder))
    whole = [*network.input(0).shape]
    network.reshape([*parts[0].shape])
    quantised = nncf.quantize(
        network,
        nncf.Dataset(parts),
        subset_size=len(parts),
        preset=nncf.QuantizationPreset.PERFORMANCE,
        target_device=nncf.TargetDevice.CPU,
    )
    quantised.reshape(whole)
    openvino.save_model(quantised, folder / OPENVINO_INT8, compress_to_fp16=False)


WRITERS: dict[str, Callable[[RunConfig, Path], None]] = {
    NETWORK: write_network,
    _SAMPLE: write_sample_network,
    ONNXRUNTIME_INT8: write_onnxruntime_int8,
    OPENVINO_INT8: write_openvino_int8,
}


def main() -> None:
    """Writes the file that the JSON of the command names."""
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    WRITERS[task["file"]](from_dict(task["config"]), Path(task["folder"]))


if __name__ == "__main__":
    main()
