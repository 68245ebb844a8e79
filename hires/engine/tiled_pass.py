"""Runs the passes of a plan of tiles whenever autograd comes to them, outside of any step.

A plan's events are those of one step of one microbatch. A call takes the part of them that belongs
to its pass, and leaves no message under way:

    events    barrier begin read | forward F0 ... end F0 | backward B0 ... end B0 | sums, update
    call                          ^-- forward ----------^
    backward                                              ^-- backward --------^  one sum of its own

So calls may follow each other as the loop likes, forward and back, as long as all ranks of the
tiles make the same ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hires import comm
from hires.comm import CommWorld
from hires.core.errors import ConfigError, RunError
from hires.engine.build import contexts_of, counters_of, named_tensors, names_of
from hires.parallel.context import Context
from hires.parallel.gradients import flat
from hires.parallel.stage import StageModule
from hires.plan.graph import INPUT
from hires.plan.groups import trained
from hires.plan.plan import Plan
from hires.plan.rules import TILED
from hires.plan.tiling import own_rects


class TiledPass:
    """One plan of a module on this rank: its stage, its tensors, and its place in the events."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        tile: int,
        device: torch.device,
        autocast: torch.dtype | None,
        world: CommWorld,
    ) -> None:
        self.plan = plan = _without_step(plan)
        self.autocast, self.device = autocast, device
        [context] = contexts_of(plan, tile, device, world, shares=True)
        self.context: Context = context
        tensors = named_tensors(model)
        names = names_of([context], tensors)
        if missing := sorted(names - tensors.keys()):
            raise ConfigError(f"hires.shard: the module has no {missing[0]} of its own")
        self.originals = {name: tensors[name] for name in sorted(names)}
        _require_one_type(self.originals)
        self.pointers = {name: tensor.data_ptr() for name, tensor in self.originals.items()}
        # Leaves of the pass's own graph, on the same numbers.
        self.leaves = {
            name: nn.Parameter(tensor.data, tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else tensor
            for name, tensor in self.originals.items()
        }
        self.module = StageModule(context, self.leaves)
        self.counters = counters_of([context], tensors)
        self.trained = [*trained(plan, 0)] if plan.training else []
        # All tiles have their gradient in full: a mean of them is a sum of shares.
        several = context.stage.num_tiles > 1
        self.copied = {*self.trained} - self.module.partial if several else set()
        self.parameters = [self.originals[name] for name in self.trained]
        self._spans = _spans(context)
        self._calls, self._passing = 0, False

    def call(self, images: Tensor, full: bool) -> Tensor:
        """Returns the output for this rank's window of images, (n, C, h, w); all ranks call it.

        ``full``: that of the whole images, where it has rows and columns.
        """
        if self.plan.training:
            return _Pass.apply(self, full, images, *self.parameters)  # type: ignore[no-any-return, no-untyped-call]
        with torch.no_grad():
            return self.output_of(self.forward(images), full)

    def is_of(self, model: nn.Module) -> bool:
        """Whether the module still has the tensors that the pass reads."""
        tensors = named_tensors(model)
        return all(
            tensors.get(name) is held and held.data_ptr() == self.pointers[name]
            for name, held in self.originals.items()
        )

    def forward(self, images: Tensor) -> Tensor:
        """Returns this rank's part of the output."""
        self.context.step = self._calls  # random numbers of each call are its own
        self._calls += 1
        images = images.detach().contiguous(memory_format=torch.channels_last)
        low = self.autocast
        casting = torch.autocast(self.device.type, dtype=low, enabled=low is not None)
        with self._events("F0"), casting:
            if self.module.buffers.written:
                self.module.buffers.begin_step()
            made = self.module.forward({INPUT: images})
        if self.plan.training:
            self.module.buffers.end_step()
            for counter, uses in self.counters:
                counter.add_(uses)
        return made[self.plan.graph.output]

    def backward(self, output: Tensor, gradient: Tensor) -> list[Tensor]:
        """Returns the gradients of all parameters, summed over the tiles."""
        if self.context.stage.num_tiles == 1:
            torch.autograd.backward(output, gradient)
        else:
            with self._events("B0"):
                torch.autograd.backward(output, gradient)
        gradients, share = [], self.context.stage.num_tiles
        for name in self.trained:
            leaf = self.leaves[name]
            made = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            leaf.grad = None
            last = made.dim() == 4 and made.is_contiguous(memory_format=torch.channels_last)
            made = made if last else made.contiguous()
            gradients.append(made.div_(share) if name in self.copied else made)
        comm.all_reduce_coalesced([*map(flat, gradients)], self.context.tiles)
        leaves = (self.leaves[name] for name in self.trained)  # as torch lays gradients out
        return [_laid_out(*pair) for pair in zip(gradients, leaves, strict=True)]

    @property
    def in_tiles(self) -> bool:
        """Whether ranks hold rows and columns of the output, not all of it."""
        held = self.context.stage.layout[self.plan.graph.output] == TILED
        return held and self.context.stage.num_tiles > 1

    def output_of(self, own: Tensor, full: bool) -> Tensor:
        """Returns a rank's tile or, if ``full``, the whole map, contiguous."""
        if not (full and self.in_tiles):
            return own.contiguous()  # the loop may call view
        n, channels = own.shape[:2]
        size = self.plan.graph.shape(self.plan.graph.output)[2:]
        rects = own_rects(size, self.context.stage.tiles)
        shapes = [(n, channels, r1 - r0, c1 - c0) for r0, r1, c0, c1 in rects]
        parts = [own.new_empty(shape) for shape in shapes]
        comm.all_gather(parts, own.contiguous(), self.context.tiles)
        whole = own.new_empty((n, channels, size[0], size[1]))
        for (r0, r1, c0, c1), part in zip(rects, parts, strict=True):
            whole[:, :, r0:r1, c0:c1] = part
        return whole

    @contextlib.contextmanager
    def _events(self, action: str) -> Iterator[None]:
        # Walks the messages of one pass; whatever it has sent has left when it ends.
        cursor, (first, end) = self.context.cursor, self._spans[action]
        if self._passing:
            raise ConfigError(
                "a call inside a backward pass, as torch.utils.checkpoint makes: tiles of one "
                "module have one pass at a time; call what hires.shard returns without it"
            )
        self._passing, cursor.at = True, first
        try:
            yield
            if cursor.at != end:
                event = cursor.events[cursor.at]
                raise RunError(
                    f"a pass has ended before {event.what}, which the plan has inside it"
                )
            cursor.wait_sends()
            comm.finish_streams(cursor.world)
        finally:
            self._passing = False
            cursor.restart()


class _Pass(torch.autograd.Function):
    # Window of the images and all parameters -> output; the way back returns their gradients.
    @staticmethod
    def forward(ctx: Any, tiled: TiledPass, full: bool, images: Tensor, *_: Tensor) -> Tensor:
        with torch.enable_grad():
            made = tiled.forward(images)
        ctx.tiled, ctx.full, ctx.made = tiled, full, made
        return tiled.output_of(made.detach(), full)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tiled, [gradient], made = ctx.tiled, gradients, ctx.made
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True: tiles have first derivatives only; compute what needs a second "
                "one, as a penalty of the gradient, with the plain module"
            )
        if made is None:
            raise RunError("the gradients of a call were computed before; call the module again")
        ctx.made = None
        if ctx.full and tiled.in_tiles:
            r0, r1, c0, c1 = tiled.context.own_of(tiled.plan.graph.output)
            gradient = gradient[:, :, r0:r1, c0:c1]
        return None, None, None, *tiled.backward(made, gradient.contiguous())


