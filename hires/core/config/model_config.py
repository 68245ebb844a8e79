"""Declares the keys of the network: ``model.*``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.config.fields import MOST_SEED, Section, not_function, value

_BY_BLOCKS = ("preact_resnet", "mpi4dl_resnet")
IMAGES = ("images", "image_list")
"""Words of ``model.inputs`` that stand for the images."""

CUSTOM = "custom"
_YOURS = "A network of your own: model.target=package.module:function, model.args.KEY=VALUE"


def _networks() -> Iterator[tuple[str, str]]:
    # Modules of networks import torch, which no command that only composes a config waits for.
    for path in sorted((Path(__file__).parents[2] / "networks").glob("[!_]*.py")):
        with path.open(encoding="utf-8") as file:
            yield path.stem, file.readline().strip('".\n')
    yield CUSTOM, _YOURS


NETWORKS = dict(_networks())
"""Value of ``model`` -> what the network is."""


@dataclass
class ModelConfig(Section, key="model", choices=NETWORKS):
    """``model=NAME``: the network."""

    name: str = "resnet"
    """Family: ``resnet`` (2015), ``preact_resnet`` (9n+2, 2016), ``mpi4dl_resnet`` (9n+2, wider, as
    MPI4DL trains it), ``inception_bn``, ``amoebanet`` (AmoebaNet-D), ``unet`` (a class for every
    pixel), ``edsr`` (super-resolution) or ``custom``."""
    depth: int | None = value(None, 1, 9002, of=("resnet", *_BY_BLOCKS))
    """Layers of a ``resnet``: 18, 34, 50, 101 or 152; of a ``preact_resnet`` or ``mpi4dl_resnet``,
    which have n blocks in each of three groups, 9n+2: 11, 20, 29, ...; unset: 50 and 110."""
    head: str = value("pool", choices=("pool", "flatten"), of=("mpi4dl_resnet",))
    """What the classifier of an ``mpi4dl_resnet`` reads: the average of the last map (``pool``) or,
    as in the original, of each of its windows of 8x8 (``flatten``), whose number follows the
    image."""
    layers: int = value(18, 1, 1000, of=("amoebanet",))
    """Normal cells of an ``amoebanet``, a multiple of 3."""
    filters: int = value(208, 1, of=("amoebanet",))
    """Filters of an ``amoebanet``, a multiple of 4: its stem has a quarter as many channels."""
    levels: int = value(4, 1, 16, of=("unet",))
    """Times a ``unet`` halves the image on its way down."""
    blocks: int = value(16, 1, 1000, of=("edsr",))
    """Residual blocks of an ``edsr``."""
    width: int = value(64, 1, of=("unet", "edsr"))
    """Channels of a ``unet`` at full size, and of an ``edsr``."""
    upsample: str = value("transposed", choices=("transposed", "bilinear", "nearest"), of=("unet",))
    """Way up of a ``unet``: a ``transposed`` convolution, or ``bilinear`` or ``nearest``
    interpolation before a convolution."""
    scale: int = value(2, 1)
    """How much larger the target of ``loss=l1`` is than the image; an ``edsr`` enlarges by
    2, 3 or 4."""
    res_scale: float = value(1.0, above=0, of=("edsr",))
    """Factor by which an ``edsr`` multiplies the output of each residual block before the sum."""
    inputs: Any = value(high=MOST_SEED, of=(CUSTOM,))
    """``custom`` only: how the network's ``forward`` takes the images: unset, as its first
    argument; a list of its arguments or a dict of them by name, in which ``images`` stands for
    (n, C, H, W) and ``image_list`` for a list of (C, H, W); or the name of one argument."""
    output: str | None = value(of=(CUSTOM,))
    """``custom`` only: which tensor of a dict, a tuple or an object is the network's output, as
    ``logits``, ``0`` or ``aux.0``; unset: the only one."""
    classes: int | None = value(None, 1)
    """Outputs of the classifier, or for every pixel; unset: as many as the data has (for pairs,
    the channels of the image)."""
    channels: int = value(3, 1)
    """Channels of the input image."""
    target: str | None = value(of=(CUSTOM,))
    """``custom`` only: ``package.module:function`` that returns a torch module."""
    args: dict[str, Any] = value({})
    """Keyword arguments of the function of a ``custom`` network, or of a network in
    ``hires/networks`` that has arguments beside the keys here."""
    files: list[str] = value([], of=(CUSTOM,))
    """``custom`` only: files that the network reads (a JSON of widths, weights): their contents are
    part of the run, like its source."""
    trusted: bool = value(False, of=(CUSTOM,))
    """``custom`` only: accepts an ``autograd.Function``, a hook on gradients, random numbers of
    Python and a state between calls, which a graph does not hold; ``hires verify`` compares a
    step."""

    @property
    def num_layers(self) -> int:
        """The depth of a residual network."""
        return self.depth or (50 if self.name == "resnet" else 110)

    def _problems(self) -> Iterator[str]:
        if self.name == CUSTOM:
            yield from not_function("model", self.target)
        n, rest = divmod(self.num_layers - 2, 9)
        if self.name in _BY_BLOCKS and (n < 1 or rest):
            fitting = [11] if n < 1 else [9 * n + 2, 9 * n + 11]
            depths = " or ".join(f"model.depth={depth}" for depth in fitting)
            yield f"model.depth={self.depth}: {self.name} has 9n+2 layers; use {depths}"
        if isinstance(self.inputs, (list, dict)) and not _names_images(self.inputs):
            yield (
                f"model.inputs={self.inputs!r} has no images; write images where the network takes "
                f"them, as model.inputs=[[images]] or model.inputs.pixel_values=images"
            )


def _names_images(inputs: Any) -> bool:
    if isinstance(inputs, (list, dict)):
        return any(map(_names_images, inputs.values() if isinstance(inputs, dict) else inputs))
    return inputs in IMAGES
