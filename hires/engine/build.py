"""Builds what one rank runs, its own slots only, from the frozen config and plan."""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hires.comm import (
    CommWorld,
    activity,
    default_world,
    make_groups,
    max_all,
    open_channels,
)
from hires.core.config.precision_config import DYNAMIC
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import INFERENCE
from hires.core.errors import RunError
from hires.core.ranks.timeline import Recorder
from hires.data.opening import open_data
from hires.data.start_check import require_readable
from hires.engine.derived_tensors import DerivedTensors, Place
from hires.engine.device import HOST, RankDevice
from hires.engine.finite_checks import require_finite
from hires.engine.loader import Loader, image_dtype, slot_loader
from hires.engine.optimizer import make_optimizer
from hires.engine.rank_engine import RankEngine
from hires.engine.weights_file import WeightsFile, open_weights, reader_of, share_weights
from hires.nets.build_network import build_model, materialise
from hires.parallel.band_module import BandModule
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.executor import Executor
from hires.parallel.gradient_factors import GradientClip, LossScale
from hires.parallel.gradients import GradientSync
from hires.parallel.published_parameters import PublishedParameters
from hires.parallel.residents import ResidentExecutor, resident_contexts
from hires.parallel.slot_pass import SlotPass
from hires.parallel.spill import Spill
from hires.parallel.stage import StageModule
from hires.plan.graph import Graph
from hires.plan.groups import process_groups
from hires.plan.message_routes import channels
from hires.plan.operators.operator_facts import facts_of
from hires.plan.operators.operator_table import updates_statistics, uses_batch_statistics
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.regions import regions_of

log = logging.getLogger(__name__)


def build_rank(
    config: RunConfig,
    plan: Plan,
    rank: int,
    steps: int | range,
    device: RankDevice | None = None,
    weights: WeightsFile | None = None,
) -> RankEngine:
    """Returns what a rank runs in some steps; all ranks call it together: it creates groups.

    ``rank`` is a process, which may execute several ranks of the plan (``parallel.resident``).
    Without a ``device`` it computes on the CPU. ``weights`` take the place of what the network
    made. RunError: the network has other tensors than the plan.
    """
    device = device or RankDevice()
    # For operators whose random numbers do not follow from their place in the batch.
    torch.manual_seed(config.seed * 2**20 + rank)
    contexts = contexts_of(plan, rank, device.torch)
    tensors, own_values = made_tensors(config, contexts)
    steps, source = range(steps) if isinstance(steps, int) else steps, open_data(config)
    require_readable(config, source, steps, rank, plan.num_processes)
    tensors = {name: device.place(tensor) for name, tensor in tensors.items()}
    # Weights of the user's code may come from a file, which each node has its own copy of.
    chosen = {c.stage.index: names_of([c], tensors) for c in contexts}
    if weights is None:
        chosen = {index: names & own_values for index, names in chosen.items()}
    else:
        for index, names in chosen.items():
            if reader_of(plan, index) == rank:
                weights.fill_all({name: tensors[name].data for name in sorted(names)})
        if plan.num_processes > 1:
            max_all(0, patient=True)  # a disk may need longer than a message
    share_weights(contexts[0], {s: [tensors[n].data for n in sorted(chosen[s])] for s in chosen})
    if weights is not None:
        require_finite(config, plan.graph, tensors, begins=True)
    loaders = [slot_loader(config, context, source, steps, device) for context in contexts]
    engine = assemble(config, contexts, tensors, loaders, device, releases=True)
    engine.weights = None if weights is None else weights.place
    engine.prepare()
    begin_spill(config, engine)
    activity.recorder = engine.recorder  # the heartbeat reads the rank's step there
    stage, text = contexts[0].stage, "stage %d of %d holds %s to %s"
    log.info(text, stage.index, len(plan.stages), stage.first_layer, stage.last_layer)
    return engine


def begin_spill(config: RunConfig, engine: RankEngine) -> None:
    """Opens the folder of ``memory.spill``, if it is set; RunError: it cannot be written."""
    if config.memory.spill is not None and engine.context.plan.training:
        engine.spill = Spill(Path(config.memory.spill))
        engine.keep_in(engine.spill)


def made_tensors(config: RunConfig, contexts: list[Context]) -> tuple[dict[str, Tensor], set[str]]:
    """Returns the network's own tensors of a rank, on the host and of the run's type, by name.

    The names that come with them are of those that the user's code has filled. RunError: a tensor
    has another shape than in the plan.
    """
    model = build_model(config.model, config.seed, (config.height, config.width))
    made, graph = named_tensors(model), contexts[0].plan.graph
    names = names_of(contexts, made)
    own_values = {name for name in names & made.keys() if not made[name].is_meta}
    materialise(model, names & made.keys(), config.seed)
    # The module goes at the end of this function, and with it what only other ranks need.
    tensors = {name: tensor for name, tensor in named_tensors(model).items() if name in names}
    for name, tensor in tensors.items():
        # A network may read what is no part of the run: a variable, or a file that no key names.
        fact = graph.params.get(name)
        if fact is not None and [*tensor.shape] != [*fact.shape]:
            raise RunError(
                f"the network built {name} of shape {[*tensor.shape]}, and {[*fact.shape]} when "
                f"the run was planned: something that it reads has changed; undo that, or name "
                f"the file in model.files and start it as a run of its own"
            )
    for name in names - made.keys():  # for a file
        fact = graph.params[name]
        blank = torch.empty(fact.shape, dtype=getattr(torch, fact.dtype))
        tensors[name] = nn.Parameter(blank, requires_grad=False)
    place_tensors(tensors, image_dtype(config), graph)
    return tensors, own_values


