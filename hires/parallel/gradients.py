"""Sums gradients and running statistics of a stage over its holders, in the plan's messages.

Gradients are summed over the tiles and averaged over everything else; the loss of every microbatch
is already divided by the number of microbatches of all replicas, so a sum over all holders is all
that is left to do. Parameters behind the global pool have the whole gradient on every tile, so each
contributes 1 / tiles of it:

    tiles 0 and 1   conv.weight: a part on each      sum = part 0 + part 1
                    fc.weight: all of it on each     sum = all / 2 + all / 2

``hires.plan.updates`` decides what travels together, and which sums begin during the last
backward pass. Those begin as soon as autograd has made their gradient, if the plan has come to
them, or to those that may pass each other (:mod:`hires.core.gradient_orders`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hires.comm import (
    Handle,
    all_gather_coalesced,
    all_reduce,
    all_reduce_coalesced,
    reduce_scatter_coalesced,
)
from hires.comm.coding import usual_codec
from hires.core.codecs import CODECS, Codec
from hires.core.gradient_orders import is_free
from hires.core.ranks.timeline import COLLECTIVE
from hires.parallel.context import Context
from hires.parallel.stage import StageModule
from hires.plan.event import Event
from hires.plan.groups import codec_of, gradient_group, num_lanes, running_decays, trained
from hires.plan.routes import STREAMED
from hires.plan.updates import Rows, lane_of, shares_of_holders, sums_of

Counters = list[tuple[Tensor, int]]


class _RunningStatistic(NamedTuple):
    # A running mean or variance that several copies of a stage update. It ends as if one process
    # had seen the microbatches of all replicas and directions one after the other. The update
    # r <- (1 - m) r + m s is linear, so after N microbatches
    #
    #     r = (1 - m)^N r_0  +  sum over k of (1 - m)^(N-1-k) m s_k
    #         before              terms: each copy adds up those of its microbatches, and one sum
    #                             over the copies completes them
    tensor: Tensor
    decay: float  # 1 - m: what one microbatch leaves of the old value
    before: Tensor  # at the start of the step
    terms: Tensor  # of this rank; at the end of the step, of all ranks


class StageGradients:
    """The gradients and running statistics of one stage on one rank.

    ``like`` are those of another rank of its process, or of another direction: terms of running
    statistics are the sums of both.
    """

    def __init__(
        self, context: Context, module: StageModule, like: StageGradients | None = None
    ) -> None:
        plan, stage = context.plan, context.stage
        self.sums, self.shares = sums_of(plan, stage.index), shares_of_holders(plan, stage.index)
        self.parameters = {name: module.parameters[name] for name in trained(plan, stage.index)}
        # Parameters whose gradient all tiles have in full, so that their sum is a mean.
        self.copied = set(self.parameters) - module.partial if stage.num_tiles > 1 else set()
        self.num_tiles = stage.num_tiles
        codec = codec_of(plan, "gradient") if self.sums else ""
        self.leaves = bool(codec) and CODECS[codec].leaves
        self.left = dict[str, Tensor]()
        """What the codec has left of each gradient of this rank, for the next step."""
        several = plan.num_replicas * plan.num_directions > 1
        decays = running_decays(plan, stage.index) if several and plan.training else {}
        # As .data: autograd has saved the statistics of microbatches in flight, though in training
        # it never reads them, and would take their new values for a mistake.
        tensors = {name: module.tensors[name].data for name in decays}
        self.statistics: dict[str, _RunningStatistic] = {
            name: like.statistics[name]._replace(tensor=tensor)
            if like is not None
            else _RunningStatistic(tensor, decays[name], tensor.clone(), torch.zeros_like(tensor))
            for name, tensor in tensors.items()
        }

    def begin_step(self) -> None:
        """Keeps the running statistics from which all copies start."""
        for statistic in self.statistics.values():
            statistic.before.copy_(statistic.tensor)
            statistic.terms.zero_()
        if self.leaves and not self.left:
            self.left = {n: torch.zeros_like(p.data) for n, p in self.parameters.items()}

    def terms(self, number: int) -> list[Tensor]:
        """Returns what this rank contributes to a sum; the tensors take the result."""
        one = self.sums[number]
        gradients = {name: self.gradient(name) for name in one.parameters}
        for name in self.copied & gradients.keys():
            gradients[name].div_(self.num_tiles)
        statistics = [self.statistics[name].terms for name in one.statistics]
        return [*map(flat, gradients.values()), *statistics]

    def parts(self) -> list[list[Tensor]]:
        """Returns by holder the gradients of what it moves, as flat views."""
        return parts_of(self.shares, self.gradient)

    def gradient(self, name: str) -> Tensor:
        """Returns a parameter's gradient; zeros where a tile without pixels has made none."""
        parameter = self.parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad


