"""How do all holders of a stage come to the same gradients?

Gradients are summed over the tiles and averaged over everything else; the loss of every microbatch
is already divided by the number of microbatches of all replicas, so one sum over all holders does
it. Parameters behind the global pool have the whole gradient on every tile and count 1 / tiles.

On one machine all gradients are summed together at the end, from memory to memory. Elsewhere large
ones are summed where they lie, if there are cores to spare each as soon as the last microbatch's
backward pass has made it and those before it; small ones travel together at the end. All ranks
issue in one order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hires.comm import Group, Handle, all_reduce, all_reduce_coalesced
from hires.parallel.context import Context
from hires.parallel.flat import flat
from hires.parallel.running import RunningStatistics
from hires.parallel.stage import StageModule
from hires.plan.groups import gradient_group
from hires.plan.halos import ran_back

ALONE_BYTES = 2**20
"""Gradients from this size on travel alone."""


class GradientSync:
    """Sums gradients, and what the running statistics need, over the holders of a rank's stages.

    Args:
        contexts: the rank's slots.
        modules: the stage of each slot; copies of one stage share their parameters.
        counters: ``num_batches_tracked`` of the stages' norms, and how often each runs in one
            microbatch.
        early: whether large gradients set out during the last backward pass. Worth it where the
            transport's threads have cores to themselves; elsewhere they slow the pass down.
    """

    def __init__(
        self,
        contexts: list[Context],
        modules: list[StageModule],
        counters: list[tuple[Tensor, int]],
        early: bool = True,
    ) -> None:
        self.pieces = contexts[0].plan.pieces
        self.counters = counters
        self.by_stage: dict[int, StageSum] = {}
        for context, module in zip(contexts, modules, strict=True):
            index = context.stage.index
            if index not in self.by_stage:
                # With two slots the last backward pass completes only one of them.
                self.by_stage[index] = StageSum(context, module, early and len(contexts) == 1)
        self.sums = [self.by_stage[index] for index in sorted(self.by_stage)]
        self.contexts = contexts
        self.of_direction = [self.by_stage[context.stage.index] for context in contexts]

    def begin_step(self) -> None:
        """Begins a step."""
        for stage in self.sums:
            stage.begin_step()

    def before_forward(self, direction: int) -> None:
        """Says that a microbatch begins its forward pass."""
        self.of_direction[direction].running.before_forward()

    def after_forward(self, direction: int, microbatch: int) -> None:
        """Says that a microbatch has ended its forward pass; tile 0 notes its statistics."""
        counts = self.contexts[direction].tile == 0
        self.of_direction[direction].running.after_forward(microbatch, counts)

    def before_last_backward(self) -> None:
        """Says that the next backward pass completes the gradients."""
        for stage in self.sums:
            stage.is_last_pass = True

    @torch.no_grad()
    def end_step(self) -> None:
        """Makes gradients, running statistics and counters equal on all holders of each stage."""
        for stage in self.sums:  # all ranks in the order of stages
            stage.end_step()
        for counter, uses in self.counters:
            counter.add_(self.pieces * uses)


class StageSum:
    """The gradients of one stage on one rank."""

    def __init__(self, context: Context, module: StageModule, early: bool) -> None:
        plan, index = context.plan, context.stage.index
        self.group: Group = context.groups[gradient_group(plan, index)]
        self.num_tiles = context.stage.num_tiles
        self.running = RunningStatistics(context, module)
        reached = _reached(context)
        trainable = {n: p for n, p in module.parameters.items() if p.requires_grad and n in reached}
        self.repeated = {id(p) for n, p in trainable.items() if n not in module.partial}
        self.small = [p for p in trainable.values() if _num_bytes(p) < ALONE_BYTES]
        # Backward makes the last layer's gradients first.
        self.large = [p for p in reversed(trainable.values()) if _num_bytes(p) >= ALONE_BYTES]
        self.is_last_pass = False
        self.ready: set[int] = set()
        self.issued: list[Handle] = []
        self.num_issued = 0
        # A sum in memory takes all gradients at once, so it has no use for those that come early.
        if self.group.size > 1 and early and self.group.peers is None:
            for parameter in self.large:
                add_hook = parameter.register_post_accumulate_grad_hook
                add_hook(self._on_ready)  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """Begins a step."""
        self.running.begin_step()
        self.is_last_pass = False  # until GradientSync says so
        self.ready.clear()
        self.issued.clear()
        self.num_issued = 0

    @torch.no_grad()
    def end_step(self) -> None:
        """Makes gradients and running statistics equal on all holders of the stage."""
        for parameter in self.small + self.large:
            if parameter.grad is None:  # a tile without pixels
                parameter.grad = torch.zeros_like(parameter)
        terms = self.running.contributions()
        if self.group.size > 1:
            rest = self.large[self.num_issued :]
            if self.group.peers is None:
                for parameter in rest:
                    self._issue(parameter)
                rest = []
            scaled = [flat(self._scaled(p)) for p in rest + self.small]
            all_reduce_coalesced(scaled + terms, self.group)
            for handle in self.issued:
                handle.wait()
        self.running.end_step(terms)

    def _on_ready(self, parameter: Tensor) -> None:
        """Issues the sums of all large gradients whose predecessors are complete too."""
        if not self.is_last_pass:
            return
        self.ready.add(id(parameter))
        while self.num_issued < len(self.large) and id(self.large[self.num_issued]) in self.ready:
            self._issue(self.large[self.num_issued])

    @torch.no_grad()
    def _issue(self, parameter: nn.Parameter) -> None:
        """Begins the sum of one large gradient."""
        handle = all_reduce(flat(self._scaled(parameter)), self.group, wait=False)
        assert handle is not None
        self.issued.append(handle)
        self.num_issued += 1

    def _scaled(self, parameter: nn.Parameter) -> Tensor:
        """Returns this rank's term of a gradient."""
        assert parameter.grad is not None
        if self.num_tiles > 1 and id(parameter) in self.repeated:
            parameter.grad.div_(self.num_tiles)
        return parameter.grad


def _reached(context: Context) -> set[str]:
    """Returns the parameters to which the backward pass comes; as in torch, others get nothing."""
    nodes = ran_back(context.plan.graph, context.stage)
    by_name = context.plan.graph.by_name
    return {name for node in nodes for name in by_name[node].params}


def _num_bytes(parameter: nn.Parameter) -> int:
    """Returns the size of a parameter's gradient."""
    return parameter.numel() * parameter.element_size()
