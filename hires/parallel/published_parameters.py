"""Brings parameters from the ranks that moved them to the other holders of a stage.

``hires.plan.ownership`` decides which rank moves which rows, and what travels together.
"""

from __future__ import annotations

import torch
from torch import nn

from hires.comm import all_gather_coalesced, broadcast
from hires.parallel.context import Context
from hires.parallel.gradients import flat, parts_of, rows_of
from hires.parallel.stage import StageModule
from hires.plan.event import Event
from hires.plan.groups import gradient_group
from hires.plan.ownership import publications, shares_of_holders


class PublishedParameters:
    """The parameters of a rank's stages, of which each holder moves a part."""

    def __init__(self, contexts: list[Context], modules: list[StageModule]) -> None:
        self.plan, self.rank, self.groups = contexts[0].plan, contexts[0].rank, contexts[0].groups
        stages = [context.stage.index for context in contexts]
        self.modules = dict(zip(stages, modules, strict=True))
        self.by_group = {gradient_group(self.plan, stage): stage for stage in stages}

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
    def publish(self, event: Event) -> None:
        """Sends what this rank has moved to the other holders, or receives what another has."""
        stage = self.by_group[event.peer]
        one, module = publications(self.plan, stage)[event.part.number], self.modules[stage]
        parts = [flat(rows_of(module.parameters[p.name], p.first, p.last)) for p in one.parts]
        sent = torch.cat(parts)
        broadcast(sent, one.owner, self.groups[event.peer], backend=event.route)
        for part, numbers in zip(parts, torch.split(sent, [*map(len, parts)]), strict=True):
            part.copy_(numbers)

    @torch.no_grad()
    def gather(self, event: Event) -> None:
        """Brings what all holders have moved to all of them."""
        stage = self.by_group[event.peer]
        module = self.modules[stage]
        parts = parts_of(shares_of_holders(self.plan, stage), module.parameters.__getitem__)
        all_gather_coalesced(parts, self.groups[event.peer], backend=event.route)