class GradientSync:
    """The gradient sums of a rank, or of a process, and its running statistics.

    Copies of one stage share their parameters. ``counters`` are ``num_batches_tracked`` of the
    norms, and how often each runs in one microbatch.
    """

    def __init__(
        self, contexts: list[Context], modules: list[StageModule], counters: Counters
    ) -> None:
        plan, self.cursor = contexts[0].plan, contexts[0].cursor
        self.pieces, self.counters = plan.pieces, counters
        self.first_piece = contexts[0].replica * plan.total_microbatches
        self.cursor.sums = self
        # Kernels of one GPU may wait for each other in its queues, so there the plan's order holds.
        self.cursor.is_free = is_free(plan.gradients) and plan.backend not in STREAMED
        self.by_group: dict[int, StageGradients] = {}
        self._of_lane: dict[int, StageGradients] = {}  # by the groups of all lanes
        self.of_slot: dict[tuple[int, int], StageGradients] = {}  # by rank and direction
        for context, module in zip(contexts, modules, strict=True):
            lanes = [gradient_group(plan, context.stage.index, n) for n in range(num_lanes(plan))]
            group = lanes[0]
            stage = StageGradients(context, module, self.by_group.get(group))
            if group not in self.by_group:
                self.by_group[group] = stage
                self._of_lane |= dict.fromkeys(lanes, stage)
                # Autograd calls a hook when it has added to a gradient: an early sum may begin.
                for number, one in enumerate(stage.sums):
                    if one.node:
                        key = lanes[lane_of(plan, number)], number
                        hook = functools.partial(self._gradient_is_ready, key)
                        add_hook = stage.parameters[one.parameters[0]]
                        add_hook.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self.of_slot[context.rank, context.direction] = stage
        # Sums by group and tag: complete in this backward pass, and begun in this step.
        self.ready: set[tuple[int, int]] = set()
        self._under_way: dict[tuple[int, int], Handle] = {}

    @torch.no_grad()
    def begin_step(self) -> None:
        """Keeps the running statistics from which all copies start."""
        self._under_way.clear()
        for stage in self.by_group.values():
            stage.begin_step()

    @torch.no_grad()
    def before_forward(self, slot: Context) -> None:
        """Clears the running statistics, so that the next update leaves the microbatch's part."""
        for statistic in self.of_slot[slot.rank, slot.direction].statistics.values():
            statistic.tensor.zero_()

    @torch.no_grad()
    def after_forward(self, slot: Context, microbatch: int) -> None:
        """Adds a microbatch's part of the running statistics, weighed by those that come later."""
        if slot.tile:  # of several tiles, which are equal, the first counts
            return
        later = self.pieces - 1 - (self.first_piece + microbatch)
        for statistic in self.of_slot[slot.rank, slot.direction].statistics.values():
            statistic.terms.add_(statistic.tensor, alpha=statistic.decay**later)

    @torch.no_grad()
    def start(self, event: Event) -> None:
        """Begins the sum of one large gradient, unless it has begun already."""
        if self.has_begun(event):
            return
        [term] = self._of_lane[event.peer].terms(event.part.number)
        group = self.cursor.groups[event.peer]
        handle = all_reduce(term, group=group, async_op=True, backend=event.route)
        assert handle is not None
        self._under_way[event.peer, event.tag] = handle

    @torch.no_grad()
    def finish(self, event: Event) -> None:
        """Waits for a sum that was begun."""
        self._under_way.pop((event.peer, event.tag)).wait(kind=COLLECTIVE)

    def has_begun(self, event: Event) -> bool:
        """Whether a sum is under way."""
        return (event.peer, event.tag) in self._under_way

    def carry_on(self, event: Event) -> None:
        """Begins a sum, or waits for it; the pass continues afterwards."""
        (self.start if event.kind == "issue" else self.finish)(event)

    @torch.no_grad()
    def add_up(self, event: Event) -> None:
        """Sums gradients, and the terms of running statistics, as one message."""
        terms = self.by_group[event.peer].terms(event.part.number)
        group, codec = self.cursor.groups[event.peer], _codec_of(event)
        stage = self.by_group[event.peer]
        names = stage.sums[event.part.number].parameters if stage.left and codec else ()
        left = [flat(stage.left[name]) for name in names]
        all_reduce_coalesced(terms, group, backend=event.route, codec=codec, left=left)

    @torch.no_grad()
    def scatter(self, event: Event) -> None:
        """Sums gradients; this rank gets the sums of what it moves."""
        stage = self.by_group[event.peer]
        stage.terms(event.part.number)
        group, codec = self.cursor.groups[event.peer], _codec_of(event)
        left = parts_of(stage.shares, stage.left.__getitem__) if stage.left else ()
        reduce_scatter_coalesced(stage.parts(), group, backend=event.route, codec=codec, left=left)

    @torch.no_grad()
    def complete(self) -> None:
        """Brings the sums of gradients to all holders where each has a part, for a comparison."""
        for index, stage in sorted(self.by_group.items()):  # as the other holders do
            if any(one.scatters for one in stage.sums):
                all_gather_coalesced(stage.parts(), self.cursor.groups[index])

    def left(self) -> dict[int, dict[str, Tensor]]:
        """Returns by group what the codec has left of gradients, by the parameters' names."""
        self.begin_step()  # makes what is not there yet
        return {index: stage.left for index, stage in self.by_group.items()}

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of all parameters of the rank's stages."""
        stages = self.by_group.values()
        return [stage.gradient(name) for stage in stages for name in stage.parameters]

    @torch.no_grad()
    def update_statistics(self, event: Event) -> None:
        """Makes running statistics and counters those of all microbatches of the step."""
        del event  # there is one a step
        for stage in self.by_group.values():
            for name in stage.parameters:
                stage.gradient(name)
        for stage in self.of_slot.values():
            for statistic in stage.statistics.values():
                kept = statistic.decay**self.pieces
                statistic.tensor.copy_(statistic.terms).add_(statistic.before, alpha=kept)
        for counter, uses in self.counters:
            counter.add_(self.pieces * uses)

    def _gradient_is_ready(self, key: tuple[int, int], _parameter: nn.Parameter) -> None:
        assert key not in self._under_way, "the plan sums a gradient before it is complete"
        self.ready.add(key)
        self.cursor.start_ready_sums()


def _codec_of(event: Event) -> Codec | None:
    return usual_codec(event.codec) if event.codec else None


def parts_of(
    shares: Mapping[int, list[Rows]], tensor_of: Callable[[str], Tensor]
) -> list[list[Tensor]]:
    """Returns by holder the numbers that it moves of some tensors, as views."""
    return [
        [flat(rows_of(tensor_of(one.name), one.first, one.last)) for one in rows]
        for rows in shares.values()
    ]


def rows_of(tensor: Tensor, first: int, last: int) -> Tensor:
    """Returns rows of a tensor, along its first dim, as a view."""
    return tensor.detach()[first:last] if tensor.dim() else tensor.detach()


def flat(tensor: Tensor) -> Tensor:
    """Returns the numbers of a dense tensor as they lie, as a view: channels-last or contiguous."""
    if tensor.dim() == 4 and not tensor.is_contiguous():
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.view(-1)


def shaped(numbers: Tensor, like: Tensor) -> Tensor:
    """Returns what :func:`flat` returned in the shape and order of another tensor, as a view."""
    if like.dim() == 4 and not like.is_contiguous():
        n, channels, height, width = like.shape
        return numbers.view(n, height, width, channels).permute(0, 3, 1, 2)
    return numbers.view(like.shape)
