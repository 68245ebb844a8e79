"""Declares the keys of what ranks do: task, loss, optimiser, memory, engine and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hires.core.config.fields import MOST_LABEL, MOST_STEPS, Section, not_function, value
from hires.core.errors import ConfigError
from hires.core.losses import CLASSES, IMAGES, LABELS, LOSSES, NUMBERS, own_keys
from hires.core.optimizers import MORE_STATES, OPTIMIZERS, REFUSED, SET_BY_HIRES
from hires.core.ranks.machine import TENSORRT
from hires.core.trackers import TRACKERS

if TYPE_CHECKING:
    from hires.core.config.run_config import RunConfig

INFERENCE = ("infer", "evaluate", "predict")
"""Tasks that compute forward and keep no value for anything else."""
ONE_PASS = ("evaluate", "predict")
"""Tasks that take each sample of the data once, in its order; ``steps`` is what that takes."""


TASKS = {
    "train": "Forward, backward and a step of the optimiser",
    "infer": "Forward only, batch norms in evaluation mode",
    "evaluate": "Forward only, once over the data: accuracy, predictions of every image",
    "predict": "Forward only, once over the data: writes classes, or a map of each image",
    "calibrate": "Forward only, for the scales of precision=int8 (hires quantize)",
}


@dataclass
class TaskConfig(Section, key="task", choices=TASKS):
    """``task=NAME``: training, inference, evaluation or prediction."""

    name: str = value("train", choices=TASKS)
    """``train`` (forward, backward, optimiser step), ``infer`` (forward only), ``evaluate`` (one
    pass over the data: accuracy; ``steps`` is what that takes), ``predict`` (the same pass, whose
    outputs are written: ``predict.reduce``) or ``calibrate`` (forward only, to find the scales of
    ``precision=int8``: `hires quantize` does that)."""


LOSS_NAMES = {
    "auto": "The loss that fits network and data: l1 for pairs, bce, l2, else cross_entropy",
    **{name: LOSSES[name].summary for name in LOSSES},
}


_CROSS_ENTROPY = ("auto", "cross_entropy")


@dataclass
class LossConfig(Section, key="loss", choices=LOSS_NAMES):
    """``loss=NAME``: what training minimises."""

    name: str = value("auto", choices=LOSS_NAMES)
    """Of one class for each image or pixel: ``cross_entropy``, ``bce`` (binary cross-entropy of
    each class, with logits, also of several classes an image), ``dice`` (1 - the mean Dice
    coefficient of the classes, from probabilities, over all pixels of a microbatch). Of images of
    ``model.scale`` times the input's size, or of the numbers of ``data.targets=numbers``: ``l1``,
    ``l2`` (mean square), ``smooth_l1``. ``custom``: the function ``loss.target``. ``auto``: ``l1``
    for ``model=edsr`` and ``data=pairs``, ``bce`` for ``data.targets=classes``, ``l2`` for
    ``numbers``, else ``cross_entropy``."""
    weights: list[float] | None = value(low=0, of=(*_CROSS_ENTROPY, "bce"), tasks=("train",))
    """Of ``cross_entropy``: a factor for each class; the mean is divided by the factors of the
    labels. Of ``bce``: a factor for the term of each class where an image has it (``pos_weight`` of
    torch)."""
    label_smoothing: float = value(0.0, 0, 1, of=_CROSS_ENTROPY, tasks=("train", "evaluate"))
    """Of ``cross_entropy``: share of a label that is spread over all classes."""
    ignore_index: int | None = value(
        high=MOST_LABEL,
        of=("auto", *(name for name in LOSSES if LOSSES[name].ignores)),
        tasks=("train",),
    )
    """Of ``cross_entropy``, ``bce`` and ``dice``: the label whose images or pixels do not count; a
    microbatch without any other adds nothing, and ``record.json`` counts it."""
    smooth: float = value(1.0, 0, of=("dice",), tasks=("train", "evaluate"))
    """Of ``dice``: added to numerator and denominator of each class."""
    target: str | None = value(line=True, of=("custom",))
    """Of ``custom``: ``package.module:function``, from an output (n, C, ...) and its targets to
    their mean loss. With an argument ``reduction``, and terms that do not depend on each other, of
    which ``reduction="none"`` returns all, it also works for an output in tiles or shards."""
    targets: str = value(
        CLASSES,
        choices=(CLASSES, IMAGES, LABELS, NUMBERS),
        of=("custom", *(name for name in LOSSES if LOSSES[name].also)),
    )
    """Of ``custom``: what it gets beside the output: of ``classes`` the number of the one class of
    each image or pixel, (n) or (n, H, W), or ``images`` of the output's shape. ``labels`` (0 or 1
    for each class, of ``data.targets=classes``) and ``numbers`` follow from ``data.targets``."""
    args: dict[str, Any] = value({})
    """Of a loss in a module of your own in ``hires/losses``: arguments of its class."""

    @property
    def compares(self) -> str:
        """What an output is compared with: ``classes``, ``images``, ``labels`` or ``numbers``."""
        follows = self.name == "custom" or self.targets in (LABELS, NUMBERS)
        return self.targets if follows else LOSSES[self.name].targets

    @property
    def ignored(self) -> set[int]:
        """Labels that do not count."""
        weights = () if self.name == "bce" else self.weights or ()
        unweighted = {label for label, factor in enumerate(weights) if not factor}
        return unweighted if self.ignore_index is None else {*unweighted, self.ignore_index}

    def _problems(self) -> Iterator[str]:
        if self.name == "custom":
            yield from not_function("loss", self.target)
        known = own_keys(self.name) if self.name in LOSSES else []
        for key in self.args.keys() - {*known}:
            takes = f"takes {', '.join(known)}" if known else "takes none"
            yield f"loss.args.{key} is no argument of loss={self.name}, which {takes}"
        if self.weights is not None and not any(self.weights):
            yield (
                f"loss.weights={self.weights} must be one factor for each class, not all 0, as "
                f"[1.0,2.5]"
            )


def _optimizer_keys(name: str) -> dict[str, Any]:
    kind = OPTIMIZERS[name]
    return {"name": name, "lr": kind.lr, "weight_decay": kind.weight_decay}


@dataclass
class OptimizerConfig(
    Section,
    key="optimizer",
    choices={n: f"{one.summary}, torch.optim.{one.torch_class}" for n, one in OPTIMIZERS.items()},
    choice_keys=_optimizer_keys,
):
    """``optimizer=NAME``: how training moves parameters."""

    name: str = value("sgd", choices=OPTIMIZERS)
    """Class of ``torch.optim`` that moves each number of a parameter by itself: ``sgd``, ``adam``,
    ``adamw``, ``adadelta``, ``adagrad``, ``adamax``, ``asgd``, ``nadam``, ``radam``, ``rmsprop``
    or ``rprop``, also as torch writes it."""
    lr: float = value(0.005, 0, plan=False)
    """Learning rate, the largest one of ``lr_schedule``."""
    scale_lr: bool = value(False, plan=False)
    """Whether ``lr`` is that of one replica, and is multiplied by ``parallel.replicas`` (linear
    scaling, for a ``batch`` that grows with the replicas)."""
    weight_decay: float = value(1e-4, 0, plan=False)
    """Share of each parameter that is added to its gradient, or that times the learning rate is
    taken off the parameter itself (``adamw``). ``rprop`` has none."""
    clip_norm: float | None = value(None, above=0)
    """Largest norm of the gradients of all parameters together: larger ones are scaled down to it,
    as by ``torch.nn.utils.clip_grad_norm_``; unset: none are."""
    ema: float | None = value(None, above=0, below=1)
    """Share of a running mean of the weights that each step keeps, as 0.999; it begins with the
    first weights, and is in checkpoints beside these: ``weights=RUN/ema`` takes it. Unset: none."""
    args: dict[str, Any] = value({})
    """Further arguments of the class, as ``optimizer.args.betas=[0.9,0.95]``; ``sgd`` has a
    momentum of 0.9 unless ``optimizer.args.momentum`` says otherwise."""
    shard: bool = False
    """Whether the ranks that hold the same parameters (tiles, replicas, directions) divide their
    update: each keeps the optimiser's state of its part, moves it, and sends it to the others."""
    exchange: str = value("auto", choices=("auto", "broadcast", "scatter"))
    """How they do that: every rank gets the sums of all gradients and broadcasts what it has moved
    (``broadcast``), or it gets the sums of its part alone, and one gather brings all parameters
    together (``scatter``, two thirds of the bytes); ``auto``: ``scatter``, but where gradients are
    summed while the backward pass runs."""

    def __post_init__(self) -> None:
        self.name = self.name.lower()
        if self.name in REFUSED:
            raise ConfigError(
                f"optimizer={self.name}: it {REFUSED[self.name]}; choose one of "
                f"{', '.join(OPTIMIZERS)}"
            )
        super().__post_init__()

    def _problems(self) -> Iterator[str]:
        for name in (name for name in self.args if name in SET_BY_HIRES):
            remedy = f"write optimizer.{name}" if hasattr(self, name) else "leave it out"
            yield f"optimizer.args.{name} is not an argument here; {remedy}"
        takes = [*OPTIMIZERS[self.name].takes.split(), "maximize"]
        for name in (name for name in self.args if name not in (*takes, *SET_BY_HIRES)):
            yield (
                f"optimizer.args.{name} is no argument of {self.name}; it takes {', '.join(takes)}"
            )
        if self.name == "rprop" and self.weight_decay:
            yield f"optimizer.weight_decay={self.weight_decay}: rprop has none; set it to 0"

    @property
    def all_args(self) -> dict[str, Any]:
        """Arguments of the class beside the learning rate and the weight decay."""
        # JSON and YAML have lists where torch compares tuples.
        args = {k: tuple(v) if isinstance(v, list) else v for k, v in self.args.items()}
        return {**OPTIMIZERS[self.name].args, **args}

    @property
    def num_states(self) -> int:
        """Numbers that it keeps for each of a parameter."""
        more = sum(bool(self.all_args.get(key)) for key in MORE_STATES)
        return OPTIMIZERS[self.name].num_states + more + (self.ema is not None)


