"""Declares the keys of a run's config, with every default.

The files under ``conf/`` hold differences only. Values are checked as their fields declare;
the plan checks what only makes sense together (does the batch divide?). The worker reads a frozen
``config.yaml`` with :func:`from_dict` and needs neither hydra nor omegaconf.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.value_checks import SIZE, Checks, Section, build, choice, number, real
from hires.core.errors import ConfigError
from hires.core.losses import LOSSES, choices_for

PRECISIONS = ("fp32", "bf16", "fp64")
UPSAMPLES = ("transposed", "bilinear", "nearest")
FITS = ("resize", "crop", "error")


@dataclass
class ModelConfig(Section, key="model"):
    """``model=NAME``: the network."""

    name: str = "resnet"
    """Family: ``resnet`` (post-activation, 2015), ``preact_resnet`` (9n+2, 2016), ``amoebanet``
    (AmoebaNet-D), ``unet`` (a class for every pixel), ``edsr`` (super-resolution) or ``custom``."""
    depth: int = 50
    """Layers of a ``resnet``: 18, 34, 50, 101 or 152."""
    n: int = number(12, least=1)
    """Blocks per group of a ``preact_resnet``, whose depth is 9n+2."""
    layers: int = number(18, least=1)
    """Normal cells of an ``amoebanet``, a multiple of 3."""
    filters: int = number(208, least=1)
    """Filters of an ``amoebanet``, a multiple of 4: its stem has a quarter as many channels."""
    levels: int = number(4, least=1)
    """Times a ``unet`` halves the image on its way down."""
    blocks: int = number(16, least=1)
    """Residual blocks of an ``edsr``."""
    width: int = number(64, least=1)
    """Channels of a ``unet`` at full size, and of an ``edsr``."""
    upsample: str = choice("transposed", UPSAMPLES)
    """Way up of a ``unet``: ``transposed`` (a transposed convolution), ``bilinear`` or ``nearest``
    (interpolation, then a convolution)."""
    scale: int = number(2, least=1)
    """Times larger an ``edsr`` makes the image: 2, 3 or 4. With ``task.loss=l1`` it is also how
    much smaller than its target the image of any other network is made; 1 leaves it as it is."""
    res_scale: float = real(1.0, above_zero=True)
    """Factor by which an ``edsr`` multiplies the output of each residual block before the sum."""
    classes: int | None = number(None, least=1)
    """Outputs of the classifier, or of a ``unet`` for every pixel; unset: as many as the data has
    (pairs have the channels of their images)."""
    channels: int = number(3, least=1)
    """Channels of the input image."""
    target: str | None = None
    """``custom`` only: ``package.module:function`` that returns a torch module."""
    args: dict[str, Any] = field(default_factory=dict)
    """``custom`` only: keyword arguments of the function."""

    def check_more(self, check: Checks) -> None:
        """Checks that a network of one's own is named."""
        if self.name == "custom" and (not self.target or self.target.count(":") != 1):
            raise ConfigError(
                f"model=custom needs model.target=package.module:function, not {self.target!r}"
            )


@dataclass
class DataConfig(Section, key="data"):
    """``data=NAME``: where the images come from."""

    name: str = "synthetic"
    """``synthetic`` (made in memory from the seed), ``folder`` (one sub-folder per class) or
    ``pairs`` (a folder of images that are made smaller: input and target of super-resolution)."""
    path: str | None = None
    """``folder``: the folder whose sub-folders are the classes. ``pairs``: the folder below which
    all images are."""
    classes: int = number(10, least=1)
    """``synthetic`` only: number of classes."""
    length: int = number(1024, least=1)
    """``synthetic`` only: number of images."""
    fit: str = choice("resize", FITS)
    """What happens to an image of another size than ``image``: ``resize`` (bilinear), ``crop`` (or
    pad with zeros) about its centre, or ``error``."""
    shuffle: bool = True
    """Whether the order is drawn anew for every epoch, from the seed."""
    prefetch: int = number(2)
    """Microbatches that are read ahead."""


