"""Predicts the memory of every rank by rehearsing one step of its program without memory.

The objects of a run are built for one rank at a time, and run one step:

    executor, stages, gradient sums, optimiser      the classes of a run, from config and plan
      |- tensors    FakeTensorMode                  shapes and no memory
      |- messages   comm.rehearsal.SilentWire       complete at once, keep their tensors alive
      '- storages   LiveBytes                       counted until the last tensor on them is gone

    bytes |            .--F2--.
          |     .--F1--'      '--B1--.              the fullest moment is the prediction: what is
          |--F0-'                    '--B2--        alive then, by what it is for
          |  parameters, optimiser
          +---------------------------------> step

So activations in flight follow the schedule, and halos, receive buffers and recomputation are those
of a run. What no operator allocates (shared memory, the process) is added.

``python -m hires.engine.footprint`` answers the front end, one line of JSON for each: ``{"trace":
config}`` with ``{"graph": ...}``, ``{"memory": {"config": ..., "plan": ...}}`` with ``{"memory":
[...]}``, and both with ``{"error": ...}`` on failure.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hires.comm import rehearsal
from hires.comm.rehearsal import SilentWire
from hires.core.config.run_config import RunConfig, from_dict
from hires.engine.build import (
    RankEngine,
    assemble,
    cast,
    contexts_of,
    image_dtype,
    names_of,
    reads_images,
    reads_labels,
    target_rect,
)
from hires.engine.live_bytes import LiveBytes
from hires.engine.loader import Loaders
from hires.nets import trace
from hires.nets.build_network import build_model
from hires.parallel.context import Context
from hires.parallel.slot_pass import Batch
from hires.plan.memory import RankMemory
from hires.plan.plan import Plan
from hires.plan.rank_kinds import representatives

PROCESS_BYTES = {"train": 8 * 2**20, "infer": 2 * 2**20}
"""What a rank needs beside its tensors once it runs: oneDNN's compiled kernels and their caches,
the plan as Python objects, threads of the transport. Between the imports and the second step of
ResNet-50 and -101, 224 to 512 pixels, a rank grew by 7 to 9 MiB more than its tensors in training
and by 1 MiB in inference."""


def _batch_statistics(
    x: Tensor, mean: Tensor | None, var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Returns tensors of the shapes of the two statistics of each channel."""
    return x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


# FakeTensorMode runs an operator without a shape function on real zeros of the size of its inputs:
# minutes and gigabytes for a large image. These two have none in torch.
_META = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
_META.impl("_fused_sgd_", lambda *args, **kwargs: None)  # type: ignore[no-untyped-call]
_META.impl("batch_norm_update_stats", _batch_statistics)  # type: ignore[no-untyped-call]


def footprint(config: RunConfig, plan: Plan) -> list[RankMemory]:
    """Returns the memory of every rank of one replica in a step of a run.

    Of similar ranks one is rehearsed (:mod:`hires.plan.rank_kinds`).
    """
    model = build_model(config.model, config.seed)
    chosen = representatives(plan)
    memory = {rank: rehearse(config, plan, rank, model) for rank in sorted(set(chosen))}
    return [memory[rank] for rank in chosen]


def rehearse(config: RunConfig, plan: Plan, rank: int, model: nn.Module) -> RankMemory:
    """Returns the memory of one rank.

    Args:
        config: the run.
        plan: its plan, without errors.
        rank: a rank of the plan.
        model: the network; the values of its parameters are not used.
    """
    live = LiveBytes()
    silent = rehearsal(rank, config.comm.shared_memory)
    with silent as wire, FakeTensorMode(allow_non_fake_inputs=True) as mode, live:
        wire.on_receive = lambda tensor: live.assign([tensor], "buffers")
        contexts = contexts_of(plan, rank)
        twin = _twin(model, names_of(plan, contexts, model), mode)
        cast(twin, config)
        engine = assemble(config, contexts, twin, Loaders([]))
        live.assign([*twin.parameters(), *twin.buffers()], "params")
        _fill_optimizer(engine, live)
        feed = _Feed(config, contexts, live)
        live.forget_peak()
        engine.executor.step(feed)
    return _memory(live, wire, config.task.name)