Curve = Callable[["LrScheduleConfig", float, int, int], float]
"""From keys, the largest rate, a step and the number of all steps to a rate; both without warm-up.
The step is below that number."""


def _constant(keys: LrScheduleConfig, largest: float, step: int, total: int) -> float:
    """The same learning rate in every step."""
    return largest


def _step(keys: LrScheduleConfig, largest: float, step: int, total: int) -> float:
    """The learning rate is divided by ten after every 30 steps."""
    return float(largest * keys.gamma ** (step // keys.step_size))


def _cosine(keys: LrScheduleConfig, largest: float, step: int, total: int) -> float:
    """The learning rate falls to zero along half a cosine."""
    return _half_cosine(largest, keys.final, min(step, total) / total)


def _one_cycle(keys: LrScheduleConfig, largest: float, step: int, total: int) -> float:
    """The learning rate rises for 30 % of the steps, then falls far below it."""
    # The first step has the first rate, the last one the last; where the top is need be no step.
    top, end, first = keys.rise * total - 1, total - 1, largest / keys.first_divisor
    step = min(step, end)
    if step <= top:
        return _half_cosine(first, largest, step / top if top else 1.0)
    return _half_cosine(largest, first / keys.last_divisor, (step - top) / (end - top))


def _half_cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * share)) / 2


