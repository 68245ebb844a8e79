"""Declares the keys of a run's config, with every default; ``conf/`` holds differences only.

Each value is checked as its field declares; the plan checks what only makes sense together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hires.core.config import library_options
from hires.core.config.augment_config import AugmentConfig
from hires.core.config.checkpoint_config import CheckpointConfig
from hires.core.config.comm_config import CommConfig
from hires.core.config.data_config import DataConfig
from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.loss_config import LossConfig
from hires.core.config.lr_schedule_config import LrScheduleConfig
from hires.core.config.model_config import ModelConfig
from hires.core.config.optimizer_config import OptimizerConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import PrecisionConfig
from hires.core.config.predict_config import PredictConfig
from hires.core.config.quant_config import QuantConfig
from hires.core.config.task_config import INFERENCE, ONE_PASS, TaskConfig
from hires.core.config.validate_config import ValidateConfig
from hires.core.config.value_checks import (
    COSMETIC,
    MOST_SEED,
    MOST_STEPS,
    SIZE,
    Checks,
    Section,
    build,
    changed_names,
    check_name,
    choice,
    cosmetic,
    number,
    word,
)
from hires.core.errors import ConfigError
from hires.core.losses import IMAGES, LOSSES
from hires.core.precisions import HALF, INT8, PRECISIONS
from hires.core.ranks.compilers import TENSORRT


@dataclass
class MemoryConfig(Section, key="memory"):
    """``memory.*``: what is kept, and how much may be used."""

    limit: Any = field(default=None, metadata={**SIZE, **COSMETIC})
    """Most that a rank may need, with its unit, as 4GiB or 800MB; unset: all ranks of the local
    launcher together may need what the machine has."""
    checkpoint: str = choice("none", ("none", "stage", "block"))
    """What the backward pass computes again instead of keeping it: ``none``, all of a ``stage``, or
    each ``block`` of it. It writes no files: saving a run is ``checkpoint.*``."""


DEVICE_KINDS = ["auto", "cpu", "cuda"]
"""Choices of ``device``; a kind that :mod:`hires.engine.device` gets from elsewhere is added."""


@dataclass
class EngineConfig(Section, key="engine"):
    """``engine.*``: how a rank computes."""

    compile: str = choice("off", ("off", "stage", TENSORRT))
    """What is compiled before the first step. ``stage``: torch compiles the parts of each stage
    that exchange no messages (with one rank, all of the network), with a C++ compiler, on GPUs with
    Triton. ``tensorrt``: Torch-TensorRT compiles the same parts, for inference on NVIDIA GPUs
    without tiles. ``off``: nothing; so it is with ``precision=int8``."""
    fuse: str = choice("auto", ("auto", "off"))
    """Whether inference runs a network of fewer operators that computes the same (``auto``): norms
    become part of the convolutions before them, for example; or the network as it is (``off``).
    Training always has the latter."""


@dataclass
class MeasureConfig(Section, key="measure"):
    """``measure.*``: which steps count."""

    warmup: int = number(2, most=MOST_STEPS)
    """Steps at the start that no table counts."""
    steps: int | None = number(None, least=1, most=MOST_STEPS)
    """Steps after the warm-up that are counted; unset: all of them."""
    tensorboard: bool = cosmetic(False)
    """Whether a training writes its numbers for TensorBoard as it goes, into ``tensorboard`` of its
    run folder: loss, rate, norm of the gradients, images per second, evaluations."""


@dataclass
class RunConfig(Section):
    """Everything that decides one run. The key names are the public interface."""

    image: Any = 224
    """Size of the images that enter the network in pixels: n, or [height, width]."""
    batch: int = number(8, least=1)
    """Images per step, of the whole world."""
    ranks: int | None = number(None, least=1)
    """Ranks of the layout that ``parallel=auto`` or ``hires plan --choose`` chooses; unset: one for
    each GPU, or for each core that ``launcher.threads`` leave. A layout that is given has as many
    as its keys say."""
    steps: int = number(12, least=1, most=MOST_STEPS)
    """Steps of the run, warm-up included."""
    epochs: float | None = number(None, above=True, most=MOST_STEPS)
    """Passes over the images of the data, in place of ``steps``, which follow from it: rounded up,
    so that each image was taken. Each pass has an order of its own, from ``seed``."""
    device: str = choice("auto", DEVICE_KINDS)
    """What ranks compute on: ``cpu``, ``cuda`` (NVIDIA GPUs) or ``auto``: ``cuda`` where
    ``cluster.gpus`` or the job's options name GPUs, or this machine shows some to a torch that is
    built for them; else ``cpu``."""
    seed: int = number(0, most=MOST_SEED)
    """Seed of the weights, the synthetic data and the order of images."""
    weights: str | None = cosmetic(word())
    """What the network begins with in place of first weights from the seed: a run folder (its
    latest checkpoint), a checkpoint, either with /ema behind it (``optimizer.ema``), or a file
    .safetensors, .pt or .pth of a plain state dict."""
    campaign: str = cosmetic("default")
    """Name that groups runs: one folder under ``results``."""
    results: str = cosmetic("results")
    """Folder for all run folders."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def _check_more(self, check: Checks) -> None:
        self.image = check(_image_size, self.image) or [1, 1]
        check(check_name, "campaign", self.campaign)
        counted = self.measure.warmup + (self.measure.steps or 1)
        if self.epochs is not None:
            check.problems += self._unfit_for_epochs(self.epochs)
        elif 0 < self.steps < counted:  # fewer are refused already
            check.problems.append(
                f"steps={self.steps} leaves too little after measure.warmup={self.measure.warmup} "
                f"for {self.measure.steps or 1} measured steps; use steps={counted} or more"
            )
        key, length = "steps", self.steps
        if self.lr_schedule.steps is not None:
            key, length = "lr_schedule.steps", self.lr_schedule.steps
        known = self.epochs is None or key != "steps"  # else it is checked once they are
        if self.task.name == "train" and known and 0 < length <= self.lr_schedule.warmup:
            check.problems.append(
                f"lr_schedule.warmup={self.lr_schedule.warmup} leaves no step of {key}={length} to "
                f"lr_schedule={self.lr_schedule.name}; use a shorter warm-up, or {key}="
                f"{self.lr_schedule.warmup + 1} or more"
            )
        if self.task.name == "train" and self.precision.name == INT8:
            check.problems.append(
                f"precision={INT8} is for inference, and task=train learns real numbers; train in "
                f"precision=fp32 or bf16, then use task=infer with precision={INT8}"
            )
        if self.precision.name == INT8 and self.engine.compile != "off":
            check.problems.append(
                f"engine.compile={self.engine.compile} is for real numbers: precision={INT8} calls "
                "kernels that are compiled already and have rescaling, sum and ReLU in them; use "
                "engine.compile=off"
            )
        if self.engine.compile == TENSORRT:
            check.problems += self._unfit_for_engines()
        if self.task.name == "train" and self.precision.weights in HALF:
            check.problems.append(
                f"precision.weights={self.precision.weights} is for task={', '.join(INFERENCE)}: "
                f"training keeps its weights in fp32; leave it out"
            )
        if self.predict != PredictConfig() and self.task.name != "predict":
            check.problems.append(
                f"{', '.join(f'{k}={v}' for k, v in changed_names(self.predict))} is for "
                f"task=predict, not task={self.task.name}; leave it out, or use task=predict"
            )
        if self.validate.every is not None:
            check.problems += self._unfit_for_validation()
        if self.weights and self.checkpoint.source:
            key = "continues" if self.checkpoint.continues else "resume"
            check.problems.append(
                f"weights={self.weights} and checkpoint.{key}={self.checkpoint.source} both name "
                f"what the network begins with; leave one of them out"
            )
        check.problems += self._unfit_for_data()
        check.problems += self._unfit_for_masks() if self.data.name == "masks" else ()
        images = [f"loss={name}" for name, one in LOSSES.items() if one.targets == IMAGES]
        objective = check(lambda: self.objective)
        scaled = self.model.scale != ModelConfig.scale and self.model.name != "edsr"
        if scaled and objective and objective.compares != IMAGES:
            check.problems.append(
                f"model.scale={self.model.scale} is for model=edsr, and for {' or '.join(images)}; "
                f"leave it out"
            )
        if self.data.name == "pairs" and objective and objective.compares != IMAGES:
            check.problems.append(
                f"loss={objective.name} needs classes, which data=pairs does not have; use "
                f"{' or '.join(images)} or data=folder"
            )

    def _unfit_for_data(self) -> Iterator[str]:
        data = self.data
        if data.name == "pairs" and (data.normalize != "white" or data.mean is not None):
            yield "data=pairs compares images as they are; leave data.normalize and data.mean out"
        if data.mean is not None and len(data.mean) != self.model.channels:
            yield (
                f"data.mean={data.mean} are {len(data.mean)} numbers, and model.channels="
                f"{self.model.channels}; give one for each channel"
            )

    def _unfit_for_masks(self) -> Iterator[str]:
        # That a crop is larger than its image is found where files are opened.
        if self.augments and self.augment.shift and self.data.ignore is None:
            yield (
                f"augment.shift={self.augment.shift} brings in pixels without a label; name their "
                f"value, data.ignore=255"
            )
        if self.loss.name not in ("auto", "custom") and LOSSES[self.loss.name].targets == IMAGES:
            yield f"loss={self.loss.name} compares images; data=masks has classes: use loss=auto"

    def _unfit_for_validation(self) -> Iterator[str]:
        key = f"validate.every={self.validate.every}"
        if self.task.name != "train":
            yield f"{key} is for task=train, not task={self.task.name}; leave it out"
        if self.validate.weights == "ema" and (self.optimizer.ema is None or self.optimizer.shard):
            yield (
                "validate.weights=ema evaluates the running means that every rank holds in full; "
                "use optimizer.ema=0.999 and optimizer.shard=false, or validate.weights=trained"
            )
        if self.data.split == "validation":
            yield (
                f"{key} evaluates on data.split=validation, which this training would learn from; "
                f"use data.split=train, or leave it out"
            )

    def _unfit_for_epochs(self, epochs: float) -> Iterator[str]:
        if self.steps != type(self).steps:
            yield f"epochs={epochs:g} and steps={self.steps} both set the length; leave one out"
        if self.task.name in ONE_PASS:
            yield f"epochs={epochs:g}: task={self.task.name} takes each image once; leave it out"

    def _unfit_for_engines(self) -> Iterator[str]:
        key = f"engine.compile={TENSORRT}"
        if self.task.name not in INFERENCE:
            yield (
                f"{key} is for inference: an engine has no gradients and shows no values inside, "
                f"which task={self.task.name} needs; use task={', '.join(INFERENCE)}, or "
                f"engine.compile=off"
            )
        if self.precision.name == "fp64":
            yield (
                f"{key} has no precision=fp64: TensorRT computes in fp32 at most; use "
                f"precision=fp32 or lower, or engine.compile=off"
            )
        elif self.task.name != "train" and self.autocast_type is not None:
            yield (
                f"{key} computes each layer in the type of its weights, and precision.weights="
                f"{self.precision.weights} leaves them in fp32; leave it out"
            )

    @property
    def mpi(self) -> str:
        """Program that starts all ranks at once: ``openmpi``, ..., or ``srun``."""
        usual = "openmpi" if self.launcher.name == "mpirun" else "srun"
        return self.launcher.mpi or self.cluster.mpi or usual

    @property
    def libraries(self) -> tuple[str, ...]:
        """Libraries with options that carry messages, as ``openmpi`` and ``nccl``."""
        return library_options.libraries((self.comm.backend, *self.comm.backends), self.mpi)

    @property
    def library_variables(self) -> dict[str, str]:
        """Variables of every rank that ``comm.options`` sets."""
        return library_options.variables(self.comm.options, self.libraries)

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
            ignored = self.data.ignore if "ignore_index" in LOSSES[name].keys else None
            return dataclasses.replace(self.loss, name=name, ignore_index=ignored)
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
        """Whether the training is evaluated as it goes on."""
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


def _image_size(image: Any) -> list[int]:
    size = [image, image] if isinstance(image, int) else image
    good = isinstance(size, (list, tuple)) and len(size) == 2
    if not good or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in size):
        raise ConfigError(
            f"image={image!r} must be a whole number of pixels or [height,width], as image=512 "
            f"or image=[480,640]"
        )
    return list(size)