def filled_tensors(config: RunConfig, contexts: list[Context]) -> dict[str, Tensor]:
    """Returns :func:`made_tensors` with the numbers of ``weights``, read by this process alone."""
    tensors, _ = made_tensors(config, contexts)
    if config.weights is not None:
        open_weights(config.weights).fill_all({n: one.data for n, one in tensors.items()})
    return tensors


def contexts_of(
    plan: Plan,
    rank: int,
    device: torch.device = HOST,
    world: CommWorld | None = None,
    shares: bool = False,
) -> list[Context]:
    """Returns the slots of a rank of a world, one a direction; all ranks call it together.

    Of a process with residents, those of each of them, rank by rank.
    ``shares``: plans whose passes never overlap have their groups together.
    """
    world = world or default_world()
    made = make_groups(process_groups(plan), world, shares)
    if plan.resident > 1:
        return resident_contexts(plan, rank, made, device, world)
    opened = open_channels(channels(plan), made, device, world)
    recorder = Recorder()
    for group in made.values():
        group.recorder = recorder
    cursor = Cursor([*events(plan, rank)], made, world, opened)
    ways = [slot.direction for slot in plan.slots_of(rank)]
    return [Context(plan, rank, made, cursor, way, device=device) for way in ways]


def assemble(
    config: RunConfig,
    contexts: list[Context],
    tensors: dict[str, Tensor],
    loaders: list[Loader],
    device: RankDevice | None = None,
    releases: bool = False,
) -> RankEngine:
    """Returns what a rank runs on its stages' parameters and buffers, cast to the run's type.

    They lie on the ``device``, or on the CPU, as the contexts say. ``releases``: those from which
    others are computed, and which no node reads, leave ``tensors``.
    """
    device, plan = device or RankDevice(), contexts[0].plan
    require_finite(config, plan.graph, tensors)
    ranks = [
        _passes_of(config, own, own_tensors, device, releases)
        for own, own_tensors in _by_rank(contexts, tensors)
    ]
    first, modules = ranks[0], [module for one in ranks for module in one.modules]
    parameters = {n: p for one in reversed(ranks) for n, p in one.parameters.items()}
    sync = scale = published = clip = rows = None
    if config.scales_loss:
        fixed, interval = config.precision.loss_scale, config.precision.scale_interval
        scale = LossScale(interval, None if fixed == DYNAMIC else float(fixed))
    if plan.training:
        counters = (counters_of(one.contexts, one.tensors) for one in ranks)
        sync = GradientSync(contexts, modules, [*itertools.chain(*counters)])
        published = PublishedParameters(contexts, modules)
        own = published.own_rows()
        rows = None if own is None else {id(parameter): span for parameter, span in own.items()}
        if config.optimizer.clip_norm is not None:
            clip = GradientClip(config.optimizer.clip_norm, sync, plan, first.rank)
    optimizer = make_optimizer(config, list(parameters.values()), rows)
    update = sync, optimizer, first.recorder, scale, published, clip
    if plan.resident == 1:
        executor = Executor(first.executor.slots, *update)
    else:
        for one in ranks:
            one.executor = Executor(one.executor.slots, sync, None, one.recorder, scale)
        executor = ResidentExecutor([one.executor for one in ranks], *update)
        executor.parameters = [
            (p, parameters[n]) for one in ranks for n, p in one.parameters.items()
        ]
    done = executor, loaders, optimizer, first.recorder
    engine = RankEngine(device, contexts, tensors, first.derived, modules, parameters, *done)
    engine.residents = ranks if plan.resident > 1 else []
    engine.empties_weights = config.task.name in INFERENCE
    return engine


def _by_rank(
    contexts: list[Context], tensors: dict[str, Tensor]
) -> Iterator[tuple[list[Context], dict[str, Tensor]]]:
    # The slots of each rank of a process with their tensors. Residents share parameters; each has
    # buffers of its own, as running statistics, which its passes write. With several processes it
    # has gradients of its own, too: messages come in any order, and so would these be added.
    plan, taken = contexts[0].plan, set[str]()
    if plan.resident == 1:
        yield contexts, tensors
        return
    in_order = plan.resident == plan.ranks_per_replica
    for _, group in itertools.groupby(contexts, key=lambda context: context.rank):
        slots, own = [*group], dict[str, Tensor]()
        for name in sorted(names_of(slots, tensors)):
            tensor = own[name] = tensors[name]
            if name in taken and not isinstance(tensor, nn.Parameter):
                own[name] = tensor.clone()
            elif name in taken and not in_order:
                own[name] = nn.Parameter(tensor.data, tensor.requires_grad)
        taken.update(own)
        yield slots, own


