"""Declares the keys of the network: ``model.*``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hires.core.config.residual_depth import DEPTH, N
from hires.core.config.value_checks import MOST_SEED, Checks, Section, choice, number
from hires.core.errors import ConfigError

IMAGES = ("images", "image_list")
"""Words of ``model.inputs`` that stand for the images."""

OWN_KEYS = {
    "resnet": ("depth",),
    "preact_resnet": ("depth", "n"),
    "mpi4dl_resnet": ("depth", "n", "head"),
    "inception_bn": (),
    "amoebanet": ("layers", "filters"),
    "unet": ("levels", "width", "upsample"),
    "edsr": ("blocks", "width", "res_scale"),
    "custom": ("target", "args", "inputs", "output", "files", "trusted"),
}
"""Value of ``model.name`` -> the keys that it reads beside ``classes`` and ``channels``; of those
that compare images (``RunConfig``) also ``scale``."""


MOST_BLOCKS = 1000


CHOICES = {
    "preact_resnet": "Pre-activation ResNet of depth 9n+2, stride-1 stem (He et al. 2016): model.n",
    "mpi4dl_resnet": "ResNet of MPI4DL, of depth 9n+2: n=12 is the thesis's ResNet101; model.n",
    "inception_bn": "Inception-BN (Ioffe and Szegedy 2015) with the widths of MXNet's examples",
    "amoebanet": "AmoebaNet-D (18, 208) (Real et al. 2018): model.layers, model.filters",
    "unet": "U-Net, transposed convolutions on the way up (Ronneberger 2015)",
    "edsr": "EDSR baseline, 16 blocks of 64 channels (Lim et al. 2017); model.scale=2, 3 or 4",
    "custom": "A network of your own: model.target=package.module:function, model.args.KEY=VALUE",
}
"""Choices of ``model`` without further keys, and what each is."""


@dataclass
class ModelConfig(Section, key="model", own_keys=OWN_KEYS, choices=CHOICES):
    """``model=NAME``: the network."""

    name: str = "resnet"
    """Family: ``resnet`` (2015), ``preact_resnet`` (9n+2, 2016), ``mpi4dl_resnet`` (9n+2, wider, as
    MPI4DL trains it), ``inception_bn``, ``amoebanet`` (AmoebaNet-D), ``unet`` (a class for every
    pixel), ``edsr`` (super-resolution) or ``custom``."""
    depth: int = DEPTH
    """Layers of a ``resnet``: 18, 34, 50, 101 or 152; in place of ``model.n``, also those of a
    ``preact_resnet`` or ``mpi4dl_resnet``, 9n+2: 11, 20, 29, ..., 110."""
    n: int = number(N, least=1, most=MOST_BLOCKS)
    """Blocks per group of a ``preact_resnet`` or ``mpi4dl_resnet``, whose depth is 9n+2."""
    head: str = choice("pool", ("pool", "flatten"))
    """What the classifier of an ``mpi4dl_resnet`` reads: the average of the last map (``pool``) or,
    as in the original, of each of its windows of 8x8 (``flatten``), whose number follows the
    image."""
    layers: int = number(18, least=1, most=MOST_BLOCKS)
    """Normal cells of an ``amoebanet``, a multiple of 3."""
    filters: int = number(208, least=1)
    """Filters of an ``amoebanet``, a multiple of 4: its stem has a quarter as many channels."""
    levels: int = number(4, least=1, most=16)
    """Times a ``unet`` halves the image on its way down."""
    blocks: int = number(16, least=1, most=MOST_BLOCKS)
    """Residual blocks of an ``edsr``."""
    width: int = number(64, least=1)
    """Channels of a ``unet`` at full size, and of an ``edsr``."""
    upsample: str = choice("transposed", ("transposed", "bilinear", "nearest"))
    """Way up of a ``unet``: a ``transposed`` convolution, or ``bilinear`` or ``nearest``
    interpolation before a convolution."""
    scale: int = number(2, least=1)
    """How much larger the target of ``loss=l1`` is than the image; an ``edsr`` enlarges by
    2, 3 or 4."""
    res_scale: float = number(1.0, above=True)
    """Factor by which an ``edsr`` multiplies the output of each residual block before the sum."""
    inputs: Any = field(default=None, metadata={"most": MOST_SEED})
    """``custom`` only: how the network's ``forward`` takes the images: unset, as its first
    argument; a list of its arguments or a dict of them by name, in which ``images`` stands for
    (n, C, H, W) and ``image_list`` for a list of (C, H, W); or the name of one argument."""
    output: str | None = None
    """``custom`` only: which tensor of a dict, a tuple or an object is the network's output, as
    ``logits``, ``0`` or ``aux.0``; unset: the only one."""
    classes: int | None = number(None, least=1)
    """Outputs of the classifier, or for every pixel; unset: as many as the data has (for pairs,
    the channels of the image)."""
    channels: int = number(3, least=1)
    """Channels of the input image."""
    target: str | None = None
    """``custom`` only: ``package.module:function`` that returns a torch module."""
    args: dict[str, Any] = field(default_factory=dict)
    """``custom`` only: keyword arguments of the function."""
    files: list[str] = field(default_factory=list)
    """``custom`` only: files that the network reads (a JSON of widths, weights): their contents are
    part of the run, like its source."""
    trusted: bool = False
    """``custom`` only: accepts an ``autograd.Function``, a hook on gradients, random numbers of
    Python and a state between calls, which a graph does not hold; ``hires verify`` compares a
    step."""

    def _check_more(self, check: Checks) -> None:
        if self.name == "custom" and (not self.target or self.target.count(":") != 1):
            raise ConfigError(
                f"model=custom needs model.target=package.module:function, not {self.target!r}"
            )
        if isinstance(self.inputs, (list, dict)) and not _names_images(self.inputs):
            raise ConfigError(
                f"model.inputs={self.inputs!r} has no images; write images where the network takes "
                f"them, as model.inputs=[[images]] or model.inputs.pixel_values=images"
            )


def _names_images(inputs: Any) -> bool:
    if isinstance(inputs, (list, dict)):
        return any(map(_names_images, inputs.values() if isinstance(inputs, dict) else inputs))
    return inputs in IMAGES
