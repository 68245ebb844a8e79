"""Brings parameters from the ranks that moved them to the other holders of a stage.

``hires.plan.updates`` decides which rank moves which rows, and what travels together.

With a codec what travels is by how much an update has moved them, so that small updates are not
lost beside large parameters. All holders, the owner too, add what they decode to the same numbers:

    owner   old -> moved;  codes of (moved - old)   all   old + decoded
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hires.comm import all_gather_coalesced, all_gather_stacked, broadcast, broadcast_coded
from hires.comm.coding import decode, encode, places, usual_codec
from hires.core.codecs import Codec
from hires.parallel.context import Context
from hires.parallel.gradients import flat, rows_of
from hires.parallel.stage import StageModule
from hires.plan.event import Event
from hires.plan.groups import codec_of, gradient_group
from hires.plan.updates import Rows, publications, shares_of_holders


class PublishedParameters:
    """The parameters of a rank's stages, of which each holder moves a part."""

    def __init__(self, contexts: list[Context], modules: list[StageModule]) -> None:
        self.plan, self.rank, self.groups = contexts[0].plan, contexts[0].rank, contexts[0].groups
        stages = [context.stage.index for context in contexts]
        self.modules = dict(zip(stages, modules, strict=True))
        self.by_group = {gradient_group(self.plan, stage): stage for stage in stages}
        self._before: dict[int, list[Tensor]] = {}  # of a stage, what this rank is about to move

    def own_rows(self) -> dict[nn.Parameter, tuple[int, int]] | None:
        """Returns the rows that this rank moves; None: all of all parameters."""
        if not any(shares_of_holders(self.plan, stage) for stage in self.modules):
            return None
        own: dict[nn.Parameter, tuple[int, int]] = {}
        for stage, module in self.modules.items():
            shares = shares_of_holders(self.plan, stage)
            if shares:
                rows = shares[self.rank]
                own |= {module.parameters[part.name]: (part.first, part.last) for part in rows}
            else:
                own |= {p: (0, len(p) if p.dim() else 1) for p in module.parameters.values()}
        return own

    @torch.no_grad()
    def begin_update(self) -> None:
        """Keeps the numbers of what this rank is about to move, if their change is coded."""
        for stage in self.modules if codec_of(self.plan, "parameter") else ():
            if own := shares_of_holders(self.plan, stage).get(self.rank):
                self._before[stage] = [part.clone() for part in self._parts(stage, own)]

    @torch.no_grad()
    def publish(self, event: Event) -> None:
        """Sends what this rank has moved to the other holders, or receives what another has."""
        stage = self.by_group[event.peer]
        one, group = publications(self.plan, stage)[event.part.number], self.groups[event.peer]
        parts = self._parts(stage, one.parts)
        if event.codec:
            codec = usual_codec(event.codec)
            changes = self._changes(codec, stage, parts, one.owner == self.rank)
            broadcast_coded(changes, one.owner, group, backend=event.route, codec=codec)
            _add(codec, parts, changes)
            return
        sent = torch.cat(parts)
        broadcast(sent, one.owner, group, backend=event.route)
        for part, numbers in zip(parts, torch.split(sent, [*map(len, parts)]), strict=True):
            part.copy_(numbers)

    @torch.no_grad()
    def gather(self, event: Event) -> None:
        """Brings what all holders have moved to all of them."""
        stage, group = self.by_group[event.peer], self.groups[event.peer]
        shares = shares_of_holders(self.plan, stage)
        parts = [self._parts(stage, rows) for rows in shares.values()]
        if not event.codec:
            all_gather_coalesced(parts, group, backend=event.route)
            return
        codec, like = usual_codec(event.codec), next(iter(self.modules[stage].parameters.values()))
        codes = like.new_empty(event.num_bytes, dtype=torch.uint8)  # of the largest part
        encode(codec, self._changes(codec, stage, parts[group.index], True), codes)
        gathered = all_gather_stacked(codes, group, backend=event.route)
        for own, code in zip(parts, gathered, strict=True):
            _add(codec, own, decode(codec, code, self._changes(codec, stage, own, False)))

    def _parts(self, stage: int, rows: Iterable[Rows]) -> list[Tensor]:
        """Returns rows of a stage's parameters, as flat views."""
        tensors = self.modules[stage].parameters
        return [flat(rows_of(tensors[one.name], one.first, one.last)) for one in rows]

    def _changes(self, codec: Codec, stage: int, parts: list[Tensor], is_own: bool) -> Tensor:
        """Returns room for the changes of parts; of its own the rank fills it, and undoes them."""
        like = next(iter(self.modules[stage].parameters.values()))
        changes = like.new_zeros(sum(codec.padded(len(part)) for part in parts))
        before = self._before.pop(stage, parts) if is_own and parts else []  # no step: no change
        for part, old, change in zip(parts, before, places(changes, parts, codec), strict=False):
            torch.sub(part, old, out=change)
            part.copy_(old)
        return changes


def _add(codec: Codec, parts: list[Tensor], changes: Tensor) -> None:
    for part, change in zip(parts, places(changes, parts, codec), strict=True):
        part.add_(change)
