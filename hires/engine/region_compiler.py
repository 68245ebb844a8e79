"""Compiles the regions of a rank before its first step, by torch or by Torch-TensorRT.

One step is rehearsed without memory (:mod:`hires.engine.footprint`). It shows with what each region
is called; then each is compiled with zeros of the same shapes, forward and backward:

    rehearsal     region 0 (2, 64, 56, 56), in training ...    region 1 (2, 64, 28, 28) ...
    compiling     zeros -> region 0 -> gradients of zeros      zeros -> region 1 -> ...
    steps         nothing is compiled while a step is measured

All ranks compile at once, and none counts as stuck meanwhile. What torch has compiled stays in the
user's cache, from which later attempts on such a machine take it.

``engine.compile=tensorrt`` is for inference on NVIDIA GPUs:

    region --> torch.export --> torch_tensorrt.dynamo.compile --> one function for each input shape

**Never run**: no engine has been built by hires yet. It is written from the documentation and the
source of Torch-TensorRT 2.13, whose public functions are all that it calls. Operators that it
cannot convert stay in torch; a region that it cannot compile runs node by node, with a warning
that names the cause. Engines are built again at each start: Torch-TensorRT's own cache is pickled.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.ranks import machine
from hires.core.ranks.machine import TENSORRT
from hires.core.store import provenance
from hires.core.store.files import cache_dir
from hires.engine.device import HOST
from hires.engine.footprint import rehearse
from hires.engine.rank_engine import RankEngine
from hires.parallel.compiled_region import CompiledRegion
from hires.parallel.context import Context
from hires.parallel.stage import StageModule

MOST_VARIANTS = 64
"""Of one region: in inference, in training and for the second run, for each shape and type."""
Function = Callable[..., Sequence[Tensor]]
Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]

log = logging.getLogger(__name__)


class Input(NamedTuple):
    """A tensor that a region takes."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


class RegionCall(NamedTuple):
    """With what a region is called."""

    inputs: tuple[Any, ...]
    """An :class:`Input` for each tensor; a list has a tuple of them."""
    grad: bool
    recomputing: bool
    lowered: torch.dtype | None
    """Type of autocast."""


@dataclass
class Compilation:
    """What was compiled on one rank, as ``metrics.jsonl`` has it."""

    compile_s: float
    regions: int
    failed: int
    """Regions that run node by node."""


def compile_regions(engine: RankEngine, config: RunConfig) -> Compilation | None:
    """Compiles what ``engine.compile`` says; all ranks call it together, before the first step."""
    if config.engine.compile == "off":
        return None
    began_s = time.perf_counter()
    with comm.activity.may_stand_still(comm.PATIENCE_S):
        _prepare(engine, config)
        calls = _calls_of(engine, config)
        if config.engine.compile == TENSORRT:
            regions = _compile_with_tensorrt(engine, config, calls)
        else:
            regions = _compile_with_torch(engine, calls)
        comm.max_all(0, patient=True)  # no rank waits for a message of one that still compiles
    failed = sum(bool(region.failure) for region in regions)
    made = Compilation(time.perf_counter() - began_s, len(regions), failed)
    log.info("compiled %d regions in %.1f s", made.regions - made.failed, made.compile_s)
    return made


def _prepare(engine: RankEngine, config: RunConfig) -> None:
    mode = config.engine.compile
    lacks = machine.missing_compiler(engine.device.torch.type, mode)
    if lacks is not None:  # on a node that the launcher has not seen
        raise ConfigError(f"engine.compile={mode}: {lacks}, or use engine.compile=off")
    if mode == TENSORRT:
        return
    # Torch's own cache is in /tmp, where another user may have put a folder of that name. Home
    # folders are shared by the nodes of a cluster, and torch compiles for the very CPU: code for
    # another one ends with SIGILL.
    made_for = hashlib.sha256(f"{torch.__version__} {provenance.cpu_kind()}".encode())
    cache = cache_dir() / "compiled" / made_for.hexdigest()[:16]
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    from torch._inductor import config as inductor

    inductor.compile_threads = config.launcher.threads  # every rank compiles on its own cores
    # Weights that never change become constants, in the order in which oneDNN reads them; it has no
    # order for float64.
    on_host = engine.device.torch == HOST
    constant_weights = config.task.name != "train" and config.image_type != "float64"
    inductor.freezing = constant_weights and on_host
    # Or Triton's reductions are chosen by their times, and attempts differ in their last bits.
    inductor.deterministic = not on_host
    if on_host:
        inductor.joint_custom_post_pass = _recomputed_masks()
    torch._dynamo.config.recompile_limit = MOST_VARIANTS
    torch._functorch.config.force_non_lazy_backward_lowering = True


