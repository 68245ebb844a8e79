"""Compiles the regions of a rank before its first step.

One step is rehearsed without memory (:mod:`hires.engine.footprint`). It shows with what each region
is called; then each is compiled with zeros of the same shapes, forward and backward:

    rehearsal     region 0 (2, 64, 56, 56), in training ...    region 1 (2, 64, 28, 28) ...
    compiling     zeros -> region 0 -> gradients of zeros      zeros -> region 1 -> ...
    steps         nothing is compiled while a step is measured

All ranks compile at once, and none counts as stuck meanwhile. What torch has compiled stays in the
user's cache, from which later attempts on such a machine take it. With ``engine.compile=tensorrt``
:mod:`hires.engine.region_tensorrt` compiles them in place of torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.ranks import machine
from hires.core.ranks.machine import TENSORRT
from hires.core.store import provenance
from hires.core.store.files import cache_dir
from hires.engine.build import RankEngine
from hires.engine.device import HOST
from hires.engine.region_calls import Compilation, RegionCall, blank, calls_of
from hires.engine.region_tensorrt import compile_with_tensorrt
from hires.parallel.compiled_region import CompiledRegion
from hires.parallel.context import Context
from hires.parallel.stage import StageModule

MOST_VARIANTS = 64
"""Of one region: in inference, in training and for the second run, for each shape and type."""
PROGRESS_S = 20.0
"""How often the log has the progress of compilation."""

log = logging.getLogger(__name__)


def compile_regions(engine: RankEngine, config: RunConfig) -> Compilation | None:
    """Compiles what ``engine.compile`` says; all ranks call it together, before the first step."""
    if config.engine.compile == "off":
        return None
    began_s = time.perf_counter()
    with comm.activity.may_stand_still(comm.PATIENCE_S):
        _prepare(engine, config)
        if config.engine.compile == TENSORRT:
            made = compile_with_tensorrt(engine, config)
        else:
            regions = _compile_all(engine, config)
            failed = sum(bool(region.failure) for region in regions)
            made = Compilation(0.0, len(regions), failed)
        comm.max_all(0, patient=True)  # no rank waits for a message of one that still compiles
    made.compile_s = time.perf_counter() - began_s
    log.info("compiled %d regions in %.1f s", made.regions - made.failed, made.compile_s)
    return made


class LateGraphs:
    """Counts what torch compiles once steps run, which the rehearsal did not foresee."""

    def __init__(self, config: RunConfig) -> None:
        self._is_on = config.engine.compile != "off"
        self._before = self._graphs()

    def of_step(self, step: int) -> int:
        """Returns how many graphs were compiled since the last call, and warns of them."""
        now = self._graphs()
        late, self._before = now - self._before, now
        if late:
            log.warning("torch compiled %d graphs in step %d, which took longer by it", late, step)
        return late

    def _graphs(self) -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] if self._is_on else 0


def _prepare(engine: RankEngine, config: RunConfig) -> None:
    mode = config.engine.compile
    lacks = machine.missing_compiler(engine.device.torch.type, mode)
    if lacks is not None:  # on a node that the launcher has not seen
        raise ConfigError(f"engine.compile={mode}: {lacks}, or use engine.compile=off")
    if mode == TENSORRT:
        return
    # Torch's own cache is in /tmp, where another user may have put a folder of that name.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_cache()))
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


def _cache() -> Path:
    # Home folders are shared by the nodes of a cluster, and torch compiles for the very CPU: code
    # for another one ends with SIGILL.
    made_for = f"{torch.__version__} {provenance.cpu_kind()}"
    return cache_dir() / "compiled" / hashlib.sha256(made_for.encode()).hexdigest()[:16]


def _compile_all(engine: RankEngine, config: RunConfig) -> list[CompiledRegion]:
    calls = calls_of(engine, config)
    made: list[CompiledRegion] = []
    shown_s = time.monotonic()
    total = sum(len(module.regions) for module in engine.modules)
    for direction, module in enumerate(engine.modules):
        for number, region in enumerate(module.regions):
            region.compile(len(made))
            for call in calls.get((direction, number), ()):
                if not region.failure:
                    _compile(region, call, module, engine.contexts[direction])
            made.append(region)
            if time.monotonic() - shown_s > PROGRESS_S:
                shown_s = time.monotonic()
                log.info("compiled %d of %d regions", len(made), total)
    return made


def _compile(
    region: CompiledRegion, call: RegionCall, module: StageModule, context: Context
) -> None:
    """Runs a region once on zeros; its running statistics and gradients stay as they are."""
    tensors = [module.tensors[name] for name in region.params]
    buffers = [t for t in tensors if not isinstance(t, torch.nn.Parameter)]
    before, was_recomputing = [t.detach().clone() for t in buffers], context.recomputing
    values = dict(zip(region.inputs, (blank(i, context.device) for i in call.inputs), strict=True))
    given, context.recomputing = [*values.values()], call.recomputing
    low, kind = call.lowered, context.device.type
    try:
        with (
            torch.set_grad_enabled(call.grad),
            torch.autocast(kind, dtype=low, enabled=low is not None),
        ):
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