def _laid_out(made: Tensor, like: Tensor) -> Tensor:
    """Returns numbers in the order of memory of another tensor; without a copy if they are in it.

    Kernels of 1x1 have several strides for one order.
    """
    long = [dim for dim, length in enumerate(made.shape) if length > 1]
    if all(made.stride(dim) == like.stride(dim) for dim in long):
        return made.as_strided(like.shape, like.stride())
    return torch.empty_like(like).copy_(made)


def _without_step(plan: Plan) -> Plan:
    """Returns a plan without what belongs to a whole step: its loss, and sums before its end."""
    values = plan.to_dict()
    for stage in values["stages"]:
        stage["comm"] = [op for op in stage["comm"] if op["kind"] != "loss"]
    values["gradients"] = "together"
    return Plan.from_dict(values)


def _spans(context: Context) -> dict[str, tuple[int, int]]:
    """Returns for each pass its first event behind its begin, and its end."""
    spans, begin = {}, {}
    for place, event in enumerate(context.cursor.events):
        if event.kind in ("forward", "backward"):
            begin[event.part.action] = place + 1
        elif event.kind == "end":
            spans[event.part.action] = begin[event.part.action], place
    return spans


def _require_one_type(tensors: dict[str, Tensor]) -> None:
    types = {one.dtype: name for name, one in tensors.items() if one.is_floating_point()}
    if len(types) > 1:
        (one, name), (other, another), *_ = types.items()
        raise ConfigError(
            f"hires.shard: {name} is of {one} and {another} of {other}; tiles compute with one "
            f"type: use module.to({one}), and torch.autocast for a lower one"
        )