def _passes_of(
    config: RunConfig,
    contexts: list[Context],
    tensors: dict[str, Tensor],
    device: RankDevice,
    releases: bool,
) -> RankEngine:
    # What a rank of the plan runs, without what belongs to its process.
    plan, compiles = contexts[0].plan, config.engine.compile != "off"
    for context in contexts:
        context.seed = config.seed
    low = None if config.autocast_type is None else getattr(torch, config.autocast_type)
    place = placement(image_dtype(config), plan.graph)
    derived = DerivedTensors(contexts, tensors, place, releases)
    require_finite(config, plan.graph, derived.tensors)
    every = {**tensors, **derived.tensors}
    modules = [
        BandModule(context, every)
        if plan.band_rows
        else StageModule(context, every, regions_of(plan, context.stage) if compiles else [])
        for context in contexts
    ]
    slots = [SlotPass(*pair, config.objective, low) for pair in zip(contexts, modules, strict=True)]
    parameters = {n: p for module in modules for n, p in module.parameters.items()}
    recorder = contexts[0].tiles.recorder or Recorder()
    recorder.clock = device.clock()
    done = Executor(slots, None, None, recorder), list[Loader](), None, recorder
    return RankEngine(device, contexts, tensors, derived, modules, parameters, *done)


def whole_model(config: RunConfig) -> nn.Module:
    """Returns the network as a plain module before its first step, as one process would run it."""
    model = build_model(config.model, config.seed, (config.height, config.width))
    materialise(model, [*model.state_dict()], config.seed)
    cast(named_tensors(model).values(), image_dtype(config))
    if config.weights is not None:  # of any type: as ranks take them
        open_weights(config.weights).fill_all(named_tensors(model))
    cast_constants(model, image_dtype(config))
    return model.train(config.task.name == "train")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a network by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def names_of(contexts: list[Context], all_names: Iterable[str]) -> set[str]:
    """Returns the names of the parameters and buffers of a rank's stages, among ``all_names``."""
    # No node reads the counters of norms: they are found beside the running means.
    plan, stages = contexts[0].plan, {context.stage.index for context in contexts}
    names = {name for stage in stages for node in plan.nodes(stage) for name in node.params}
    names = plan.graph.own_params(names)
    return names | ({_counter_of(name) for name in names} & set(all_names))


def cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Brings the real tensors of a plain module to a type; each keeps its strides."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def place_tensors(tensors: dict[str, Tensor], dtype: torch.dtype, graph: Graph) -> None:
    """Brings the real tensors of a rank to the type and order of :func:`placement`."""
    place = placement(dtype, graph)
    for name, tensor in tensors.items():
        place(name, tensor)


def placement(dtype: torch.dtype, graph: Graph) -> Place:
    """Returns what brings a tensor of a name to a type and an order.

    A weight that only convolutions read is channels-last; all others are contiguous, for a view
    (of ``view_as_complex``, say) may need the strides with which the network made them. What no
    node reads keeps its digits: others are computed from it.
    """
    weights, others = set(), set()
    for node in graph.nodes:
        names, facts = set(node.params), facts_of(node.kind)
        if facts.multiplies and facts.window:  # a convolution
            weights |= names
        else:
            others |= names
    only = weights - others

    def place(name: str, tensor: Tensor) -> None:
        is_read = name in weights or name in others
        cast([tensor], dtype if is_read else torch.promote_types(tensor.dtype, dtype))
        last = tensor.is_floating_point() and tensor.dim() == 4 and name in only
        order = torch.channels_last if last else torch.contiguous_format
        tensor.data = tensor.data.contiguous(memory_format=order)

    return place


def cast_constants(model: nn.Module, dtype: torch.dtype) -> None:
    """Brings tensors that modules hold as attributes, or in lists and dicts, to a type."""

    def changed(item: Any) -> Any:
        if isinstance(item, Tensor) and not isinstance(item, nn.Parameter):
            return item.to(dtype) if item.is_floating_point() else item
        if type(item) in (list, tuple):
            return type(item)(map(changed, item))
        return {k: changed(v) for k, v in item.items()} if type(item) is dict else item

    for module in model.modules():
        for name, item in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                vars(module)[name] = changed(item)


def counters_of(contexts: list[Context], tensors: dict[str, Tensor]) -> list[tuple[Tensor, int]]:
    """Returns the counters of the norms that train, and how often each runs in a microbatch."""
    stages = {context.stage.index for context in contexts}
    nodes = (node for stage in stages for node in contexts[0].plan.nodes(stage))
    # Instance norms keep a counter and never count.
    counting = (n for n in nodes if updates_statistics(n) and uses_batch_statistics(n))
    norms = [node.args["running_mean"]["param"] for node in counting]
    uses = collections.Counter(map(_counter_of, norms))
    return [(tensors[name], count) for name, count in uses.items() if name in tensors]


def _counter_of(name: str) -> str:
    return name.removesuffix("running_mean") + "num_batches_tracked"