@dataclass
class MemoryConfig(Section, key="memory"):
    """``memory.*``: what is kept, and how much may be used."""

    limit: Any = field(default=None, metadata=SIZE)
    """Most that a rank may need, in bytes or as text such as 4GiB or 800MB; unset: all ranks of the
    local launcher together may need what the machine has."""
    checkpoint: str = choice("none", ("none", "stage", "block"))
    """What is computed again in the backward pass instead of kept: ``none``, ``stage`` (all of a
    stage) or ``block`` (each block of it). It writes no files: saving a run is ``checkpoint.*``."""


@dataclass
class CheckpointConfig(Section, key="checkpoint"):
    """``checkpoint.*``: when a run is saved to files, and where it goes on.

    ``memory.checkpoint`` is something else: what the backward pass computes again.
    """

    every: int = number(0)
    """Steps from one saved checkpoint to the next; 0: only when SIGUSR2 requests one. What the
    backward pass computes again is ``memory.checkpoint``."""
    keep: int = number(2, least=1)
    """Checkpoints of the run that are kept, the latest ones."""
    resume: str = "auto"
    """Where an attempt begins: ``auto`` (at the run's latest checkpoint, if there is one),
    ``never`` (at step 0), or the path of a run folder or checkpoint, perhaps of another layout,
    that stands in as long as the run has no checkpoint of its own."""

    def check_more(self, check: Checks) -> None:
        """Checks that ``resume`` may be a path."""
        if not self.resume or "\0" in self.resume:
            raise ConfigError(
                f"checkpoint.resume={self.resume!r} must be auto, never or the path of a run "
                f"folder or checkpoint"
            )

    @property
    def source(self) -> str | None:
        """The path that ``resume`` names; None if it names none."""
        return None if self.resume in ("auto", "never") else self.resume


@dataclass
class PrecisionConfig(Section, key="precision"):
    """``precision=NAME``: the arithmetic."""

    name: str = choice("fp32", PRECISIONS)
    """``fp32``, ``bf16`` (autocast in training, cast in inference) or ``fp64``."""


@dataclass
class CommConfig(Section, key="comm"):
    """``comm=NAME``: how ranks communicate."""

    backend: str = choice("gloo", ("gloo",))
    """Transport of every message: ``gloo``."""
    timeout_s: float = real(120.0, above_zero=True, unit=" seconds")
    """Seconds that a rank may wait for another one, or neither move nor compute, before the run is
    stopped; ``hang.txt`` of the attempt has the cause."""
    shared_memory: bool = True
    """Whether ranks on one machine exchange small messages through memory that they share, and sum
    gradients by reading each other's."""


@dataclass
class TaskConfig(Section, key="task"):
    """``task=NAME``: training or inference."""

    name: str = choice("train", ("train", "infer"))
    """``train`` (forward, backward, optimiser step) or ``infer`` (forward only)."""
    lr: float = real(0.005)
    """Learning rate of stochastic gradient descent."""
    momentum: float = real(0.9)
    """Momentum of stochastic gradient descent."""
    weight_decay: float = real(1e-4)
    """L2 penalty of stochastic gradient descent, on every parameter."""
    loss: str = choice("auto", ("auto", *LOSSES))
    """``cross_entropy`` (classes), ``l1`` (images of ``model.scale`` times the size of the input)
    or ``auto``: ``l1`` for ``model=edsr`` and ``data=pairs``, ``cross_entropy`` for all else."""


@dataclass
class MeasureConfig(Section, key="measure"):
    """``measure.*``: which steps count."""

    warmup: int = number(2)
    """Steps at the start that no table counts."""
    steps: int | None = number(None, least=1)
    """Steps after the warm-up that are counted; unset: all of them."""


