"""Makes the rows of ``hires bench precision``: a network, a size and a batch at each precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hires.bench.bench_output import names_of, option
from hires.bench.contestants import CLASSES, model_config
from hires.core.config.data_config import DataConfig
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError
from hires.core.precisions import INT8
from hires.data.source import open_source
from hires.plan.route_choice import resolve

MODELS = ("resnet50", "resnet101", "amoebanet", "unet")
PRECISIONS = ("fp32", "bf16", INT8)
OURS = {"hires": {}, "hires, 2 tiles": {"tiles": [1, 2]}}
"""Rows of hires and their ``parallel.*``; the first is one thread."""
TORCH, COMPILED, ONNXRUNTIME, OPENVINO = "torch", "compiled", "onnxruntime", "openvino"
PEERS = {
    TORCH: ("fp32", "bf16"),
    COMPILED: ("fp32", "bf16"),
    ONNXRUNTIME: ("fp32", INT8),  # its CPU provider has no convolution in bf16
    OPENVINO: ("fp32", "bf16", INT8),
}
"""Other libraries, and the precisions that they run."""


def pixels_of(flag: str, text: str) -> tuple[int, ...]:
    """Returns whole numbers with commas between."""
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise ConfigError(f"{flag} {text} must be numbers with commas between, as 512,1024")
    return tuple(dict.fromkeys(map(int, text.split(","))))


MADE = ("textures", "hard", "digits")
"""Values of ``--data`` that need no folder."""
UNET_CLASSES = 2
"""Of every pixel, as a lesion and its surroundings."""


@dataclass(frozen=True)
class PrecisionOptions:
    """The options of ``hires bench precision``."""

    models: tuple[str, ...] = option("resnet50", ",".join(MODELS), parse=names_of(MODELS))
    images: tuple[int, ...] = option("256", "pixels of a side", parse=pixels_of)
    batches: tuple[int, ...] = option("8", "images of a batch", parse=pixels_of)
    precisions: tuple[str, ...] = option(
        ",".join(PRECISIONS), "precisions", parse=names_of(PRECISIONS)
    )
    peers: tuple[str, ...] = option(
        ",".join(PEERS), "libraries to measure beside hires", parse=names_of([*PEERS])
    )
    weights: str = option("", "weights of the networks; none: random ones with batch statistics")
    data: str = option(
        "", f"images: {', '.join(MADE)}, or a folder of classes; none: synthetic ones"
    )
    calibration: int = option(
        32, "images that int8 scales, and without --weights the statistics of norms, are found on"
    )
    rounds: int = option(7, "samples of every row")
    warmup: int = option(2, "rounds before them", low=0)
    memory: bool = option(True, "measure no peaks of memory of hires")
    trim: bool = option(
        False,
        "hires takes large blocks from the system, as the libraries do, and gives freed memory "
        "back after each turn: for large batches, whose rows do not fit beside each other",
    )
    timeout: float = option(3600.0, "seconds for each network, size and batch")

    def __post_init__(self) -> None:
        if self.weights and len(self.models) > 1:
            raise ConfigError(f"--weights {self.weights} fits one network; name it with --models")
        if self.data and self.data not in MADE and not Path(self.data).is_dir():
            names = ", ".join(MADE)
            raise ConfigError(f"--data {self.data} is no folder; name one, or use {names}")


@dataclass(frozen=True)
class PrecisionCase:
    """A network at one size and batch; its rows are measured in turns."""

    model: str
    image: int
    batch: int
    data: str = ""
    """As :attr:`PrecisionOptions.data`."""

    @property
    def title(self) -> str:
        """For tables."""
        images = f", {self.data}" if self.data else ""
        return f"{self.model}, {self.image}x{self.image}, batch {self.batch}{images}"

    @cached_property
    def classes(self) -> int:
        """As many as the data has; of synthetic images as many as is usual for the network."""
        if self.data:
            data = from_dict({"data": self.source()}).data
            return open_source(data, (self.image, self.image), 3, 0).num_classes
        return UNET_CLASSES if self.model == "unet" else CLASSES

    def network(self) -> dict[str, Any]:
        """Returns the values of ``model``."""
        if self.model == "unet":
            model = ModelConfig(name="unet")
        else:
            name = "amoebanet-18-208" if self.model == "amoebanet" else self.model
            model = model_config(name)
        return asdict(replace(model, classes=self.classes))

    def source(self) -> dict[str, Any]:
        """Returns the values of ``data`` that differ from their defaults.

        Real images are those to validate with, so that a calibration takes the others.
        """
        if not self.data:
            return {"classes": self.classes}
        if self.data in MADE:
            return {"name": self.data, "split": "validation"}
        path = str(Path(self.data).absolute())
        return {"name": "folder", "path": path, "split": "validation"}

    def num_calibrated(self, least: int) -> int:
        """Returns how many images are calibrated on: whole batches, ``least`` or more."""
        return self.batch * -(-least // self.batch)

    def calibration(self, least: int) -> RunConfig:
        """Returns the config whose first step has the images that are calibrated on."""
        config = self.config("fp32", {}, "", "")
        split = "train" if self.data else "all"
        length = max(DataConfig.length, self.num_calibrated(least))
        data = replace(config.data, split=split, length=length)
        return replace(config, batch=self.num_calibrated(least), data=data)

    def config(
        self, precision: str, layout: dict[str, Any], weights: str, scales: str
    ) -> RunConfig:
        """Returns the config of a row of hires; with the layout {} and fp32 that of the network."""
        values: dict[str, Any] = {
            "device": "cpu",
            "image": [self.image, self.image],
            "batch": self.batch,
            "steps": 1,
            "model": self.network(),
            "data": {**self.source(), "prefetch": 0},
            "task": {"name": "infer"},
            "measure": {"warmup": 0},
            "parallel": layout,
            "precision": {"name": precision},
            "weights": weights or None,
        }
        if precision == INT8:
            values["quant"] = {"scales": scales}
        return resolve(from_dict(values))


def cases_of(options: PrecisionOptions) -> list[PrecisionCase]:
    """Returns what is measured, the small ones first."""
    return [
        PrecisionCase(model, image, batch, options.data)
        for model in options.models
        for image in sorted(options.images)
        for batch in sorted(options.batches)
    ]


def peers_of(options: PrecisionOptions) -> Iterator[tuple[str, str]]:
    """Yields each library with each precision that it runs."""
    for peer in options.peers:
        yield from ((peer, one) for one in options.precisions if one in PEERS[peer])


def row_name(who: str, precision: str) -> str:
    """Returns the name of a row, which is the only one of its case."""
    return f"{who} {precision}"