def main() -> int:
    """Answers the front end until its input ends; returns the exit code."""
    return trace.main({"trace": trace.answer, "memory": _answer})


class _Feed:
    """Microbatches of the right shape, as many ahead as the loader would have read."""

    def __init__(self, config: RunConfig, contexts: list[Context], live: LiveBytes) -> None:
        self._config = config
        self._contexts = contexts
        self._live = live
        count = config.data.prefetch
        self._ahead = [deque(self._read(c) for _ in range(count)) for c in contexts]

    def next_microbatch(self, direction: int = 0) -> Batch:
        """Returns the next microbatch of a direction, while another one is read."""
        self._ahead[direction].append(self._read(self._contexts[direction]))
        return self._ahead[direction].popleft()

    def _read(self, context: Context) -> Batch:
        """Returns uninitialised images and labels, as far as the slot needs them."""
        first, end = context.samples
        r0, r1, c0, c1 = context.own(self._config.image)
        shape = (end - first, self._config.model.channels, r1 - r0, c1 - c0)
        images = labels = None
        if reads_images(context):
            dtype = image_dtype(self._config)
            images = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
        if reads_labels(context):
            labels = self._targets(context, end - first)
        self._live.assign([images, labels], "buffers")
        return images, labels

    def _targets(self, context: Context, count: int) -> Tensor:
        """Returns uninitialised classes, or larger images."""
        rect = target_rect(self._config, context)
        if rect is None:
            return torch.empty(count, dtype=torch.int64)
        shape = (count, self._config.model.channels, rect[1] - rect[0], rect[3] - rect[2])
        dtype = image_dtype(self._config)
        return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)


def _twin(model: nn.Module, names: set[str], mode: FakeTensorMode) -> nn.Module:
    """Returns the network with tensors without memory: those named on the CPU, the others meta."""
    memo: dict[int, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        device = "cpu" if name in names else "meta"
        blank: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            blank = nn.Parameter(blank, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = blank
    return _copied(model, memo)


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Returns a copy of a network with other tensors; modules are copied, nothing else."""
    twin = model.__class__.__new__(model.__class__)
    twin.__dict__.update(model.__dict__)
    for store in ("_parameters", "_buffers"):
        held = model.__dict__[store]
        twin.__dict__[store] = {key: memo.get(id(value), value) for key, value in held.items()}
    children = model.__dict__["_modules"]
    twin.__dict__["_modules"] = {
        key: None if child is None else memo.setdefault(id(child), _copied(child, memo))
        for key, child in children.items()
    }
    return twin


def _fill_optimizer(engine: RankEngine, live: LiveBytes) -> None:
    """Runs a first step of the optimiser, which allocates its state, and marks gradients."""
    parameters = [p for p in engine.parameters.values() if p.requires_grad]
    if engine.optimizer is None:
        return
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    live.assign(engine.optimizer.state(), "optimizer")
    for parameter in parameters:
        mark = parameter.register_post_accumulate_grad_hook
        mark(lambda p: live.assign([p.grad], "grads"))  # type: ignore[no-untyped-call]


def _memory(live: LiveBytes, wire: SilentWire, task: str) -> RankMemory:
    """Returns the parts of the fullest moment, with what no operator allocates."""
    parts = {f"{part}_bytes": size for part, size in live.at_peak.items()}
    parts["buffers_bytes"] += wire.shared_bytes() + PROCESS_BYTES[task]
    return RankMemory(**parts)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the memory of a plan's ranks, or the error of the rehearsal."""
    try:
        plan = Plan.from_dict(request["plan"])
        ranks = footprint(from_dict(request["config"]), plan)
    except Exception as error:  # a user's network and FakeTensorMode raise any type
        lines = str(error).strip().splitlines() or [""]
        return {"error": {"type": "RunError", "text": f"{type(error).__name__}: {lines[0]}"}}
    return {"memory": [memory.to_dict() for memory in ranks]}


if __name__ == "__main__":
    sys.exit(main())