def _recomputed_masks() -> Any:
    """Returns a pass of torch's compiler that makes masks again where the backward pass needs them.

    A ReLU that is compiled for training keeps a mask of booleans, one byte a number. On CPUs torch
    2.13 writes them one by one, at 12 ns each: ten times what the ReLU takes. What the mask is made
    of is mostly kept anyway, and one comparison in the backward kernel is free.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class RecomputedMasks(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for node in graph.nodes:
                value = node.meta.get("val")
                is_mask = isinstance(value, Tensor) and value.dtype == torch.bool
                if node.op == "call_function" and is_mask:
                    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

        def uuid(self) -> str:  # its version, for torch's cache key
            return "hires.recomputed_masks.1"

    return RecomputedMasks()


def _calls_of(engine: RankEngine, config: RunConfig) -> dict[tuple[int, int], list[RegionCall]]:
    """Returns with what a step calls each region, each once, by direction and number."""
    by_region = dict[tuple[int, int], dict[RegionCall, None]]()

    def note(calls: dict[RegionCall, None], context: Context, values: list[Any]) -> None:
        kind = context.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        call = RegionCall(_seen(values), torch.is_grad_enabled(), context.recomputing, low)
        calls[call] = None

    def watch(rehearsed: RankEngine) -> None:
        for direction, module in enumerate(rehearsed.modules):
            for number, region in enumerate(module.regions):
                calls = by_region.setdefault((direction, number), {})
                region.watch = functools.partial(note, calls, rehearsed.contexts[direction])

    rehearse(config, engine.context.plan, engine.context.rank, engine.tensors, watch)
    return {key: [*calls] for key, calls in by_region.items()}


def _seen(item: Any) -> Any:
    if isinstance(item, Tensor):
        return Input(item.shape, item.stride(), item.dtype, item.requires_grad)
    return tuple(map(_seen, item))


def _blank(item: Any, device: torch.device) -> Any:
    # Zeros, with strides and need of a gradient, as a call has its inputs.
    if not isinstance(item, Input):
        return [_blank(one, device) for one in item]
    made = torch.empty_strided(item.shape, item.strides, dtype=item.dtype, device=device).zero_()
    return made.requires_grad_(item.needs_grad)


def _compile_with_torch(
    engine: RankEngine, calls: dict[tuple[int, int], list[RegionCall]]
) -> list[CompiledRegion]:
    made: list[CompiledRegion] = []
    for direction, module in enumerate(engine.modules):
        for number, region in enumerate(module.regions):
            region.compile(len(made))
            for call in calls.get((direction, number), ()):
                if not region.failure:
                    _compile(region, call, module, engine.contexts[direction])
            made.append(region)
    return made


def _compile(
    region: CompiledRegion, call: RegionCall, module: StageModule, context: Context
) -> None:
    """Runs a region once on zeros; its running statistics and gradients stay as they are."""
    tensors = [module.tensors[name] for name in region.params]
    buffers = [t for t in tensors if not isinstance(t, nn.Parameter)]
    before, was_recomputing = [t.detach().clone() for t in buffers], context.recomputing
    values = dict(zip(region.inputs, (_blank(i, context.device) for i in call.inputs), strict=True))
    given, context.recomputing = [*values.values()], call.recomputing
    low, kind = call.lowered, context.device.type
    lowering = torch.autocast(kind, dtype=low, enabled=low is not None)
    try:
        with torch.set_grad_enabled(call.grad), lowering:
            region.run(values)
        made = [values[name] for name in region.outputs if isinstance(values[name], Tensor)]
        made = [one for one in made if one.requires_grad]
        leaves = [t for t in [*given, *tensors] if isinstance(t, Tensor) and t.requires_grad]
        if made and leaves:
            # Not backward(): a sum of gradients would begin.
            zeros = [torch.zeros_like(one) for one in made]
            torch.autograd.grad(made, leaves, zeros, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        region.give_up(error)
    finally:
        context.recomputing = was_recomputing
        for tensor, kept in zip(buffers, before, strict=True):
            tensor.data.copy_(kept)


class RegionModule(nn.Module):
    """A region of a rank that holds whole maps, as a function of its inputs, in their order."""

    def __init__(self, region: CompiledRegion) -> None:
        super().__init__()
        self._region = region

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Returns the region's outputs in their order."""
        region = self._region
        values: dict[str, Any] = dict(zip(region.inputs, tensors, strict=True))
        for node, run in region.steps:
            values[node.name] = run(values)
        return tuple(values[name] for name in region.outputs)


def _compile_with_tensorrt(
    engine: RankEngine, config: RunConfig, calls: dict[tuple[int, int], list[RegionCall]]
) -> list[CompiledRegion]:
    regions: list[CompiledRegion] = []
    with tempfile.TemporaryDirectory(prefix="hires-tensorrt-") as folder, torch.no_grad():
        build = functools.partial(
            importlib.import_module("torch_tensorrt").dynamo.compile,
            device=engine.device.torch,
            disable_tf32=config.precision.name != "tf32",
            min_block_size=1,
            cache_built_engines=False,
            reuse_cached_engines=False,
            # By default one file in /tmp, which all ranks and users would write.
            timing_cache_path=str(Path(folder) / "timing"),
        )
        for direction, module in enumerate(engine.modules):
            for number, region in enumerate(module.regions):
                regions.append(region)
                try:
                    own = calls.get((direction, number), ())
                    _build_engines(region, own, engine.device.torch, build)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # of any class: the library's, torch's, the system's
                    region.give_up(error, "TensorRT")
    return regions


def _build_engines(
    region: CompiledRegion,
    calls: Sequence[RegionCall],
    device: torch.device,
    build: Callable[..., Function],
) -> None:
    functions: dict[Shapes, Function] = {}
    for call in calls:
        if not all(isinstance(item, Input) for item in call.inputs):
            raise TypeError("it reads a list of tensors, and an engine reads tensors only")
        inputs = [_blank(item, device).detach().contiguous() for item in call.inputs]
        program = torch.export.export(RegionModule(region), tuple(inputs), strict=False)
        functions[_shapes(inputs)] = build(program, arg_inputs=inputs)

    def run(*inputs: Tensor) -> tuple[Tensor, ...] | None:
        function = functions.get(_shapes(inputs))
        if function is None:
            return None  # the region runs node by node
        return tuple(function(*(tensor.contiguous() for tensor in inputs)))

    region.use(run)


def _shapes(tensors: Sequence[Tensor]) -> Shapes:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