CURVES: dict[str, Curve] = {
    "constant": _constant,
    "step": _step,
    "cosine": _cosine,
    "one_cycle": _one_cycle,
}
"""Value of ``lr_schedule`` -> the rate behind the warm-up."""
LR_CURVES = {name: (curve.__doc__ or "").rstrip(".") for name, curve in CURVES.items()}


@dataclass
class LrScheduleConfig(Section, key="lr_schedule", choices=LR_CURVES):
    """``lr_schedule=NAME``: the learning rate of each step."""

    name: str = value("constant", choices=LR_CURVES)
    """``constant`` (``optimizer.lr``), ``step`` (times ``gamma`` after every ``step_size`` steps),
    ``cosine`` (falls to ``final`` along half a cosine) or ``one_cycle`` (rises to ``optimizer.lr``,
    then falls, both along half a cosine). It is a function of the step alone: a run that resumes
    goes on with it, and steps that fp16 skips count."""
    warmup: int = value(0, 0, MOST_STEPS)
    """Steps before any of them in which the rate rises in a line to ``optimizer.lr``; the schedule
    begins behind them."""
    warmup_begin: float = value(1 / 3, above=0, below=1)
    """Share of ``optimizer.lr`` at which the warm-up begins."""
    step_size: int = value(30, 1, MOST_STEPS, of=("step",))
    """Of ``step``: steps between two changes."""
    gamma: float = value(0.1, 0, of=("step",))
    """Of ``step``: the factor of each change."""
    steps: int | None = value(None, 1, MOST_STEPS, of=("cosine", "one_cycle"))
    """Of ``cosine`` and ``one_cycle``: number of the step, warm-up included, at which they end, and
    keep their last rate; unset: the run's ``steps``. A run of more steps that continues another
    with it unset is on another, longer curve from its first step on; set, on the same."""
    final: float = value(0.0, 0, of=("cosine",))
    """Of ``cosine``: the last rate."""
    rise: float = value(0.3, above=0, below=1, of=("one_cycle",))
    """Of ``one_cycle``: share of its steps in which the rate rises."""
    first_divisor: float = value(25.0, 1, of=("one_cycle",))
    """Of ``one_cycle``: the first rate is ``optimizer.lr`` divided by it."""
    last_divisor: float = value(1e4, 1, of=("one_cycle",))
    """Of ``one_cycle``: the last rate is the first one divided by it."""

    def _problems(self) -> Iterator[str]:
        if self.warmup_begin != type(self).warmup_begin and not self.warmup:
            yield f"lr_schedule.warmup_begin={self.warmup_begin} needs lr_schedule.warmup"