@dataclass
class RunConfig(Section):
    """Everything that decides one run. The key names are the public interface."""

    image: Any = 224
    """Size of the images that enter the network in pixels: n, or [height, width]."""
    batch: int = number(8, least=1)
    """Images per step, of the whole world."""
    steps: int = number(12, least=1)
    """Steps of the run, warm-up included."""
    seed: int = number(0)
    """Seed of the weights, the synthetic data and the order of images."""
    campaign: str = "default"
    """Name that groups runs: one folder under ``results``."""
    results: str = "results"
    """Folder for all run folders."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def check_more(self, check: Checks) -> None:
        """Checks the size of the image, the campaign, and keys that decide something together."""
        self.image = check(_image_size, self.image) or [1, 1]
        name = self.campaign
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            check.problems.append(
                f"campaign={name!r} names a folder under results/: use a plain name without '/' "
                f"that does not begin with '.'"
            )
        counted = self.measure.warmup + (self.measure.steps or 1)
        if self.steps < counted:
            check.problems.append(
                f"steps={self.steps} leaves too little after measure.warmup={self.measure.warmup} "
                f"for {self.measure.steps or 1} measured steps; use steps={counted} or more"
            )
        if self.data.name == "pairs" and LOSSES[self.loss].targets == "classes":
            check.problems.append(
                f"task.loss={self.loss} needs classes, which data=pairs does not have; use "
                f"{choices_for('images')} or data=folder"
            )

    @property
    def mpi(self) -> str:
        """Program that starts all ranks at once: ``openmpi``, ..., or ``srun``."""
        usual = "openmpi" if self.launcher.name == "mpirun" else "srun"
        return self.launcher.mpi or self.cluster.mpi or usual

    @property
    def srun_mpi(self) -> str:
        """TYPE of ``srun --mpi=TYPE``."""
        return self.launcher.srun_mpi or self.cluster.srun_mpi or "none"

    @property
    def partition(self) -> str | None:
        """Partition of its jobs; None: the default one of Slurm."""
        return self.launcher.partition or self.cluster.partition

    @property
    def interface(self) -> str | None:
        """Network interface between the nodes; None: it is detected."""
        return self.launcher.interface or self.cluster.interface

    @property
    def loss(self) -> str:
        """What training minimises: ``task.loss``, or what ``auto`` means here."""
        if self.task.loss != "auto":
            return self.task.loss
        makes_images = self.model.name == "edsr" or self.data.name == "pairs"
        return "l1" if makes_images else "cross_entropy"

    @property
    def target_size(self) -> tuple[int, int] | None:
        """(height, width) of the target image of every pair; None where targets are classes."""
        if LOSSES[self.loss].targets == "classes":
            return None
        return self.model.scale * self.height, self.model.scale * self.width

    @property
    def target_rect(self) -> tuple[int, int, int, int] | None:
        """All rows and columns of the target image, as (0, height, 0, width); None likewise."""
        size = self.target_size
        return (0, size[0], 0, size[1]) if size else None

    @property
    def height(self) -> int:
        """Rows of the image in pixels."""
        return int(self.image[0])

    @property
    def width(self) -> int:
        """Columns of the image in pixels."""
        return int(self.image[1])


def from_dict(values: dict[str, Any]) -> RunConfig:
    """Returns the config that plain values describe; raises ConfigError with all that is wrong."""
    return build(RunConfig, values, "")


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Returns the config as plain values: dicts, lists, strings and numbers."""
    return dataclasses.asdict(config)


def _image_size(image: Any) -> list[int]:
    """Returns [height, width] of ``image``, which is n or [height, width]."""
    size = [image, image] if isinstance(image, int) else image
    good = isinstance(size, (list, tuple)) and len(size) == 2
    if not good or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in size):
        raise ConfigError(
            f"image={image!r} must be a whole number of pixels or [height,width], as image=512 "
            f"or image=[480,640]"
        )
    return list(size)
