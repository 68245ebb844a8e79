"""Holds what one rank runs: its slots, their tensors, and the executor of its steps."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from hires.comm import MessageLog
from hires.core.ranks.timeline import Recorder
from hires.core.store.network_weights import WeightsPlace
from hires.engine.derived_tensors import DerivedTensors
from hires.engine.device import RankDevice
from hires.engine.loader import Loader
from hires.engine.optimizer import Optimizer
from hires.parallel.context import Context
from hires.parallel.executor import Executor
from hires.parallel.spill import Keeper, Spill
from hires.parallel.stage import StageModule
from hires.quant.int8_kernels import is_emptied


@dataclass
class RankEngine:
    """Everything that one rank runs."""

    device: RankDevice
    contexts: list[Context]  # one a direction
    tensors: dict[str, Tensor]
    """Parameters and buffers of the rank's stages, by the names that they have in the network."""
    derived: DerivedTensors  # what is computed from them, for a network that was rewritten
    modules: list[StageModule]
    """The stage of each direction; where they are one stage, they share their parameters."""
    parameters: dict[str, nn.Parameter]  # of all its stages, each once
    executor: Executor
    loaders: list[Loader]  # one a direction
    optimizer: Optimizer | None
    recorder: Recorder  # when the rank did what in its last steps
    spill: Spill | None = None  # keeps on disk what the backward pass needs
    weights: WeightsPlace | None = None  # the file that the network's tensors came from
    residents: list[RankEngine] = field(default_factory=list)
    """Of a process that executes several ranks, what each of them runs; else none."""
    packed: list[Tensor] = field(default_factory=list)
    """Weights in the order of their kernels."""
    empties_weights: bool = False
    """Whether nothing but these kernels reads them: no gradient, and no calibration."""

    @property
    def context(self) -> Context:
        """The slot in direction down."""
        return self.contexts[0]

    @property
    def rank(self) -> int:
        """Of this process in its world."""
        return self.context.rank // self.context.plan.resident

    @property
    def ranks(self) -> list[RankEngine]:
        """What each rank of the plan runs that this process executes; most are one."""
        return self.residents or [self]

    def keep_in(self, keeper: Keeper) -> None:
        """Lets passes give to a keeper what they keep for the backward pass."""
        for slot in self.executor.slots:
            slot.keeping = keeper.keeping

    def spread_buffers(self) -> None:
        """Gives the buffers of other residents the numbers of those of the first that has them."""
        for one in self.residents:
            for name, tensor in one.tensors.items():
                if tensor is not self.tensors[name]:
                    tensor.data.copy_(self.tensors[name].data)

    @property
    def data_wait_s(self) -> float:
        """Seconds for which the rank has waited for data, so far."""
        return sum(loader.wait_s for loader in self.loaders)

    @torch.no_grad()
    def prepare(self) -> list[Tensor]:
        """Lets nodes keep what follows from their parameters' values, and returns it.

        In inference a weight is released once all nodes that read it keep it in another order.
        """
        self.derived.release()
        readers = collections.Counter(
            name
            for context in self.contexts
            for node in context.plan.nodes(context.stage.index)
            for name in node.params
        )
        for packer in (packer for context in self.contexts for packer in context.packers):
            packed = packer.pack()
            if packed is None:
                continue
            self.packed.append(packed)
            readers[packer.weight] -= 1
            if self.empties_weights and not readers[packer.weight]:
                self.derived.empty(packer.weight)
        return self.packed

    def close(self) -> None:
        """Stops the threads that read data."""
        for loader in self.loaders:
            loader.close()
        if self.spill is not None:
            self.spill.close()

    def write_timeline(self, folder: Path, log: MessageLog | None) -> None:
        """Appends the last steps of each rank to the timeline in a folder."""
        for one in self.ranks:
            calls = log.calls_between if log else None
            one.recorder.write(folder, one.context.rank, calls)

    def byte_counts(self) -> dict[str, int]:
        """Returns the bytes of parameters, gradients and optimiser state as they are now."""
        parameters = self.parameters.values()
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = self.optimizer.state() if self.optimizer else []
        packed = {id(tensor): tensor for tensor in self.packed}.values()
        parts = {"params": [*parameters, *packed], "grads": gradients, "optimizer": state}
        spilled = {} if self.spill is None else {"spill_bytes": self.spill.file_bytes}
        return spilled | {
            f"{part}_bytes": sum(t.element_size() if is_emptied(t) else t.nbytes for t in tensors)
            for part, tensors in parts.items()
        }
