"""Predicts the memory of every rank by rehearsing one step of its program without memory.

The objects of a run are built for one rank at a time, and run one step:

    executor, stages, gradient sums, optimiser     the classes of a run, from config and plan
      |- tensors    FakeTensorMode                 shapes and no memory
      |- messages   comm.rehearsal.NullBackend complete at once, keep their tensors alive
      '- storages   LiveBytes                      counted until the last tensor on them is gone

So activations in flight follow the schedule, and halos, receive buffers and recomputation are those
of a run. The fullest moment is the prediction: what is alive then, by what it is for. What no
operator allocates is added: the process, kernels of oneDNN, and the memory of the backend ``shm``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from hires.comm import rehearsal
from hires.comm.rehearsal import NullStaging, backend_bytes
from hires.core.config.fields import build
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.config.training_config import INFERENCE, EngineConfig
from hires.core.evaluation_summary import IMAGES, ROW_KINDS
from hires.data.source import SOURCES
from hires.data.start_check import decoding_bytes
from hires.engine.band_images import BandImages
from hires.engine.build import (
    assemble,
    contexts_of,
    named_tensors,
    names_of,
    place_tensors,
)
from hires.engine.calibrate import observe_blank, rehearse_choice
from hires.engine.live_bytes import LiveBytes
from hires.engine.loader import image_dtype, needs_of
from hires.engine.optimizer import Optimizer
from hires.engine.rank_engine import RankEngine
from hires.nets.build_network import build_model
from hires.parallel.band_module import BandModule
from hires.parallel.context import Context
from hires.parallel.slot_pass import Batch
from hires.parallel.spill import MOST_AHEAD, MOST_WAITING, BlankSpill
from hires.parallel.torch_faults import on_gpus
from hires.plan.event import OF_WORLD
from hires.plan.graph import Parameter, Rect
from hires.plan.hardware import CUDA, MPI
from hires.plan.memory import (
    CONTEXT_BYTES,
    HOST_CONTEXT_BYTES,
    MPI_BYTES,
    PINNED_BATCHES,
    RankMemory,
    cublas_workspaces,
    nccl_bytes,
    pinned_bytes,
    together,
)
from hires.plan.operators.operator_facts import facts_of
from hires.plan.plan import Plan
from hires.plan.planner import kind_of
from hires.plan.rank_kinds import rehearsed_ranks
from hires.plan.routes import STREAMED
from hires.plan.rules import TILED
from hires.plan.tiling import Interval
from hires.plan.traffic import backends_of_plan

PROCESS_BYTES = {"train": 8 * 2**20, **dict.fromkeys(INFERENCE, 3 * 2**20)}
PROCESS_BYTES["calibrate"] = PROCESS_BYTES["infer"]
"""What a rank needs beside its tensors once it runs: oneDNN's compiled kernels and their caches,
the plan as Python objects, threads of the transport. Between the imports and the second step of
ResNet-50 and -101, 224 to 512 pixels, a rank grew by 7 to 9 MiB more than its tensors in training
and by 1 MiB in inference; of ResNet-18 and -50 at 32 pixels in sp+gems by 2.8 to 3.8 MiB, in fp32
and (without :func:`kernel_bytes`) in int8."""
KERNEL_BYTES = 64 * 2**10
"""Of one 8-bit kernel: on AVX2 a process grew by 40 to 60 KiB in the first call of a convolution,
of a product with a sum as much again, and by 12 to 48 KiB when its weight was packed."""
ALLOCATOR = 1 / 8
"""What torch's allocator of GPU memory needs beyond the tensors, as a share of them: it keeps
unused parts of segments, and returns whole ones when memory is short. A simulation of torch 2.13's
had 2 to 49 % beyond for ten networks, and less than 13 % for half of them."""

# FakeTensorMode runs an operator without a shape function on real zeros of the size of its inputs:
# minutes and gigabytes for a large image. These have none in torch.
_SHAPES: dict[str, Callable[..., Any]] = {
    "aten::batch_norm_update_stats": lambda x, *_: [x.new_empty(x.shape[1]) for _ in range(2)],
    "mkldnn::_convolution_pointwise.binary": lambda x, other, *_: torch.empty_like(other),
    "mkldnn::_convolution_pointwise_.binary": lambda other, *_: other,
    "mkldnn::_reorder_convolution_weight": lambda weight, *_: torch.empty_like(weight),
    "mkldnn::_reorder_linear_weight": lambda weight, *_: torch.empty_like(weight),
    "onednn::qconv_prepack": lambda weight, *_: torch.empty_like(weight),
    "onednn::qlinear_prepack": lambda weight, *_: torch.empty_like(weight),
}
_LIBRARIES: dict[str, Any] = {
    name: torch.library.Library(name, "IMPL", "Meta")  # type: ignore[no-untyped-call]
    for name in ("aten", "mkldnn", "onednn")
}
for _name, _kernel in _SHAPES.items():
    _LIBRARIES[_name.partition(":")[0]].impl(_name, _kernel)


def footprint(config: RunConfig, plan: Plan, model: nn.Module | None = None) -> list[RankMemory]:
    """Returns the memory of every rank of one replica in a step; of similar ranks one rehearses.

    ``model`` is the network, built if it is left out.
    """
    model = network_of(config) if model is None else model
    chosen, real = rehearsed_ranks(plan), named_tensors(model)
    memory = {rank: rehearse(config, plan, rank, real) for rank in sorted(set(chosen))}
    ranks = [memory[rank] for rank in chosen]
    firsts = range(0, len(ranks), plan.resident)
    queued = MOST_WAITING + MOST_AHEAD
    return [together(plan, i, ranks[i : i + plan.resident], queued) for i in firsts]


def rehearse(
    config: RunConfig,
    plan: Plan,
    rank: int,
    real: dict[str, Tensor],
    watch: Callable[[RankEngine], None] | None = None,
) -> RankMemory:
    """Returns the memory of one rank of a plan without errors.

    ``real`` are parameters and buffers by name, of the rank at least; they may lie nowhere.
    ``watch`` gets what the rank runs, before it runs a step; without it nothing is compiled.
    """
    # A backend of the host copies what it sends through the host's memory.
    plan = plan.with_results(resident=1)  # as if each were alone in its process
    backends, on_gpu = backends_of_plan(plan), plan.device == CUDA
    live = LiveBytes(on_gpu)
    staging = NullStaging() if on_gpu and not {*backends} <= {*STREAMED} else None
    null = rehearsal(rank, staging, backends)
    # The innermost mode sees an operator first: LiveBytes runs it, FakeTensorMode computes shapes,
    # and LiveBytes counts the storages of what comes back.
    device = on_gpus() if on_gpu else contextlib.nullcontext()
    with device, null as wire, FakeTensorMode(allow_non_fake_inputs=True), live:
        wire.on_receive = lambda tensor: live.assign([tensor], "buffers")
        wire.on_wait = live.note_wait
        contexts = contexts_of(plan, rank)
        names = names_of(contexts, real)
        # A user's network is there as a whole until the rank's own tensors are placed.
        others = [_blank(t, None) for n, t in real.items() if n not in names and not t.is_meta]
        tensors = {name: _blank(real.get(name), plan.graph.params.get(name)) for name in names}
        place_tensors(tensors, image_dtype(config), plan.graph)
        del others
        if on_gpu:
            live.forget_peak()  # so far it is in the host's memory
        feed = [_blank_feed(config, context, live) for context in contexts]
        start = live.peak_bytes  # what is made for training is empty until the first step
        off = dataclasses.replace(config, engine=EngineConfig())
        engine = assemble(config if watch else off, contexts, tensors, [], releases=True)
        for kind in OF_WORLD:
            engine.executor.methods[kind] = lambda event: None  # there are no numbers to look at
        for module in engine.modules:
            if isinstance(module, BandModule):
                module.most_bands = module.bands.steady
        packed = engine.prepare()
        live.assign([*tensors.values(), *engine.derived.tensors.values(), *packed], "params")
        spill = BlankSpill()
        if config.memory.spill is not None and plan.training:
            engine.keep_in(spill)
        if engine.optimizer is not None:
            # The rehearsed step is the second of a run: the optimiser's state is there.
            for parameter in engine.optimizer.parameters:
                live.assign(engine.optimizer.kept_of(parameter, make=True).values(), "optimizer")
                mark = parameter.register_post_accumulate_grad_hook
                mark(lambda p: live.assign([p.grad], "grads"))  # type: ignore[no-untyped-call]
            engine.executor.optimiser = _blank_update(engine.optimizer)
        start = start if plan.training else live.peak_bytes
        nodes = (node for context in contexts for node in plan.nodes(context.stage.index))
        live.keep_workspaces(nodes, cublas_workspaces(config))
        live.forget_peak()
        if watch is not None:
            watch(engine)
        observed = observe_blank(config, engine)
        if not on_gpu:
            live.now["buffers"] += observed
        targets = [target for context in contexts for target in _targets(config, context)]
        live.assign(targets, "buffers")
        engine.executor.step(feed, see=_keep_outputs(config, plan))
        rehearse_choice(config, engine, lambda: engine.executor.step(feed))
    parts = {f"{part}_bytes": size for part, size in live.at_peak.items()}
    parts |= {"spill_bytes": spill.most, "waiting_bytes": live.waiting}
    mpi_bytes, shm_bytes = MPI_BYTES if MPI in backends else 0, backend_bytes(plan, rank)
    if not on_gpu:
        parts["buffers_bytes"] += PROCESS_BYTES[config.task.name] + kernel_bytes(contexts)
        if SOURCES[config.data.name].reads_files:
            parts["buffers_bytes"] += max(_image_bytes(config, context) for context in contexts)
        # No kernel of a backward pass has been compiled by then, and no message has been sent.
        start += PROCESS_BYTES["infer"] + mpi_bytes
        facts = {"mpi_bytes": mpi_bytes, "shm_bytes": shm_bytes, "start_bytes": start}
        return RankMemory(**parts, **facts)
    host = observed + mpi_bytes + shm_bytes + HOST_CONTEXT_BYTES + PROCESS_BYTES[config.task.name]
    host += sum(_pinned_bytes(config, c) + _image_bytes(config, c) for c in contexts)
    host += sum(map(pinned_bytes, staging.sizes if staging is not None else ()))
    parts |= {"nccl_bytes": nccl_bytes(plan, rank), "context_bytes": CONTEXT_BYTES}
    start += parts["nccl_bytes"] + CONTEXT_BYTES
    memory = RankMemory(**parts, host_bytes=host, start_bytes=start)
    return dataclasses.replace(memory, allocator_bytes=round(ALLOCATOR * memory.peak_bytes))


def _blank_update(optimizer: Optimizer) -> Any:
    # An optimiser that allocates what a step needs beside the state. Those without a fused kernel
    # read their number of steps, which a rehearsal has not.
    with unset_fake_temporarily(), torch.no_grad(), LiveBytes() as live:
        tiny = nn.Parameter(torch.ones(2**10))
        tiny.grad = torch.ones_like(tiny)
        again = Optimizer([tiny], type(optimizer.torch), optimizer.settings)
        again.step()
        live.forget_peak()
        before = live.peak_bytes
        again.step()
        copies = int((live.peak_bytes - before) / tiny.nbytes)
    size, dtype = max(map(torch.numel, optimizer.parameters)), optimizer.parameters[0].dtype
    return SimpleNamespace(
        zero_grad=optimizer.zero_grad, step=lambda number: torch.empty(copies * size, dtype=dtype)
    )


def network_of(config: RunConfig) -> nn.Module:
    """Returns the network of a config, for its shapes; the last one that was built is kept."""
    return _built(json.dumps(to_dict(config)["model"]), config.seed, config.height, config.width)


@functools.lru_cache(maxsize=1)
def _built(model: str, seed: int, height: int, width: int) -> nn.Module:
    # A network of the user's may take long to build, and is traced before its step is rehearsed.
    return build_model(build(ModelConfig, json.loads(model)), seed, (height, width))


def _blank_feed(config: RunConfig, context: Context, live: LiveBytes) -> Iterator[Batch]:
    # Microbatches of the right shape, as many ahead as the loader would have read.
    needs, dtype = needs_of(config, context), image_dtype(config)

    def images(rect: Rect) -> Tensor:
        shape = needs.num_samples, config.model.channels, rect[1] - rect[0], rect[3] - rect[2]
        return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)

    def rows(some: Interval) -> Tensor:
        # With those that a thread reads ahead meanwhile.
        made = [images((*some, 0, config.width)) for _ in range(1 + (config.data.prefetch > 0))]
        live.assign(made, "buffers")
        waiting[:] = made[1:]
        return made[0]

    waiting: list[Tensor] = []

    def read() -> Batch:
        if context.plan.band_rows:
            return BandImages(rows, ahead=False), None
        target = None
        if needs.compares:
            classes = torch.empty(needs.num_samples, dtype=torch.int64)
            target = images(needs.target) if needs.target else classes
            if config.objective.compares in ROW_KINDS:
                width = context.plan.graph.shape(context.plan.graph.output)[1]
                wide = torch.promote_types(dtype, torch.float32)
                target = torch.empty(needs.num_samples, width, dtype=wide)
            if needs.target and config.data.name == "masks":
                r0, r1, c0, c1 = needs.target
                target = torch.empty(needs.num_samples, r1 - r0, c1 - c0, dtype=torch.int64)
        batch = images(needs.window) if needs.window else None, target
        live.assign(batch, "buffers")
        return batch

    def take(left: int) -> Iterator[Batch]:
        while True:  # while one microbatch is taken another one is read, if the run has more
            if left > 0 or not ahead:
                ahead.append(read())
            left -= 1
            yield ahead.popleft()

    every = config.steps * len(context.plan.microbatches_of(context.direction))
    ahead = deque(read() for _ in range(min(config.data.prefetch, every)))
    return take(every - len(ahead))


def _targets(config: RunConfig, context: Context) -> list[Tensor]:
    # What an evaluation has read of what it compares the outputs of a slot with.
    plan, kind = context.plan, kind_of(config, context.plan.graph)
    is_last = context.stage.index == len(plan.stages) - 1
    if config.task.name != "evaluate" or not is_last or kind in ROW_KINDS:
        return []
    samples, (_, channels, *size) = (
        needs_of(config, context).num_samples,
        plan.graph.shape(plan.graph.output),
    )
    if context.stage.layout[plan.graph.output] == TILED:
        r0, r1, c0, c1 = context.own_of(plan.graph.output)
        size = [r1 - r0, c1 - c0]
    like = torch.empty(samples, dtype=torch.int64)
    if kind == IMAGES:
        dtype = torch.promote_types(image_dtype(config), torch.float32)
        like = torch.empty(samples, channels, *size, dtype=dtype)
    elif config.data.name == "masks":
        like = torch.empty(samples, *size, dtype=torch.int64)
    every = config.steps * len(plan.microbatches_of(context.direction))
    return [like.clone() for _ in range(min(1 + config.data.prefetch, every))]


def _keep_outputs(config: RunConfig, plan: Plan) -> Callable[[Context, Tensor], None] | None:
    # What an evaluation keeps of a step: images in tiles, whose borders come when it is done.
    tiled = plan.stages[-1].layout[plan.graph.output] == TILED
    if config.task.name != "evaluate" or not tiled or kind_of(config, plan.graph) != IMAGES:
        return None
    kept: list[Tensor] = []
    return lambda context, out: kept.append(out if out.dtype == torch.float64 else out.float())


def _pinned_bytes(config: RunConfig, context: Context) -> int:
    # Of the host beside a GPU, for microbatches that are copied to it.
    num_samples, bits = needs_of(config, context).num_samples, torch.finfo(image_dtype(config)).bits
    sizes = [num_samples * size * bits // 8 for size in _window_sizes(config, context)]
    return PINNED_BATCHES * sum(map(pinned_bytes, sizes))


def _image_bytes(config: RunConfig, context: Context) -> int:
    # One image as it is read: what its decoder takes, and its window as fp32.
    sizes = _window_sizes(config, context)
    is_last = context.stage.index == len(context.plan.stages) - 1
    if is_last and config.task.name == "evaluate" and config.data.name in ("masks", "pairs"):
        sizes.append(0)  # its targets, which LiveBytes has counted
    return 4 * max(sizes) + decoding_bytes(config) if sizes else 0


def _window_sizes(config: RunConfig, context: Context) -> list[int]:
    needs = needs_of(config, context)
    rects = [rect for rect in (needs.window, needs.target) if rect is not None]
    return [config.model.channels * (b - a) * (d - c) for a, b, c, d in rects]


def _blank(tensor: Tensor | None, fact: Parameter | None) -> Tensor:
    # A tensor as a real one, or as the plan describes it where a rank has dropped it.
    if tensor is None:
        assert fact is not None
        return torch.empty(fact.shape, dtype=getattr(torch, fact.dtype))
    blank = torch.empty(tensor.shape, dtype=tensor.dtype)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(blank, requires_grad=tensor.requires_grad) if is_parameter else blank


def kernel_bytes(contexts: Iterable[Context]) -> int:
    """Returns the bytes of the 8-bit kernels of a rank's slots; kernels of one shape are one.

    oneDNN writes machine code for each shape of a convolution or product, and for each reordering
    of a weight, and keeps it: of ResNet-50 in 32 tiles 3.2 MiB beside 22.4 MiB of weights.
    """
    kernels: set[Hashable] = set()
    for context in contexts:
        graph = context.plan.graph
        for node in context.plan.nodes(context.stage.index):
            if facts_of(node.kind).kernel_per_shape:
                shapes = [graph.shape(node.inputs[0]), graph.shape(node.name)]
                shapes += [graph.params[name].shape for name in node.params]
                adds = node.args.get("other") is not None
                kernels.add((node.kind, adds, *map(tuple, shapes)))
    return KERNEL_BYTES * len(kernels)
