"""How do all holders of a stage come to the same gradients and running statistics?

Gradients are summed over the tiles and averaged over everything else; the loss of every microbatch
is already divided by the number of microbatches of all replicas, so one sum over all holders does
it. Parameters behind the global pool have the whole gradient on every tile and count 1 / tiles.

Running statistics end as if one process had seen the replicas' microbatches one after the other:
the update r <- (1 - m) r + m s is affine, so that of each replica is a r + b, with b = r_k - a r_0,
and their composition a^R r_0 + sum_k a^(R-1-k) b_k needs one sum over the replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hires.comm import Group, all_reduce
from hires.parallel.context import Context
from hires.parallel.stage import StageModule
from hires.plan.program import gradient_group

ALONE_BYTES = 2**20
"""Tensors from this size on are summed where they lie; smaller ones are copied into one bucket."""


@dataclass
class _Statistic:
    """One running mean or variance."""

    tensor: Tensor
    decay: float
    """What one step of one replica leaves of the old value."""
    before: Tensor
    """Value at the start of the step."""


class GradientSync:
    """Sums gradients and merges running statistics at the end of a step.

    Args:
        context: the rank and its plan.
        module: the rank's stage.
        counters: ``num_batches_tracked`` of the stage's norms.
    """

    def __init__(self, context: Context, module: StageModule, counters: list[Tensor]) -> None:
        self.context = context
        self.group: Group = context.groups[gradient_group(context.plan, context.rank)]
        self.parameters = [p for p in module.parameters.values() if p.requires_grad]
        names = {id(p): name for name, p in module.parameters.items()}
        whole = [p for p in self.parameters if names[id(p)] not in module.partial]
        self.repeated = whole if context.stage.num_tiles > 1 else []
        self.counters = counters
        self.statistics = _statistics(context, module)

    def begin_step(self) -> None:
        """Remembers the running statistics from which all replicas start."""
        if self.context.plan.num_replicas > 1:
            for statistic in self.statistics:
                statistic.before = statistic.tensor.clone()

    @torch.no_grad()
    def end_step(self) -> None:
        """Makes gradients, running statistics and counters equal on all holders of the stage."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for parameter in self.repeated:
            assert parameter.grad is not None
            parameter.grad.div_(self.context.stage.num_tiles)
        for counter in self.counters:
            counter.add_(self.context.plan.pieces)
        if self.group.size == 1:
            return
        tensors = [p.grad for p in self.parameters if p.grad is not None]
        if self.context.plan.num_replicas > 1:
            tensors += [self._contribution(statistic) for statistic in self.statistics]
        _sum_all(tensors, self.group)
        if self.context.plan.num_replicas > 1:
            merged = tensors[len(self.parameters) :]
            for statistic, total in zip(self.statistics, merged, strict=True):
                decay = statistic.decay**self.context.plan.num_replicas
                statistic.tensor.copy_(total.add_(statistic.before, alpha=decay))

    def _contribution(self, statistic: _Statistic) -> Tensor:
        """Returns this replica's term of the merged statistic; tile 0 speaks for its replica."""
        if self.context.tile != 0:
            return torch.zeros_like(statistic.tensor)
        later = self.context.plan.num_replicas - 1 - self.context.replica
        own = statistic.tensor - statistic.decay * statistic.before
        return own * statistic.decay**later


def _statistics(context: Context, module: StageModule) -> list[_Statistic]:
    """Returns the running statistics that the stage updates, each with its decay in one step."""
    decays: dict[str, float] = {}
    for node in module.nodes:
        if node.kind == "batch_norm" and node.args["training"] and node.args["running_mean"]:
            once = (1 - node.args["momentum"]) ** context.plan.num_microbatches
            for key in ("running_mean", "running_var"):
                name = node.args[key]["param"]
                decays[name] = decays.get(name, 1.0) * once
    return [_Statistic(module.tensors[n], d, module.tensors[n]) for n, d in decays.items()]


def _sum_all(tensors: list[Tensor], group: Group) -> None:
    """Sums tensors over a group in place."""
    small: dict[torch.dtype, list[Tensor]] = {}
    handles = []
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() >= ALONE_BYTES:
            handles.append(all_reduce(_flat(tensor), group, wait=False))
        else:
            small.setdefault(tensor.dtype, []).append(tensor)
    for bucket in small.values():
        _sum_bucket(bucket, group)
    for handle in handles:
        if handle is not None:
            handle.wait()


def _sum_bucket(bucket: list[Tensor], group: Group) -> None:
    """Sums some tensors as one."""
    flat = torch.cat([_flat(tensor) for tensor in bucket])
    all_reduce(flat, group)
    begin = 0
    for tensor in bucket:
        _flat(tensor).copy_(flat[begin : begin + tensor.numel()])
        begin += tensor.numel()


def _flat(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's numbers in memory order, as a view."""
    if tensor.dim() == 4 and not tensor.is_contiguous():
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.view(-1)
