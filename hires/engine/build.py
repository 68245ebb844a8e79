"""Builds what one rank runs, its own slots only, from the frozen config and plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hires.comm import make_groups
from hires.core.config.run_config import RunConfig
from hires.core.ranks.timeline import Recorder
from hires.data.image_window import Source
from hires.data.order import step_indices
from hires.data.source import PairSource, open_data
from hires.engine.loader import Loader, Loaders, Target
from hires.engine.optimizer import FusedSGD
from hires.nets.build_network import build_model, materialise, release
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.executor import Executor
from hires.parallel.gradients import GradientSync
from hires.parallel.slot_pass import SlotPass
from hires.parallel.stage import StageModule
from hires.plan.graph import INPUT, Rect
from hires.plan.groups import groups, num_tile_groups
from hires.plan.operators.operator_table import updates_statistics
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.rules import TILED

IMAGE_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
"""Type of the images; reduced precision trains from fp32 images and infers from its own type."""


@dataclass
class RankEngine:
    """Everything that one rank runs."""

    contexts: list[Context]
    """One a direction."""
    model: nn.Module
    modules: list[StageModule]
    """The stage of each direction; where they are one stage, they share their parameters."""
    executor: Executor
    loader: Loaders
    optimizer: FusedSGD | None
    recorder: Recorder
    """When the rank did what in its last steps."""

    @property
    def context(self) -> Context:
        """The slot in direction down."""
        return self.contexts[0]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of all stages of the rank, each once."""
        return {n: p for module in self.modules for n, p in module.parameters.items()}

    def byte_counts(self) -> dict[str, int]:
        """Returns the bytes of parameters, gradients and optimiser state as they are now."""
        parameters = list(self.parameters.values())
        return {
            "params_bytes": num_bytes(parameters),
            "grads_bytes": num_bytes([p.grad for p in parameters if p.grad is not None]),
            "optimizer_bytes": num_bytes(self.optimizer.state() if self.optimizer else []),
        }


def build_rank(config: RunConfig, plan: Plan, rank: int, steps: int | range) -> RankEngine:
    """Returns what a rank runs; all ranks call it together, since it creates the groups.

    Args:
        config: the frozen config.
        plan: the frozen plan.
        rank: this process.
        steps: for which steps the data is read: a range of them, or how many.
    """
    # Dropout follows the seed; every rank draws its own numbers.
    torch.manual_seed(config.seed * 2**20 + rank)
    contexts = contexts_of(plan, rank)
    model = build_model(config.model, config.seed)
    names = names_of(plan, contexts, model)
    materialise(model, names, config.seed)
    release(model, names)
    cast(model, config)
    loaders = Loaders([_loader(config, context, steps) for context in contexts])
    return assemble(config, contexts, model, loaders)


def contexts_of(plan: Plan, rank: int) -> list[Context]:
    """Returns the slots of a rank, one a direction; all ranks call it together."""
    made = make_groups(groups(plan), num_tile_groups(plan))
    recorder = Recorder()
    for group in made.values():
        group.recorder = recorder
    cursor = Cursor([*events(plan, rank)], made)
    return [Context(plan, rank, made, cursor, slot.direction) for slot in plan.slots_of(rank)]


def names_of(plan: Plan, contexts: list[Context], model: nn.Module) -> set[str]:
    """Returns the names of the parameters and buffers of a rank's stages."""
    stages = {context.stage.index for context in contexts}
    names = {name for stage in stages for node in plan.nodes(stage) for name in node.params}
    buffers = dict(model.named_buffers())
    beside = {name.removesuffix("running_mean") + "num_batches_tracked" for name in names}
    return names | (beside & set(buffers))


def assemble(
    config: RunConfig, contexts: list[Context], model: nn.Module, loader: Loaders
) -> RankEngine:
    """Returns what a rank runs.

    Args:
        config: the frozen config.
        contexts: the rank's slots.
        model: the network; what the rank's stages use is filled and has the run's type.
        loader: where the rank's microbatches come from.
    """
    plan = contexts[0].plan
    modules = [StageModule(context, model) for context in contexts]
    buffers = dict(model.named_buffers())
    uses = _counters(plan, contexts, model) if plan.training else {}
    counters = [(buffers[name], count) for name, count in uses.items()]
    sync = GradientSync(contexts, modules, counters) if plan.training else None
    parameters = {n: p for module in modules for n, p in module.parameters.items()}
    optimizer = make_optimizer(config, list(parameters.values()))
    recorder = contexts[0].tiles.recorder or Recorder()
    pairs = zip(contexts, modules, strict=True)
    slots = [SlotPass(*pair, config.loss, _autocast(config)) for pair in pairs]
    return RankEngine(
        contexts=contexts,
        model=model,
        modules=modules,
        executor=Executor(slots, sync, optimizer, recorder),
        loader=loader,
        optimizer=optimizer,
        recorder=recorder,
    )


