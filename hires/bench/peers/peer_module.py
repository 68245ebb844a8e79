"""A plain ``nn.Module`` in one process, with every advantage that hires has.

Its convolutions are channels_last, and 1x1 convolutions go to oneDNN (``settings: {trick: false}``
leaves that out).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hires.bench.bench_rows import BenchRow
from hires.bench.race import Runner
from hires.core.config.run_config import RunConfig
from hires.engine.build import whole_model
from hires.engine.device import HOST, RankDevice
from hires.engine.loader import whole_microbatches
from hires.engine.optimizer import make_optimizer
from hires.parallel.loss import plain_loss

Example = tuple[Tensor, Tensor]
"""Images (n, C, H, W), channels_last, of one microbatch, and what they are compared with."""
TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def lacks(row: BenchRow) -> str:
    """Returns why it cannot run a row."""
    if row.config.precision.name not in TYPES:
        return f"torch has no inference in {row.config.precision.name}"
    if row.config.device != "cpu" and not row.settings.get("trick", True):
        return "only the CPU has the 1x1 trick"
    return ""


def build(row: BenchRow, rank: int, device: RankDevice) -> Runner:
    """Returns the module with the microbatches of this rank's replica."""
    trick = row.settings.get("trick", True) and device.torch == HOST
    return ModuleSteps(device.place_module(plain_module(row.config, trick)), row, rank, device)


class ModuleSteps(Runner):
    """One step of microbatches through a module, perhaps in DistributedDataParallel."""

    def __init__(self, module: nn.Module, row: BenchRow, rank: int, device: RankDevice) -> None:
        config = row.config
        dtype, replica = TYPES[config.precision.name], rank if config.parallel.replicas > 1 else 0
        self.module, self.loss = module.to(dtype), config.objective
        self.microbatches = [placed(m, device, dtype) for m in whole_microbatches(config, replica)]
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
