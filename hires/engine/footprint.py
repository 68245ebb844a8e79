"""Predicts the memory of every rank by rehearsing one step of its program without memory.

The objects of a run are built for one rank at a time, and run one step:

    executor, stages, gradient sums, optimiser     the classes of a run, from config and plan
      |- tensors    FakeTensorMode                 shapes and no memory
      |- messages   comm.rehearsal.NullBackend complete at once, keep their tensors alive
      '- storages   LiveBytes                      counted until the last tensor on them is gone

    bytes |            .--F2--.
          |     .--F1--'      '--B1--.              the fullest moment is the prediction: what is
          |--F0-'                    '--B2--        alive then, by what it is for
          |  parameters, optimiser
          +---------------------------------> step

So activations in flight follow the schedule, and halos, receive buffers and recomputation are those
of a run. What no operator allocates (shared memory, the process) is added.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from hires.comm import rehearsal
from hires.comm.rehearsal import NullStaging
from hires.core.config.fields import build
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.config.training_config import INFERENCE, EngineConfig
from hires.core.evaluation_summary import IMAGES, ROW_KINDS
from hires.data.source import SOURCES
from hires.data.start_check import decoding_bytes
from hires.engine.build import (
    RankEngine,
    assemble,
    contexts_of,
    named_tensors,
    names_of,
    place_tensors,
)
from hires.engine.calibrate import observe_blank, rehearse_choice
from hires.engine.live_bytes import LiveBytes
from hires.engine.loader import image_dtype, needs_of
from hires.engine.memory_beside import backend_bytes, kernel_bytes
from hires.engine.optimizer import Optimizer
from hires.nets.build_network import build_model
from hires.parallel.context import Context
from hires.parallel.slot_pass import Batch
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
)
from hires.plan.plan import Plan
from hires.plan.rank_kinds import rehearsed_ranks
from hires.plan.routes import STREAMED
from hires.plan.rules import TILED
from hires.plan.traffic import backends_of_plan
from hires.plan.validation import kind_of

PROCESS_BYTES = {"train": 8 * 2**20, **dict.fromkeys(INFERENCE, 3 * 2**20)}
PROCESS_BYTES["calibrate"] = PROCESS_BYTES["infer"]
"""What a rank needs beside its tensors once it runs: oneDNN's compiled kernels and their caches,
the plan as Python objects, threads of the transport. Between the imports and the second step of
ResNet-50 and -101, 224 to 512 pixels, a rank grew by 7 to 9 MiB more than its tensors in training
and by 1 MiB in inference; of ResNet-18 and -50 at 32 pixels in sp+gems by 2.8 to 3.8 MiB, in fp32
and (without :mod:`hires.engine.memory_beside`) in int8."""
ALLOCATOR = 1 / 8
"""What torch's allocator of GPU memory needs beyond the tensors, as a share of them: it keeps
unused parts of segments, and returns whole ones when memory is short. A simulation of torch 2.13's
had 2 to 49 % beyond for ten networks, and less than 13 % for half of them."""

# FakeTensorMode runs an operator without a shape function on real zeros of the size of its inputs:
# minutes and gigabytes for a large image. These have none in torch.
_META = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
_META.impl(  # type: ignore[no-untyped-call]
    "batch_norm_update_stats", lambda x, *rest: (x.new_empty(x.shape[1]), x.new_empty(x.shape[1]))
)
_FUSED = torch.library.Library("mkldnn", "IMPL", "Meta")  # type: ignore[no-untyped-call]
_FUSED.impl(  # type: ignore[no-untyped-call]
    "_convolution_pointwise.binary", lambda x, other, *rest: torch.empty_like(other)
)
for _kernel in ("_reorder_convolution_weight", "_reorder_linear_weight"):
    _FUSED.impl(_kernel, lambda weight, *rest: torch.empty_like(weight))  # type: ignore[no-untyped-call]
_FUSED.impl(  # type: ignore[no-untyped-call]
    "_convolution_pointwise_.binary", lambda other, *rest: other
)
_ONEDNN = torch.library.Library("onednn", "IMPL", "Meta")  # type: ignore[no-untyped-call]
for _kernel in ("qconv_prepack", "qlinear_prepack"):
    _ONEDNN.impl(_kernel, lambda weight, *rest: torch.empty_like(weight))  # type: ignore[no-untyped-call]


def footprint(config: RunConfig, plan: Plan, model: nn.Module | None = None) -> list[RankMemory]:
    """Returns the memory of every rank of one replica in a step; of similar ranks one rehearses.

    ``model`` is the network, built if it is left out.
    """
    model = network_of(config) if model is None else model
    chosen, real = rehearsed_ranks(plan), named_tensors(model)
    memory = {rank: rehearse(config, plan, rank, real) for rank in sorted(set(chosen))}
    return [memory[rank] for rank in chosen]


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
    backends, on_gpu = backends_of_plan(plan), plan.device == CUDA
    live = LiveBytes(on_gpu)
    staging = NullStaging() if on_gpu and not {*backends} <= {*STREAMED} else None
    null = rehearsal(rank, staging, backends)
    # The innermost mode sees an operator first: LiveBytes runs it, FakeTensorMode computes shapes,
    # and LiveBytes counts the storages of what comes back.
    device = on_gpus() if on_gpu else contextlib.nullcontext()
    with device, null as wire, FakeTensorMode(allow_non_fake_inputs=True), live:
        wire.on_receive = lambda tensor: live.assign([tensor], "buffers")
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
        packed = engine.prepare()
        live.assign([*tensors.values(), *engine.derived.tensors.values(), *packed], "params")
        if engine.optimizer is not None:
            # The rehearsed step is the second of a run: the optimiser's state is there.
            for parameter in engine.optimizer.parameters:
                live.assign(engine.optimizer.kept_of(parameter, make=True).values(), "optimizer")
                mark = parameter.register_post_accumulate_grad_hook
                mark(lambda p: live.assign([p.grad], "grads"))  # type: ignore[no-untyped-call]
            engine.executor.optimiser = _BlankUpdate(engine.optimizer)
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


class _BlankUpdate:
    # An optimiser that allocates what a step needs beside the state. Those without a fused kernel
    # read their number of steps, which a rehearsal has not.

    def __init__(self, optimizer: Optimizer) -> None:
        self.zero_grad = optimizer.zero_grad
        self._largest = max(map(torch.numel, optimizer.parameters))
        self._dtype = optimizer.parameters[0].dtype
        self._copies = _copies_in_a_step(optimizer)

    def step(self, number: int) -> None:
        torch.empty(self._copies * self._largest, dtype=self._dtype)


def _copies_in_a_step(optimizer: Optimizer) -> int:
    # How many tensors of a parameter's size a step makes beside what it keeps.
    with unset_fake_temporarily(), torch.no_grad(), LiveBytes() as live:
        tiny = nn.Parameter(torch.ones(2**10))
        tiny.grad = torch.ones_like(tiny)
        again = Optimizer([tiny], type(optimizer.torch), optimizer.settings)
        again.step()
        live.forget_peak()
        before = live.peak_bytes
        again.step()
        return int((live.peak_bytes - before) / tiny.nbytes)


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

    def read() -> Batch:
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
    plan, layout = context.plan, context.stage.layout
    output = plan.graph.output
    if config.task.name != "evaluate" or context.stage.index < len(plan.stages) - 1:
        return []
    if kind_of(config, plan.graph) in ROW_KINDS:
        return []
    samples, (_, channels, *size) = needs_of(config, context).num_samples, plan.graph.shape(output)
    if layout[output] == TILED:
        r0, r1, c0, c1 = context.own_of(output)
        size = [r1 - r0, c1 - c0]
    like = torch.empty(samples, dtype=torch.int64)
    if kind_of(config, plan.graph) == IMAGES:
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

    def see(context: Context, output: Tensor) -> None:
        kept.append(output if output.dtype == torch.float64 else output.float())

    return see


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