def make_optimizer(config: RunConfig, parameters: list[nn.Parameter]) -> FusedSGD | None:
    """Returns stochastic gradient descent, or None if there is nothing to train."""
    trainable = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    if config.task.name != "train" or not trainable:
        return None
    task = config.task
    return FusedSGD(trainable, task.lr, task.momentum, task.weight_decay)


def cast(model: nn.Module, config: RunConfig) -> None:
    """Brings parameters and buffers to the run's type and into one order in memory.

    Convolution weights become channels-last, all else contiguous.
    """
    dtype = image_dtype(config)  # parameters stay fp32 under autocast, as the images do
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for tensor in store.values():
                if tensor is not None and not tensor.is_meta and tensor.is_floating_point():
                    tensor.data = _dense(tensor.data.to(dtype))


def image_dtype(config: RunConfig) -> torch.dtype:
    """Returns the type in which images enter the network."""
    if config.precision.name == "bf16" and config.task.name == "infer":
        return torch.bfloat16
    return IMAGE_DTYPES.get(config.precision.name, torch.float32)


def target_of(source: Source | PairSource, rect: Rect | None = None) -> Target:
    """Returns what gives the target of a sample: its class, or a part of its larger image.

    Args:
        source: the run's data.
        rect: rows and columns of the larger image; unset where targets are classes.
    """
    if isinstance(source, PairSource):
        assert rect is not None
        (r0, r1, c0, c1), pairs = rect, source
        return lambda sample: pairs.target(sample, (r0, r1), (c0, c1))
    return source.label


def samples_of(
    config: RunConfig, source: Source | PairSource, step: int, replica: int
) -> list[int]:
    """Returns the indices of a replica's images in a step, microbatch after microbatch."""
    indices = step_indices(
        step, config.batch, len(source), config.seed, shuffle=config.data.shuffle
    )
    share = config.batch // config.parallel.replicas
    return indices[replica * share : (replica + 1) * share]


def samples_of_slot(
    config: RunConfig, source: Source | PairSource, step: int, context: Context
) -> list[int]:
    """Returns the indices of the images that a slot sees in a step, in order."""
    samples = samples_of(config, source, step, context.replica)
    size = context.plan.graph.input_shape[0]
    first, end = context.samples
    return [
        index
        for microbatch in context.plan.microbatches_of(context.direction)
        for index in samples[microbatch * size + first : microbatch * size + end]
    ]


def reads_images(context: Context) -> bool:
    """Whether a slot needs pixels."""
    return any(INPUT in node.inputs for node in context.plan.nodes(context.stage.index))


def reads_labels(context: Context) -> bool:
    """Whether a slot needs labels."""
    last = context.stage.index == len(context.plan.stages) - 1
    return last and context.plan.training


def num_bytes(tensors: list[Tensor] | list[nn.Parameter]) -> int:
    """Returns the bytes that tensors hold."""
    return sum(t.numel() * t.element_size() for t in tensors)


def _loader(config: RunConfig, context: Context, steps: int | range) -> Loader:
    """Returns the reader of a slot's window of its replica's images."""
    source = open_data(config)
    reads, compares = reads_images(context), reads_labels(context)
    r0, r1, c0, c1 = context.own(config.image)
    return Loader(
        source,
        order=lambda step: samples_of_slot(config, source, step, context),
        num_microbatches=len(context.plan.microbatches_of(context.direction)),
        rows=(r0, r1) if reads else None,
        cols=(c0, c1) if reads else None,
        target=target_of(source, target_rect(config, context)) if compares else None,
        steps=steps,
        prefetch=config.data.prefetch,
        dtype=image_dtype(config),
    )


def target_rect(config: RunConfig, context: Context) -> Rect | None:
    """Returns the part of the target image that this rank's output is compared with."""
    size = config.target_size
    tiled = context.stage.layout[context.plan.graph.output] == TILED
    return context.own(list(size)) if size and tiled else config.target_rect


def _autocast(config: RunConfig) -> torch.dtype | None:
    """Returns the type to which training lowers matrix products."""
    low = config.precision.name == "bf16" and config.task.name == "train"
    return torch.bfloat16 if low else None


def _counters(plan: Plan, contexts: list[Context], model: nn.Module) -> dict[str, int]:
    """Returns the counters of the rank's norms that train, and their steps in one microbatch."""
    buffers = dict(model.named_buffers())
    counts: dict[str, int] = {}
    for stage in {context.stage.index for context in contexts}:
        for node in plan.nodes(stage):
            if updates_statistics(node):
                mean = node.args["running_mean"]["param"]
                counter = mean.removesuffix("running_mean") + "num_batches_tracked"
                if counter in buffers:
                    counts[counter] = counts.get(counter, 0) + 1
    return counts


def _dense(tensor: Tensor) -> Tensor:
    """Returns a tensor whose numbers lie in order: channels-last where it has four dims."""
    order = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
    return tensor.contiguous(memory_format=order)
