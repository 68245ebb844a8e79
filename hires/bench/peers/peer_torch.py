"""A plain ``nn.Module``, with every advantage that hires has; compiled, or in torch's own DDP.

Its convolutions are channels_last, and 1x1 convolutions go to oneDNN (``settings: {trick: false}``
leaves that out).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hires.bench.bench_rows import PEERS, BenchRow, PeerSteps
from hires.core.config.run_config import RunConfig
from hires.engine.build import whole_model
from hires.engine.device import HOST, RankDevice
from hires.engine.loader import whole_microbatches
from hires.engine.optimizer import make_optimizer
from hires.parallel.loss import plain_loss

Example = tuple[Tensor, Tensor]
"""Images (n, C, H, W), channels_last, of one microbatch, and what they are compared with."""
TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@PEERS.register("module")
class ModuleSteps(PeerSteps):
    """The module, with the microbatches of this rank's replica."""

    tricks = True  # whether 1x1 convolutions may go to oneDNN

    def __init__(self, row: BenchRow, rank: int, device: RankDevice) -> None:
        super().__init__(row, rank, device)
        config, dtype = row.config, TYPES[row.config.precision.name]
        trick = self.tricks and row.settings.get("trick", True) and device.torch == HOST
        self.module = self.wrapped(device.place_module(plain_module(config, trick)).to(dtype))
        replica = rank if config.parallel.replicas > 1 else 0
        self.microbatches = [placed(m, device, dtype) for m in whole_microbatches(config, replica)]
        self.first = replica * len(self.microbatches)
        named = self.module.named_parameters()
        self.parameters = {name.removeprefix("module."): p for name, p in named}
        self.optimizer = make_optimizer(config, list(self.parameters.values()))

    @staticmethod
    def lacks(row: BenchRow) -> str:
        """Returns why it cannot run a row."""
        if row.config.precision.name not in TYPES:
            return f"torch has no inference in {row.config.precision.name}"
        if row.config.device != "cpu" and not row.settings.get("trick", True):
            return "only the CPU has the 1x1 trick"
        return ""

    def wrapped(self, module: nn.Module) -> nn.Module:
        """Returns what runs the module."""
        return module

    def step(self) -> None:
        """Runs one step."""
        if self.optimizer is None:
            with torch.inference_mode():
                self.values = [self.module(images) for images, _ in self.microbatches]
            return
        self.optimizer.zero_grad()
        losses = []
        for images, target in self.microbatches:
            loss = plain_loss(self.row.config.objective, self.module(images), target)
            torch.autograd.backward(loss / len(self.microbatches))
            losses.append(loss.detach())
        self.optimizer.step()
        self.values = losses


@PEERS.register("ddp")
class ReplicatedSteps(ModuleSteps):
    """The module in DistributedDataParallel (``settings: {views: true}``: of buckets)."""

    def wrapped(self, module: nn.Module) -> nn.Module:
        """Returns the replica of this rank."""
        views = self.row.settings.get("views", False)
        return DistributedDataParallel(module, gradient_as_bucket_view=views)


@PEERS.register("compiled")
class CompiledSteps(ModuleSteps):
    """``torch.compile`` of the module, its weights frozen; it compiles in the first step."""

    converted, tricks = True, False

    @staticmethod
    def lacks(row: BenchRow) -> str:
        """Returns why it cannot run a row."""
        frozen = "weights that are trained cannot be frozen"
        return frozen if row.training else ModuleSteps.lacks(row)

    def step(self) -> None:
        """Runs one step."""
        import torch._inductor.config as inductor

        inductor.freezing = True
        if not hasattr(self, "compiled"):
            self.compiled = torch.compile(self.module)
        with torch.no_grad():
            self.values = [self.compiled(images) for images, _ in self.microbatches]


def plain_module(config: RunConfig, trick: bool = True) -> nn.Module:
    """Returns the network with its first weights, or those of ``weights``, channels_last.

    In float64 it is as it is: oneDNN, for which convolutions are changed, has no such kernels.
    """
    model = whole_model(config)
    for module in model.modules() if config.precision.name != "fp64" else ():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if trick and isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            module.dilation = (2, 2)  # makes ATen choose oneDNN
            # The strides that its gradient will have, or DDP warns of a slow copy.
            weight, width = module.weight, module.in_channels
            weight.data = weight.data.as_strided(weight.shape, (width, 1, width, width))
    return model


def placed(example: Example, device: RankDevice, dtype: torch.dtype | None = None) -> Example:
    """Returns a microbatch on the device, its images in a type."""
    images, target = map(device.place, example)
    return images if dtype is None else images.to(dtype), target


def whole_batch(config: RunConfig) -> Example:
    """Returns the microbatches of the first step of the only replica as one."""
    images, targets = zip(*whole_microbatches(config, 0), strict=True)
    return torch.cat(images).contiguous(memory_format=torch.channels_last), torch.cat(targets)


def calibration_images(config: RunConfig, count: int) -> Tensor:
    """Returns at least so many images (n, C, H, W), whole batches of them."""
    batch = config.batch * -(-count // config.batch)
    data = replace(config.data, length=max(config.data.length, batch))
    return whole_batch(replace(config, batch=batch, data=data))[0]
