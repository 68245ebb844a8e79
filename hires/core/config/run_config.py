"""Declares the keys of a run's config, with every default; ``conf/`` holds differences only.

Each value is checked as its field declares; the plan checks what only makes sense together.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hires.core.augmentations import AUGMENTATIONS
from hires.core.codecs import CODECS
from hires.core.config import comm_config
from hires.core.config.comm_config import CommConfig
from hires.core.config.data_config import (
    TARGETS,
    AugmentConfig,
    DataConfig,
    PredictConfig,
    ValidateConfig,
)
from hires.core.config.fields import (
    MOST_SEED,
    MOST_STEPS,
    Section,
    build,
    changed_keys,
    check_name,
    keys_of,
    section,
    value,
)
from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.model_config import ModelConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import HALF, INT8, PRECISIONS, PrecisionConfig, QuantConfig
from hires.core.config.training_config import (
    INFERENCE,
    LOSS_NAMES,
    ONE_PASS,
    CheckpointConfig,
    EngineConfig,
    LossConfig,
    LrScheduleConfig,
    MeasureConfig,
    MemoryConfig,
    OptimizerConfig,
    TaskConfig,
)
from hires.core.losses import CLASSES, IMAGES, LABELS, LOSSES, NUMBERS
from hires.core.ranks.machine import TENSORRT

_OF_IMAGES = [name for name in LOSSES if LOSSES[name].targets == IMAGES]
_WHAT = {LABELS: "any number of classes", NUMBERS: "numbers"}
DEVICE_KINDS = ["auto", "cpu", "cuda"]
"""Choices of ``device``; a kind that :mod:`hires.engine.device` gets from elsewhere is added."""


@dataclass
class RunConfig(Section):
    """Everything that decides one run. The key names are the public interface."""

    image: Any = 224
    """Size of the images that enter the network in pixels: n, or [height, width]."""
    batch: int = value(8, 1)
    """Images per step, of the whole world."""
    ranks: int | None = value(None, 1)
    """Ranks of the layout that ``parallel=auto`` or ``hires plan --choose`` chooses; unset: one for
    each GPU, or for each core that ``launcher.threads`` leave. A layout that is given has as many
    as its keys say."""
    steps: int = value(12, 1, MOST_STEPS, plan=False)
    """Steps of the run, warm-up included."""
    epochs: float | None = value(None, above=0, high=MOST_STEPS)
    """Passes over the images of the data, in place of ``steps``, which follow from it: rounded up,
    so that each image was taken. Each pass has an order of its own, from ``seed``."""
    device: str = value("auto", choices=DEVICE_KINDS)
    """What ranks compute on: ``cpu``, ``cuda`` (NVIDIA GPUs) or ``auto``: ``cuda`` where
    ``cluster.gpus`` or the job's options name GPUs, or this machine shows some to a torch that is
    built for them; else ``cpu``."""
    seed: int = value(0, 0, MOST_SEED)
    """Seed of the weights, the synthetic data and the order of images."""
    weights: str | None = value(line=True, path=(), identity=False, plan=False)
    """What the network begins with in place of first weights from the seed: a run folder (its
    latest checkpoint), a checkpoint, either with /ema behind it (``optimizer.ema``), or a file
    .safetensors, .pt or .pth of a plain state dict."""
    campaign: str = value("default", check=check_name, identity=False, plan=False)
    """Name that groups runs: one folder under ``results``."""
    results: str = value("results", identity=False, plan=False)
    """Folder for all run folders."""
    model: ModelConfig = section(ModelConfig)
    data: DataConfig = section(DataConfig)
    augment: AugmentConfig = section(AugmentConfig, plan=False, tasks=("train",))
    parallel: ParallelConfig = section(ParallelConfig)
    precision: PrecisionConfig = section(PrecisionConfig)
    engine: EngineConfig = section(EngineConfig)
    quant: QuantConfig = section(QuantConfig)
    comm: CommConfig = section(CommConfig)
    task: TaskConfig = section(TaskConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig, tasks=("train",))
    lr_schedule: LrScheduleConfig = section(LrScheduleConfig, plan=False, tasks=("train",))
    loss: LossConfig = section(LossConfig)
    validate: ValidateConfig = section(ValidateConfig)
    predict: PredictConfig = section(PredictConfig, plan=False)
    launcher: LauncherConfig = section(LauncherConfig)
    cluster: ClusterConfig = section(ClusterConfig)
    measure: MeasureConfig = section(MeasureConfig, plan=False)
    memory: MemoryConfig = section(MemoryConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig, plan=False)

    def _problems(self) -> Iterator[str]:
        yield from self._wrong_image()
        yield from self._wrong_length()
        yield from self._wrong_precision()
        yield from self._wrong_validation()
        yield from self._wrong_data()
        if self.weights and self.checkpoint.source:
            key = "continues" if self.checkpoint.continues else "resume"
            yield (
                f"weights={self.weights} and checkpoint.{key}={self.checkpoint.source} both name "
                f"what the network begins with; leave one of them out"
            )
        if self.task.name != "predict":
            for key, item in changed_keys(self.predict):
                yield f"predict.{key}={item} is for task=predict, not task={self.task.name}"
        if self.cluster.container and self.cluster.container_by == "pyxis" and self.mpi != "srun":
            yield "cluster.container_by=pyxis is a plug-in of srun: use launcher.mpi=srun"

    def _wrong_image(self) -> Iterator[str]:
        size = self.image
        self.image = [size, size] if isinstance(size, int) else size
        good = isinstance(self.image, (list, tuple)) and len(self.image) == 2
        if not good or any(type(n) is not int or n < 1 for n in self.image):
            self.image = [1, 1]
            yield f"image={size!r} must be a whole number of pixels or [height,width], as [480,640]"
        self.image = list(self.image)

    def _wrong_length(self) -> Iterator[str]:
        least = self.measure.steps or 1
        if self.measure.warmup == MeasureConfig.warmup:  # of a few steps fewer warm up
            warmup = min(self.measure.warmup, max(0, self.steps - least))
            self.measure = dataclasses.replace(self.measure, warmup=warmup)
        warmup, schedule, task = self.measure.warmup, self.lr_schedule, self.task.name
        counted = warmup + least
        if self.epochs is not None and self.steps != type(self).steps:
            yield f"epochs={self.epochs:g} and steps={self.steps} both set the length: leave one"
        if self.epochs is not None and task in ONE_PASS:
            yield f"epochs={self.epochs:g}: task={task} takes each image once; leave it out"
        if self.epochs is None and 0 < self.steps < counted:
            why = f"leaves too little after measure.warmup={warmup} for {least} measured steps"
            yield f"steps={self.steps} {why}; use steps={counted} or more"
        # The planner checks a number of steps that follows from epochs.
        length = schedule.steps or (self.steps if self.epochs is None else None)
        if task == "train" and length and 0 < length <= schedule.warmup:
            key = "lr_schedule.steps" if schedule.steps else "steps"
            yield (
                f"lr_schedule.warmup={schedule.warmup} leaves no step of {key}={length}; use a "
                f"shorter warm-up, or {key}={schedule.warmup + 1} or more"
            )

    def _wrong_precision(self) -> Iterator[str]:
        compiled, task = f"engine.compile={self.engine.compile}", self.task.name
        name, weights = self.precision.name, self.precision.weights
        inference = f"task={', '.join(INFERENCE)}"
        if task == "train" and name == INT8:
            yield f"precision={INT8} is for {inference}: task=train learns real numbers"
        if name == INT8 and self.engine.compile != "off":
            yield f"{compiled} is for real numbers, not precision={INT8}; use engine.compile=off"
        codecs = [one for one in sorted({*self.comm.codecs.values()}) if CODECS[one].unit != 0]
        if name == INT8 and codecs:
            why = f"changes numbers, and with precision={INT8} all layouts compute the same bits"
            yield f"comm.codec={', '.join(codecs)} {why}; use comm.codec=none"
        for codec in codecs if self.scales_loss else ():
            if CODECS[codec].leaves:
                why = f"keeps a part of gradients, and precision={name} scales each step's anew"
                yield f"comm.codec={codec} {why}; use precision=bf16"
        if task == "train" and weights in HALF:
            yield f"precision.weights={weights}: training keeps its weights in fp32; leave it out"
        if self.engine.compile != TENSORRT:
            return
        if task not in INFERENCE:
            yield f"{compiled} is for inference; use {inference}, or engine.compile=off"
        if name == "fp64":
            yield f"{compiled} computes in fp32 at most; use precision=fp32 or lower"
        elif task != "train" and self.autocast_type is not None:
            yield (
                f"{compiled} computes each layer in the type of its weights, and "
                f"precision.weights={weights} leaves them in fp32; leave it out"
            )

    def _wrong_validation(self) -> Iterator[str]:
        key, optimizer = f"validate.every={self.validate.every}", self.optimizer
        if self.validate.every is None:
            return
        if self.task.name != "train":
            yield f"{key} is for task=train, not task={self.task.name}; leave it out"
        if self.validate.weights == "ema" and (optimizer.ema is None or optimizer.shard):
            remedy = "optimizer.ema=0.999 and optimizer.shard=false, or validate.weights=trained"
            yield f"validate.weights=ema needs running means that ranks hold in full; use {remedy}"
        if self.data.split == "validation":
            why = "evaluates on data.split=validation, which this training would learn from"
            yield f"{key} {why}; use data.split=train"

    def _wrong_data(self) -> Iterator[str]:
        data, loss, scale = self.data, self.loss.name, self.model.scale
        if data.name == "pairs" and (data.normalize != "white" or data.mean is not None):
            yield "data=pairs compares images as they are; leave data.normalize and data.mean out"
        if data.mean is not None and len(data.mean) != self.model.channels:
            counts = f"{len(data.mean)} numbers, and model.channels={self.model.channels}"
            yield f"data.mean={data.mean} are {counts}; give one for each channel"
        # That a crop is larger than its image is found where files are opened.
        if data.name == "masks" and self.augments and data.ignore is None:
            for key, amount in changed_keys(self.augment):
                if AUGMENTATIONS[key].fills:
                    yield (
                        f"augment.{key}={amount} brings in pixels without a label; name their "
                        f"value, data.ignore=255"
                    )
        if loss not in LOSS_NAMES:
            return
        if data.name == "masks" and loss in _OF_IMAGES:
            yield f"loss={loss} compares images; data=masks has classes: use loss=auto"
        kind = TARGETS[data.targets]
        if self.loss.targets != CLASSES and (kind or self.loss.targets in (LABELS, NUMBERS)):
            yield f"loss.targets={self.loss.targets} follows from data.targets here; leave it out"
        if kind and self.loss.ignore_index is not None:
            yield "loss.ignore_index is of a class an image; leave it out"
        if kind and self.objective.compares != kind:
            fitting = " or ".join(f"loss={name}" for name in LOSSES if LOSSES[name].also == kind)
            yield (
                f"loss={loss} compares {LOSSES[loss].targets}, and data.targets={data.targets} "
                f"gives each image {_WHAT[kind]}; use {fitting}, or leave loss out"
            )
        if self.objective.compares != IMAGES:
            losses = " or ".join(f"loss={name}" for name in _OF_IMAGES)
            if scale != ModelConfig.scale and self.model.name != "edsr":
                yield f"model.scale={scale} is for model=edsr, and for {losses}; leave it out"
            if data.name == "pairs":
                yield f"loss={self.objective.name} needs classes: use {losses} or data=folder"

    @property
    def mpi(self) -> str:
        """Program that starts all ranks at once: ``openmpi``, ..., or ``srun``."""
        usual = "openmpi" if self.launcher.name == "mpirun" else "srun"
        return self.launcher.mpi or self.cluster.mpi or usual

    @property
    def is_here(self) -> bool:
        """Whether all ranks run on this machine."""
        launcher = self.launcher
        alone = launcher.name == "mpirun" and not launcher.hosts and self.mpi != "srun"
        return launcher.name in ("local", "torchrun") or alone

    @property
    def num_nodes(self) -> int:
        """Machines over which the ranks are spread."""
        return 1 if self.is_here else len(self.launcher.hosts) or self.launcher.nodes

    @property
    def offered_ranks(self) -> int:
        """Most ranks that the launcher offers; what a cluster has is for Slurm to say."""
        return self.launcher.max_ranks if self.is_here else sys.maxsize

    @property
    def libraries(self) -> tuple[str, ...]:
        """Libraries with options that carry messages, as ``openmpi`` and ``nccl``."""
        return comm_config.libraries((self.comm.backend, *self.comm.backends), self.mpi)

    @property
    def library_variables(self) -> dict[str, str]:
        """Variables of every rank that ``comm.options`` sets."""
        return comm_config.variables(self.comm.options, self.libraries)

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
    def image_type(self) -> str:
        """Type of images and parameters; under autocast they stay ``float32``."""
        precision = self.precision
        autocast = self.task.name == "train" or precision.weights == "fp32"
        return PRECISIONS["fp32" if precision.name in HALF and autocast else precision.name]

    @property
    def autocast_type(self) -> str | None:
        """Type to which autocast lowers matrix products; None: there is no autocast."""
        low = PRECISIONS[self.precision.name]
        return None if low == self.image_type else low

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, and a step skipped whose gradients are not finite."""
        return self.autocast_type == PRECISIONS["fp16"] and self.task.name == "train"

    @property
    def objective(self) -> LossConfig:
        """What training minimises: ``loss``, with the name that ``auto`` means here."""
        if self.data.name == "masks" and self.loss.ignore_index is None:
            name = "cross_entropy" if self.loss.name == "auto" else self.loss.name
            ignored = self.data.ignore if "ignore_index" in keys_of(LossConfig, name) else None
            return dataclasses.replace(self.loss, name=name, ignore_index=ignored)
        if kind := TARGETS[self.data.targets]:
            usual = {LABELS: "bce", NUMBERS: "l2"}[kind]
            name = usual if self.loss.name == "auto" else self.loss.name
            if name == "custom" or LOSSES[name].also == kind:
                return dataclasses.replace(self.loss, name=name, targets=kind)
        if self.loss.name != "auto":
            return self.loss
        makes_images = self.model.name == "edsr" or self.data.name == "pairs"
        return dataclasses.replace(self.loss, name="l1" if makes_images else "cross_entropy")

    @property
    def augments(self) -> bool:
        """Whether images are changed at random."""
        moves = self.augment.is_on or self.data.fit == "random_crop"
        return self.task.name == "train" and moves

    @property
    def validates(self) -> bool:
        """Whether the training has evaluations in between."""
        return self.task.name == "train" and self.validate.every is not None

    @property
    def shuffles(self) -> bool:
        """Whether images come in another order each epoch; one pass takes them in order."""
        return self.data.shuffle and self.task.name not in ONE_PASS

    @property
    def balances(self) -> bool:
        """Whether every class comes equally often."""
        return self.data.balance and self.task.name == "train"

    @property
    def target_size(self) -> tuple[int, int] | None:
        """(height, width) of the target image of every pair; None where targets are classes."""
        if self.objective.compares != IMAGES:
            return None
        return self.model.scale * self.height, self.model.scale * self.width

    @property
    def has_pairs(self) -> bool:
        """Whether images are targets, and inputs smaller copies of them.

        A prediction makes copies of ``data=pairs`` alone: others are to be made larger.
        """
        predicts = self.task.name == "predict" and self.data.name != "pairs"
        return self.target_size is not None and not predicts

    @property
    def fitted_size(self) -> tuple[int, int]:
        """(height, width) that images of files are given: that of the target of pairs."""
        size = self.target_size if self.has_pairs else None
        return size or (self.height, self.width)

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
    return build(RunConfig, values)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Returns the config as plain values: dicts, lists, strings and numbers."""
    return dataclasses.asdict(config)
