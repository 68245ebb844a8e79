"""``torch.distributed.pipelining``: the same operators, cut at the same node as the plan's.

It is built as its documentation describes, with every advantage of hires: maps travel as NHWC, so
that nothing is copied on the way, and examples spare it a first pass over uninitialised numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hires.bench.bench_rows import PEERS, BenchRow, PeerSteps
from hires.bench.peers.peer_torch import placed, whole_batch
from hires.core.schedules import SCHEDULES
from hires.engine.build import build_rank
from hires.engine.device import RankDevice
from hires.parallel.loss import plain_loss
from hires.parallel.stage import StageModule
from hires.plan.graph import INPUT
from hires.plan.hardware import NCCL
from hires.plan.plan import Plan


@PEERS.register("pipelining")
class PipelineSteps(PeerSteps):
    """One rank's steps under torch's schedule."""

    def __init__(self, row: BenchRow, rank: int, device: RankDevice) -> None:
        from torch.distributed import pipelining

        super().__init__(row, rank, device)
        config, plan = row.config, row.plan
        assert plan is not None
        engine = build_rank(config, plan, rank, 1, device)
        self.optimizer, self.parameters = engine.optimizer, engine.parameters
        count, num_stages = config.parallel.microbatches, len(plan.stages)
        images, target = placed(whole_batch(config), engine.device)
        self.inputs = [images] if rank == 0 else []
        self.target = target if rank == num_stages - 1 else None
        reads, writes = (_examples(plan, stage, images.dtype) for stage in (rank - 1, rank))
        module, place = StagePeer(engine.modules[0], plan, rank), engine.device.torch
        stage = pipelining.PipelineStage(
            module, rank, num_stages, place, input_args=reads, output_args=writes
        )
        make = getattr(pipelining, SCHEDULES[config.parallel.schedule].torch_class)

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return plain_loss(config.objective, output, target) / count

        # The loss is divided instead of all gradients, as in hires: one pass over them less.
        self.schedule = make(stage, count, loss if plan.training else None, scale_grads=False)

    @staticmethod
    def lacks(row: BenchRow) -> str:
        """Returns why it cannot run a row."""
        if row.config.device == "cuda" and row.config.comm.backend != NCCL:
            return "ranks share a GPU, and torch sends maps between GPUs through NCCL only"
        if not SCHEDULES[row.config.parallel.schedule].torch_class:
            return f"torch has no parallel.schedule={row.config.parallel.schedule}"
        return ""

    def step(self) -> None:
        """Runs one step."""
        count = self.row.config.parallel.microbatches
        if self.optimizer is None:
            with torch.no_grad():
                output: Tensor | None = self.schedule.eval(*self.inputs)
            self.values = () if output is None else output.chunk(count)
            return
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        self.schedule.step(*self.inputs, target=self.target, losses=losses, return_outputs=False)
        self.optimizer.step()
        self.values = [count * loss.detach() for loss in losses]


class StagePeer(nn.Module):
    """A stage of hires as the module that torch's pipeline wants: its maps come and go as NHWC."""

    def __init__(self, stage: StageModule, plan: Plan, index: int) -> None:
        super().__init__()
        self.weights, self.run = nn.ParameterList(stage.parameters.values()), stage.forward
        self.reads = _crossing(plan, index - 1) if index else [INPUT]
        self.ends = index == len(plan.stages) - 1

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The values that enter the stage -> those that leave it."""
        if self.reads != [INPUT]:
            values = tuple(v.permute(0, 3, 1, 2) if v.dim() == 4 else v for v in values)
        outputs = tuple(self.run(dict(zip(self.reads, values, strict=True))).values())
        if self.ends:
            return outputs[0]
        return tuple(v.permute(0, 2, 3, 1) if v.dim() == 4 else v for v in outputs)


def _crossing(plan: Plan, stage: int) -> list[str]:
    # The values that a stage sends to the next, in the order of its outputs.
    return list(dict.fromkeys(edge.value for edge in plan.edges if edge.source == stage))


def _examples(plan: Plan, stage: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    # Tensors as they leave a stage; stage -1 is the data.
    graph = plan.graph
    if stage < 0:
        return (torch.empty(graph.input_shape, dtype=dtype, memory_format=torch.channels_last),)
    wire = [[*graph.shape(value)] for value in _crossing(plan, stage)]
    wire = [[s[0], *s[2:], s[1]] if len(s) == 4 else s for s in wire]
    if stage == len(plan.stages) - 1:
        wire = [[*graph.shape(graph.output)]]
    return tuple(torch.empty(s, dtype=dtype, requires_grad=plan.training) for s in wire)
