"""Sums the gradients of a stage over its holders, in the messages that the plan lists.

Gradients are summed over the tiles and averaged over everything else; the loss of every microbatch
is already divided by the number of microbatches of all replicas, so a sum over all holders is all
that is left to do. Parameters behind the global pool have the whole gradient on every tile, so each
contributes 1 / tiles of it:

    tiles 0 and 1   conv.weight: a part on each      sum = part 0 + part 1
                    fc.weight: all of it on each     sum = all / 2 + all / 2

``hires.plan.groups`` decides what travels together, and which sums begin during the last backward
pass. Those begin as soon as autograd has made their gradient, if the plan has come to them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hires.comm import Handle, all_reduce, all_reduce_coalesced
from hires.parallel.context import Context
from hires.parallel.flat import flat
from hires.parallel.running import RunningStatistics
from hires.parallel.stage import StageModule
from hires.plan.event import Event
from hires.plan.groups import gradient_group, sums_of, trained


class StageGradients:
    """The gradients and running statistics of one stage on one rank."""

    def __init__(self, context: Context, module: StageModule) -> None:
        plan, stage = context.plan, context.stage
        self.sums = sums_of(plan, stage.index)
        self.parameters = {name: module.parameters[name] for name in trained(plan, stage.index)}
        self.num_tiles = stage.num_tiles
        self.partial = module.partial
        self.running = RunningStatistics(context, module)

    def terms(self, number: int) -> list[Tensor]:
        """Returns what this rank contributes to a sum; the tensors take the result."""
        one = self.sums[number]
        gradients = [flat(self._term(name)) for name in one.parameters]
        return [*gradients, *(self.running.statistics[name].terms for name in one.statistics)]

    def gradient(self, name: str) -> Tensor:
        """Returns a parameter's gradient; zeros where a tile without pixels has made none."""
        parameter = self.parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _term(self, name: str) -> Tensor:
        """Returns this rank's term of a gradient."""
        gradient = self.gradient(name)
        if self.num_tiles > 1 and name not in self.partial:
            gradient.div_(self.num_tiles)
        return gradient


class GradientSync:
    """The gradient sums of a rank.

    Args:
        contexts: the rank's slots.
        modules: the stage of each slot; copies of one stage share their parameters.
        counters: ``num_batches_tracked`` of the stages' norms, and how often each runs in one
            microbatch.
    """

    def __init__(
        self,
        contexts: list[Context],
        modules: list[StageModule],
        counters: list[tuple[Tensor, int]],
    ) -> None:
        plan = contexts[0].plan
        self.pieces = plan.pieces
        self.counters = counters
        self.cursor = contexts[0].cursor
        self.cursor.sums = self
        self.by_group: dict[int, StageGradients] = {}
        for context, module in zip(contexts, modules, strict=True):
            group = gradient_group(plan, context.stage.index)
            if group not in self.by_group:
                self.by_group[group] = StageGradients(context, module)
                self._add_hooks(group)
        self.contexts = contexts
        self.of_direction = [
            self.by_group[gradient_group(plan, context.stage.index)] for context in contexts
        ]
        self._ready: set[tuple[int, int]] = set()
        self._under_way: dict[tuple[int, int], Handle | None] = {}

    def begin_step(self) -> None:
        """Begins a step."""
        self._under_way.clear()
        for stage in self.by_group.values():
            stage.running.begin_step()

    def begin_backward(self) -> None:
        """Begins a backward pass, which makes its gradients anew."""
        self._ready.clear()

    def before_forward(self, direction: int) -> None:
        """Prepares the running statistics for a microbatch's forward pass."""
        self.of_direction[direction].running.before_forward()

    def after_forward(self, direction: int, microbatch: int) -> None:
        """Keeps the statistics of a microbatch; of several tiles, the first one does."""
        counts = self.contexts[direction].tile == 0
        self.of_direction[direction].running.after_forward(microbatch, counts)

    def is_ready(self, event: Event) -> bool:
        """Whether the gradient of a sum is complete in this pass."""
        return (event.peer, event.tag) in self._ready

    @torch.no_grad()
    def start(self, event: Event) -> None:
        """Begins the sum of one large gradient."""
        [term] = self.by_group[event.peer].terms(event.part.number)
        handle = all_reduce(term, self.cursor.groups[event.peer], wait=False)
        self._under_way[event.peer, event.tag] = handle

    def finish(self, event: Event) -> None:
        """Waits for a sum that was begun."""
        handle = self._under_way.pop((event.peer, event.tag))
        assert handle is not None
        handle.wait()

    @torch.no_grad()
    def add_up(self, event: Event) -> None:
        """Sums gradients, and the terms of running statistics, as one message."""
        terms = self.by_group[event.peer].terms(event.part.number)
        all_reduce_coalesced(terms, self.cursor.groups[event.peer])

    @torch.no_grad()
    def take_statistics(self, event: Event) -> None:
        """Makes running statistics and counters those of all microbatches of the step."""
        del event  # there is one a step
        for stage in self.by_group.values():
            for name in stage.parameters:
                stage.gradient(name)
            stage.running.end_step()
        for counter, uses in self.counters:
            counter.add_(self.pieces * uses)

    def _add_hooks(self, group: int) -> None:
        """Lets the gradients that are summed early say when they are complete."""
        stage = self.by_group[group]
        for number, one in enumerate(stage.sums):
            if one.node:
                parameter = stage.parameters[one.parameters[0]]
                add_hook = parameter.register_post_accumulate_grad_hook
                add_hook(self._on_gradient((group, number)))  # type: ignore[no-untyped-call]

    def _on_gradient(self, key: tuple[int, int]) -> Callable[[nn.Parameter], None]:
        """Returns what autograd calls when it has added to a gradient."""

        def hook(_parameter: nn.Parameter) -> None:
            assert key not in self._under_way, "the plan sums a gradient before it is complete"
            self._ready.add(key)
            self.cursor.start_ready_sums()

        return hook
