"""Builds a row as one rank runs it: a layout of hires, or torch's own ways of doing the same.

Torch's own are built as their documentation describes them, with every advantage of hires: the 1x1
trick, channels_last, the same optimiser, and for pipelining the same operators cut at the same
node, whose maps travel as NHWC, so that nothing is copied on the way.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from hires.bench.contestants import Contestant
from hires.bench.timing import Runner
from hires.comm import opened_channels, use_channels
from hires.core.config.run_config import RunConfig
from hires.engine.build import build_rank, whole_model
from hires.engine.device import HOST, RankDevice
from hires.engine.loader import whole_microbatches
from hires.engine.optimizer import make_optimizer
from hires.engine.sharding import shard
from hires.engine.weights_file import open_weights
from hires.parallel.loss import plain_loss
from hires.parallel.stage import StageModule
from hires.plan.graph import INPUT
from hires.plan.plan import Plan

Example = tuple[Tensor, Tensor]
"""Images (n, C, H, W), channels_last, of one microbatch, and what they are compared with."""


def build(row: Contestant, rank: int, device: RankDevice | None = None) -> Runner | None:
    """Returns a row as this rank runs it; None if it is not in. All ranks call it together.

    Without a ``device`` it computes on the CPU.
    """
    device = device or RankDevice()
    if rank >= row.num_ranks:
        return None
    runner: Runner
    if row.kind == "shard":
        runner = ShardSteps(row.config)
    elif row.plan is not None:
        make = HiresSteps if row.kind == "hires" else PipelineSteps
        runner = make(row.config, row.plan, rank, device)
    else:
        trick = row.settings.get("trick", True) and device.torch == HOST
        module = device.place_module(plain_module(row.config, trick))
        if row.kind == "ddp":
            views = row.settings.get("views", False)
            module = DistributedDataParallel(module, gradient_as_bucket_view=views)
        replica = rank if row.config.parallel.replicas > 1 else 0
        microbatches = [_placed(m, device) for m in whole_microbatches(row.config, replica)]
        runner = ModuleSteps(module, row.config, microbatches)
    runner.threads, runner.device = row.threads, device
    return runner


class HiresSteps(Runner):
    """A layout of hires on one rank, exactly as ``hires run`` executes it."""

    deterministic = True

    def __init__(
        self, config: RunConfig, plan: Plan, rank: int, device: RankDevice | None = None
    ) -> None:
        weights = open_weights(config.weights) if config.weights else None
        self.engine = build_rank(config, plan, rank, 1, device, weights=weights)
        self.channels = opened_channels()
        # Its microbatches are repeated for ever.
        self.feed = [itertools.cycle([*loader]) for loader in self.engine.loaders]
        self.parameters = self.engine.parameters

    def prepare(self) -> None:
        """Makes its plan's communicators those of this rank, too; the world holds other plans."""
        super().prepare()
        use_channels(self.channels)

    def step(self) -> Tensor | None:
        """Runs one step; returns what this rank knows of the answer."""
        if self.engine.context.plan.training:
            loss = self.engine.executor.step(self.feed).loss
            return None if loss is None else torch.tensor([loss])
        outputs = self.engine.executor.step(self.feed, keep_outputs=True).outputs
        return torch.cat([*outputs.values()]) if outputs else None


class ModuleSteps(Runner):
    """A plain module on this rank, perhaps in DistributedDataParallel, one step of microbatches."""

    def __init__(self, module: nn.Module, config: RunConfig, microbatches: list[Example]) -> None:
        self.module = module
        self.microbatches = microbatches
        self.loss = config.objective
        named = module.named_parameters()
        self.parameters = {name.removeprefix("module."): p for name, p in named}
        self.optimizer = make_optimizer(config, list(self.parameters.values()))

    def step(self) -> Tensor:
        """Runs one step; returns the mean loss (1), or the outputs (images, classes)."""
        if self.optimizer is None:
            with torch.inference_mode():
                return torch.cat([self.module(images) for images, _ in self.microbatches])
        self.optimizer.zero_grad()
        losses = []
        for images, target in self.microbatches:
            loss = plain_loss(self.loss, self.module(images), target) / len(self.microbatches)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.optimizer.step()
        return torch.stack(losses).sum().view(1)


class ShardSteps(ModuleSteps):
    """A plain module on tiles in a loop of its user's own: :func:`hires.shard`."""

    def __init__(self, config: RunConfig) -> None:
        microbatches = whole_microbatches(config, 0)
        rows, cols = config.parallel.tiles
        mesh = init_device_mesh(config.device, (rows, cols))
        module = shard(whole_model(config), mesh, example=microbatches[0][0])
        self.channels = opened_channels()
        super().__init__(module, config, microbatches)

    def prepare(self) -> None:
        """Makes the communicators of its tiles those of this rank."""
        super().prepare()
        use_channels(self.channels)


