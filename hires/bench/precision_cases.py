"""Makes the rows of ``hires bench precision``: a network, a size and a batch at each precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hires.bench.bench_output import names_of, option
from hires.bench.contestants import CLASSES, model_config
from hires.bench.halo_bench import pixels_of
from hires.core.config.run_config import ModelConfig, RunConfig, from_dict
from hires.core.errors import ConfigError
from hires.core.precisions import INT8
from hires.plan.route_choice import resolve

MODELS = ("resnet50", "resnet101", "amoebanet", "unet")
PRECISIONS = ("fp32", "bf16", INT8)
OURS = {"hires": {}, "hires, 2 tiles": {"tiles": [1, 2]}}
"""Rows of hires and their ``parallel.*``; the first is one thread."""
TORCH, COMPILED = "torch", "compiled"
PEERS = {
    TORCH: ("fp32", "bf16"),
    COMPILED: ("fp32", "bf16"),
}
"""Other libraries, and the precisions that they run."""


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
    rounds: int = option(7, "samples of every row")
    warmup: int = option(2, "rounds before them", low=0)
    memory: bool = option(True, "measure no peaks of memory of hires")
    timeout: float = option(3600.0, "seconds for each network, size and batch")

    def __post_init__(self) -> None:
        if self.weights and len(self.models) > 1:
            raise ConfigError(f"--weights {self.weights} fits one network; name it with --models")


@dataclass(frozen=True)
class PrecisionCase:
    """A network at one size and batch; its rows are measured in turns."""

    model: str
    image: int
    batch: int

    @property
    def title(self) -> str:
        """For tables."""
        return f"{self.model}, {self.image}x{self.image}, batch {self.batch}"

    def network(self) -> dict[str, Any]:
        """Returns the values of ``model``."""
        if self.model == "unet":
            return asdict(ModelConfig(name="unet"))
        name = "amoebanet-18-208" if self.model == "amoebanet" else self.model
        return asdict(model_config(name))

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
            "data": {"classes": CLASSES, "prefetch": 0},
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
        PrecisionCase(model, image, batch)
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
