"""Networks that reorder the dims of a map, on ranks that share its images beside plain torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hires
from hires.core.ranks.world import World
from tests.helpers.shard_jobs import torch_world
from tests.helpers.tiny_nets import Forward

ORDERS: dict[str, Forward] = {
    "permute": lambda n, x: x.permute(2, 0, 3, 1),
    "permute, negative": lambda n, x: x.permute(0, -2, -1, -3),
    "moveaxis": lambda n, x: x.moveaxis(1, 3),
    "moveaxis back": lambda n, x: torch.moveaxis(x, -1, 1),
    "moveaxis of lists": lambda n, x: x.moveaxis((1, 2), (-1, 0)),
    "moveaxis of one in a list": lambda n, x: torch.moveaxis(x, [1], [3]),
    "moveaxis of all": lambda n, x: x.moveaxis([0, 1, 2, 3], [3, 0, 1, 2]),
    "movedim": lambda n, x: x.movedim(1, -1),
    "movedim of lists": lambda n, x: x.movedim([3, 1], [0, 2]),
    "transpose": lambda n, x: x.transpose(-3, -1),
    "transpose of rows": lambda n, x: x.transpose(2, 3),
    "swapaxes": lambda n, x: x.swapaxes(1, -2),
    "swapdims": lambda n, x: torch.swapdims(x, 0, 3),
    "mT": lambda n, x: x.mT,
    "mH": lambda n, x: x.mH,
    "adjoint": lambda n, x: x.adjoint(),
    "T of pixels": lambda n, x: x[0].flatten(1).T.reshape(x.shape[2], x.shape[3], -1),
    "t of pixels": lambda n, x: x[0].flatten(1).t().reshape(x.shape[2], x.shape[3], -1),
    "H of pixels": lambda n, x: x[1].flatten(1).H.reshape(x.shape[2], x.shape[3], -1),
    "tokens": lambda n, x: x.flatten(2).moveaxis(1, 2).unflatten(1, x.shape[2:]),
    "tokens, last first": lambda n, x: x.flatten(2).moveaxis(-1, 0).unflatten(0, x.shape[2:]),
    "windows": lambda n, x: (
        x.unflatten(3, (2, -1)).unflatten(2, (2, -1)).moveaxis((2, 4), (1, 2)).flatten(0, 2)
    ),
    "depth to space": lambda n, x: (
        x.unflatten(1, (-1, 2, 2)).permute(0, 1, 4, 2, 5, 3).flatten(4).flatten(2, 3)
    ),
    "channel shuffle": lambda n, x: x.unflatten(1, (2, -1)).swapaxes(1, 2).flatten(1, 2),
    "stack and move": lambda n, x: torch.stack((x, 2 * x), -1).moveaxis(-1, 1).flatten(1, 2),
    "chunk and move": lambda n, x: torch.cat(x.moveaxis(1, -1).chunk(2, -1)[::-1], -1),
    "flip": lambda n, x: x.flip(1, 3),
    "fliplr": lambda n, x: torch.fliplr(x),
    "rot90": lambda n, x: torch.rot90(x, 1, (2, 3)),
    "rot90 of channels": lambda n, x: torch.rot90(x, -1, (1, 2)),
    "roll": lambda n, x: x.moveaxis(1, -1).roll((1, 2), (1, 2)),
    "roll of all": lambda n, x: x.roll(5),
    "pixel shuffle": lambda n, x: F.pixel_shuffle(x, 2),
    "pixel unshuffle": lambda n, x: F.pixel_unshuffle(x, 2),
    "unfold": lambda n, x: x.unfold(2, 2, 2),
    "diagonal": lambda n, x: x.diagonal(0, 2, 3),
    "einsum": lambda n, x: torch.einsum("nchw->whnc", x),
    "select": lambda n, x: x.moveaxis(1, 0).select(1, 1),
    "strided": lambda n, x: x.moveaxis(1, 3)[:, ::2, 1::2],
    "prelu of all in a row": lambda n, x: F.prelu(x.flatten(0), x.new_tensor([0.3])),
    "prelu of columns": lambda n, x: F.prelu(x.permute(2, 1, 0, 3), x[0, :, 0, 0]),
    "kron": lambda n, x: torch.kron(x.unflatten(1, (2, -1)), x[:1, :1, :1, None, :2]),
    "unbind": lambda n, x: torch.stack(x.swapaxes(1, 3).unbind(3), 1),
}  # fmt: skip


class Reordered(nn.Module):
    """A convolution, then another order of dims, then another factor for each of its numbers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.order, self.conv = ORDERS[name], nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns two numbers of each sample, to which every number adds by its place."""
        y = self.conv(x)
        made = self.order(self, y)
        places = torch.arange(made.numel(), dtype=made.dtype).reshape(made.shape)
        return y.mean((2, 3)) + ((places + 1).sin() * made).tanh().sum()


def reordered(world: World, size: list[int], tiles: list[int]) -> dict[str, float | str]:
    """Returns for each order the largest difference of output and gradients, or the error."""
    answers: dict[str, float | str] = {}
    with torch_world(world):
        mesh = init_device_mesh("cpu", (world.size,))
        for name in ORDERS:
            torch.manual_seed(0)
            images = torch.randn(2, 4, *size, dtype=torch.float64)
            plain = Reordered(name).double()
            try:
                ours = hires.shard(copy.deepcopy(plain), mesh, example=images, tiles=tiles)
                pairs: Any = [[], []]
                for one, found in zip((plain, ours), pairs, strict=True):
                    made = one(images)
                    slope = torch.randn(made.shape, generator=torch.Generator().manual_seed(1))
                    made.backward(slope.double())
                    found += [made.detach(), *(p.grad for p in one.parameters())]
                errors = [float((a - b).abs().max()) for a, b in zip(*pairs, strict=True)]
                answers[name] = max(errors)
            except Exception as error:
                answers[name] = f"{type(error).__name__}: {error}"
    return answers