def learning_rate(config: RunConfig, step: int) -> float:
    """Returns the learning rate of a step, the first one is 0: a function of these alone.

    The values are those of ``torch.optim.lr_scheduler``: ``LinearLR`` for the warm-up, then
    ``StepLR``, ``CosineAnnealingLR`` or ``OneCycleLR``, joined by ``SequentialLR``.

    Source:
        Loshchilov, Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017;
        Smith, Topin, "Super-convergence: very fast training of neural networks using large
        learning rates", 2018; Goyal et al., "Accurate, large minibatch SGD", 2017 (warm-up and
        linear scaling).
    """
    keys, largest = config.lr_schedule, config.optimizer.lr
    if config.optimizer.scale_lr:
        largest *= config.parallel.replicas
    if step < keys.warmup:
        return largest * (keys.warmup_begin + (1 - keys.warmup_begin) * step / keys.warmup)
    total = (keys.steps or config.steps) - keys.warmup
    return CURVES[keys.name](keys, largest, step - keys.warmup, total)


@dataclass
class MemoryConfig(Section, key="memory"):
    """``memory.*``: what is kept, and how much may be used."""

    limit: Any = value(size=True, identity=False)
    """Most that a rank may need, with its unit, as 4GiB or 800MB; unset: all ranks of the local
    launcher together may need what the machine has."""
    spill: str | None = value(tasks=("train",))
    """Folder on a disk of each machine, to which the activations go that the backward pass needs;
    unset: they stay in memory."""
    checkpoint: str = value("none", choices=("none", "stage", "block"), tasks=("train",))
    """What the backward pass computes again instead of keeping it: ``none``, all of a ``stage``, or
    each ``block`` of it. It writes no files: saving a run is ``checkpoint.*``."""


@dataclass
class EngineConfig(Section, key="engine"):
    """``engine.*``: how a rank computes."""

    compile: str = value("off", choices=("off", "stage", TENSORRT))
    """What is compiled before the first step. ``stage``: torch compiles the parts of each stage
    that exchange no messages (with one rank, all of the network), with a C++ compiler, on GPUs with
    Triton. ``tensorrt``: Torch-TensorRT compiles the same parts, for inference on NVIDIA GPUs
    without tiles. ``off``: nothing; so it is with ``precision=int8``."""
    fuse: str = value("auto", choices=("auto", "off"))
    """Whether inference runs a network of fewer operators that computes the same (``auto``): norms
    become part of the convolutions before them, for example; or the network as it is (``off``).
    Training always has the latter."""


@dataclass
class MeasureConfig(Section, key="measure"):
    """``measure.*``: which steps count."""

    warmup: int = value(2, 0, MOST_STEPS)
    """Steps at the start that no table counts."""
    steps: int | None = value(None, 1, MOST_STEPS)
    """Steps after the warm-up that are counted; unset: all of them."""
    track: list[str] = value([], choices=TRACKERS.sentences(), identity=False, tasks=("train",))
    """Trackers that take the numbers of a training as it goes, as [tensorboard,mlflow]: loss, rate,
    norm of the gradients, images per second, evaluations."""


@dataclass
class CheckpointConfig(Section, key="checkpoint"):
    """``checkpoint.*``: when a run saves its state, and where it resumes."""

    every: int = value(0, 0, MOST_STEPS, identity=False, tasks=("train",))
    """Steps from one saved checkpoint to the next; 0: only when SIGUSR2 requests one. What the
    backward pass computes again is ``memory.checkpoint``."""
    keep: int = value(2, 1, identity=False)
    """Checkpoints of the run that are kept, the latest ones."""
    at_end: str = value("auto", choices=("auto", "always", "never"), identity=False)
    """Whether a training saves its state after its last step: ``always``, ``never``, or ``auto``:
    where ``every`` saves it before, too, and where the training learns, from data that are not
    ``synthetic``, or with ``epochs`` or ``validate.every``. Other runs measure a layout."""
    resume: str = value("auto", line=True, path=("auto", "never"))
    """Where an attempt begins: at the run's latest checkpoint (``auto``), at step 0 (``never``), or
    at a run folder or checkpoint, perhaps of another layout, until the run has one of its own."""
    continues: str | None = value(line=True, path=(), identity=False)
    """Checkpoint of a run that differs in its steps only, where this one begins until it has one of
    its own; ``--continue`` finds it."""

    @property
    def saves_end(self) -> bool:
        """Whether a training saves its state after its last step."""
        return self.at_end == "always" or (self.at_end == "auto" and self.every > 0)

    @property
    def source(self) -> str | None:
        """The path that ``continues`` or ``resume`` names; None if they name none."""
        return self.continues or (None if self.resume in ("auto", "never") else self.resume)
