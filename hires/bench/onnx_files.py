"""Writes a network as the files that ONNX Runtime and OpenVINO read, in fp32 and in 8 bits.

    network of hires -- torch.onnx --> network.onnx --+-- quantize_static --> onnxruntime-int8.onnx
                                                      +-- NNCF ------------> openvino-int8.xml, .bin

A process of its own writes each file when it is first needed, so that what a conversion allocates
is no part of a library's memory. Both calibrations read the images that the scales of hires are
found on. Each library has its documented defaults for a CPU, and a scale for each channel of the
weights.
"""

from __future__ import annotations

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
from hires.core.python_command import module_command
from hires.core.store.naming import plain
from hires.engine.network_files import INPUT, write_onnx

IMAGES, CALIBRATION = "images.npy", "calibration.npy"
"""Images of a step (batch, C, H, W), and those to calibrate on, a whole number of batches."""
NETWORK, ONNXRUNTIME_INT8 = "network.onnx", "onnxruntime-int8.onnx"
OPENVINO_INT8 = "openvino-int8.xml"
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf")
"""What ``pip install 'hires[peers]'`` brings."""
INSTALL = "pip install 'hires[peers]'"
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


def batches(folder: Path) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the images to calibrate on as batches of the network's own size."""
    size = len(np.load(folder / IMAGES, mmap_mode="r"))
    images = np.load(folder / CALIBRATION, mmap_mode="r")
    for first in range(0, len(images), size):
        yield np.ascontiguousarray(images[first : first + size])


def write_network(config: RunConfig, folder: Path) -> None:
    """Exports the network, whose norms become part of the convolutions before them."""
    module = plain_module(config, trick=False).eval()
    images = torch.from_numpy(np.load(folder / IMAGES))
    write_onnx(module, images, folder / NETWORK)


def write_onnxruntime_int8(config: RunConfig, folder: Path) -> None:
    """Quantises with ONNX Runtime: QDQ, unsigned values, signed weights per channel, min-max."""
    quantization = import_module("onnxruntime.quantization")
    shapes = import_module("onnxruntime.quantization.shape_inference")

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self._batches = batches(folder)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self._batches, None)
            return None if batch is None else {INPUT: batch}

    prepared = folder / "prepared.onnx"
    network = written(NETWORK, config, folder)
    shapes.quant_pre_process(str(network), str(prepared), skip_symbolic_shape=True)
    quantization.quantize_static(
        str(prepared),
        str(folder / ONNXRUNTIME_INT8),
        Reader(),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        calibrate_method=quantization.CalibrationMethod.MinMax,
    )


def write_openvino_int8(config: RunConfig, folder: Path) -> None:
    """Quantises with NNCF after training: its preset for speed, statistics of single images."""
    openvino, nncf = import_module("openvino"), import_module("nncf")
    parts = [*batches(folder)]
    network = openvino.Core().read_model(written(NETWORK, config, folder))
    parameters = nncf.AdvancedQuantizationParameters(batchwise_statistics=len(parts[0]) > 1)
    quantised = nncf.quantize(
        network,
        nncf.Dataset(parts),
        subset_size=len(parts),
        preset=nncf.QuantizationPreset.PERFORMANCE,
        target_device=nncf.TargetDevice.CPU,
        advanced_parameters=parameters,
    )
    openvino.save_model(quantised, folder / OPENVINO_INT8, compress_to_fp16=False)


WRITERS: dict[str, Callable[[RunConfig, Path], None]] = {
    NETWORK: write_network,
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