def reference_steps(config: RunConfig) -> ModuleSteps:
    """Returns a plain module that computes the whole step, all replicas, in one process."""
    replicas = range(config.parallel.replicas)
    microbatches = [m for replica in replicas for m in whole_microbatches(config, replica)]
    return ModuleSteps(plain_module(config), config, microbatches)


def plain_module(config: RunConfig, trick: bool = True) -> nn.Module:
    """Returns the network as a plain module with its first weights, convolutions channels_last.

    In float64 it is as it is: oneDNN, for which convolutions are changed, has no such kernels.
    """
    model = whole_model(config)
    if config.precision.name == "fp64":
        return model
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in model.modules() if trick else ():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            module.dilation = (2, 2)  # makes ATen choose oneDNN
            # The strides that its gradient will have, or DDP warns of a slow copy.
            weight, width = module.weight, module.in_channels
            weight.data = weight.data.as_strided(weight.shape, (width, 1, width, width))
    return model


class PipelineSteps(Runner):
    """The stage of one rank under ``torch.distributed.pipelining``, cut as the plan says."""

    def __init__(
        self, config: RunConfig, plan: Plan, rank: int, device: RankDevice | None = None
    ) -> None:
        engine = build_rank(config, plan, rank, 1, device)
        self.optimizer, self.parameters = engine.optimizer, engine.parameters
        count, num_stages = config.parallel.microbatches, len(plan.stages)
        images, target = _placed(whole_batch(config), engine.device)
        self.inputs = [images] if rank == 0 else []
        self.target = target if rank == num_stages - 1 else None
        # With examples torch need not run the stage on uninitialised numbers to learn shapes.
        dtype = images.dtype
        takes, gives = _examples(plan, rank - 1, dtype), _examples(plan, rank, dtype)
        peer, place = StagePeer(engine.modules[0], plan, rank), engine.device.torch
        stage = PipelineStage(peer, rank, num_stages, place, input_args=takes, output_args=gives)
        make = Schedule1F1B if config.parallel.schedule == "1f1b" else ScheduleGPipe

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return plain_loss(config.objective, output, target) / count

        # The loss is divided instead of all gradients, as in hires: one pass over them less.
        self.schedule = make(stage, count, loss if plan.training else None, scale_grads=False)

    def step(self) -> Tensor | None:
        """Runs one step; returns what :meth:`ModuleSteps.step` does on the last stage's rank."""
        if self.optimizer is None:
            with torch.no_grad():
                output: Tensor | None = self.schedule.eval(*self.inputs)
            return output
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        self.schedule.step(*self.inputs, target=self.target, losses=losses, return_outputs=False)
        self.optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).sum().view(1) if losses else None


class StagePeer(nn.Module):
    """A stage of hires as the module that torch's pipeline wants: its maps come and go as NHWC."""

    def __init__(self, stage: StageModule, plan: Plan, index: int) -> None:
        super().__init__()
        self.held = nn.ParameterList(stage.parameters.values())
        self.run = stage.forward
        self.reads = crossing(plan, index - 1) if index else [INPUT]
        self.ends = index == len(plan.stages) - 1

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The values that enter the stage -> those that leave it."""
        if self.reads != [INPUT]:
            values = tuple(v.permute(0, 3, 1, 2) if v.dim() == 4 else v for v in values)
        outputs = tuple(self.run(dict(zip(self.reads, values, strict=True))).values())
        if self.ends:
            return outputs[0]
        return tuple(v.permute(0, 2, 3, 1) if v.dim() == 4 else v for v in outputs)


def crossing(plan: Plan, stage: int) -> list[str]:
    """Returns the values that a stage sends to the next, in the order of its outputs."""
    return list(dict.fromkeys(edge.value for edge in plan.edges if edge.source == stage))


def _examples(plan: Plan, stage: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns tensors as they leave a stage; stage -1 is the data."""
    if stage < 0:
        order = torch.channels_last
        return (torch.empty(plan.graph.input_shape, dtype=dtype, memory_format=order),)
    shapes = [plan.graph.shape(value) for value in crossing(plan, stage)]
    wire = [[s[0], *s[2:], s[1]] if len(s) == 4 else s for s in shapes]
    if stage == len(plan.stages) - 1:
        wire = [plan.graph.shape(plan.graph.output)]
    return tuple(torch.empty(s, dtype=dtype, requires_grad=plan.training) for s in wire)


def _placed(example: Example, device: RankDevice) -> Example:
    images, target = map(device.place, example)
    return images, target


def whole_batch(config: RunConfig) -> Example:
    """Returns the microbatches of the first step of the only replica as one."""
    images, targets = zip(*whole_microbatches(config, 0), strict=True)
    return torch.cat(images).contiguous(memory_format=torch.channels_last), torch.cat(targets)
