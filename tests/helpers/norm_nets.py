"""Networks of norms, of which some can share messages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Branches(nn.Module):
    """Norms side by side: of one value, in branches of several lengths, one that runs twice."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6, affine=i != 2) for i in range(7))
        self.by_group = nn.GroupNorm(2, 6)
        self.unused = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> logits (n, classes)."""
        conv, norm = self.convs, self.norms
        x = self.stem(x)
        left, right = norm[0](x), norm[1](x)
        long = norm[3](conv[1](F.relu(norm[2](conv[0](F.relu(left))))))
        short = norm[4](conv[2](F.relu(right)))
        still = norm[5](conv[3](x.detach()))
        twice = norm[6](conv[4](left)) + norm[6](conv[5](right))
        dead = self.unused(conv[0](right)).detach()
        x = F.relu(long + short) + self.by_group(twice) + still + 0.1 * dead
        return self.head(x.mean((2, 3)))


def branches(classes: int = 4) -> nn.Module:
    """Returns the network whose norms can share messages."""
    return Branches(classes)


class SampleNorms(nn.Module):
    """Norms of samples side by side, with batch norms, in branches of several lengths."""

    def __init__(self, size: tuple[int, int], classes: int = 4, maps: bool = False) -> None:
        super().__init__()
        half = [(length + 1) // 2 for length in size]
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in range(6))
        # Of the stem: the first level.
        self.group, self.batch = nn.GroupNorm(3, 6), nn.BatchNorm2d(6)
        self.instance = nn.InstanceNorm2d(6, affine=True, track_running_stats=True, momentum=0.3)
        self.layer, self.layer_of_channels = nn.LayerNorm([6, *half]), nn.LayerNorm(half)
        # Behind one of them: the second.
        self.plain_group = nn.GroupNorm(1, 6, affine=False)
        self.twice = nn.GroupNorm(2, 6)
        self.tracked_twice = nn.InstanceNorm2d(6, track_running_stats=True)
        # They share no message: no gradient reaches through one, the weight of one is a value.
        self.still = nn.GroupNorm(3, 6)
        self.raw = None if maps else nn.Parameter(torch.linspace(-1, 1, 6))
        self.head = nn.Linear(6, classes)
        for parameter in (p for p in self.parameters() if p.dim() == 1 or p.shape[-2:] == (*half,)):
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> logits (n, classes); or maps, and all parameters are used in tiles."""
        conv = self.convs
        x = self.stem(x)
        a, b, c = self.group(x), self.instance(x), F.relu(self.layer(x))
        d, e = self.batch(x), self.layer_of_channels(x)
        y = self.plain_group(conv[0](F.relu(a))) + self.twice(conv[1](b)) * self.twice(conv[2](c))
        z = self.tracked_twice(conv[3](d)) + self.tracked_twice(conv[4](e))
        y = y + z + 0.1 * self.still(x.detach())
        y = conv[5](F.relu(y))
        if self.raw is None:
            return y
        y = F.group_norm(y, 3, F.softplus(self.raw))
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


def sample_norms(size: tuple[int, int], classes: int = 4) -> nn.Module:
    """Returns the network whose norms of samples can share messages."""
    return SampleNorms(size, classes)


class NormFirst(nn.Module):
    """A group norm of the images, which have no gradient, and an instance norm behind it."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.first = nn.GroupNorm(3, 3)
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
        self.head = nn.Linear(6, classes)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> logits (n, classes)."""
        y = F.relu(self.norm(self.conv(self.first(x))))
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


def norm_first(classes: int = 4) -> nn.Module:
    """Returns the network whose first layer is a norm of samples."""
    return NormFirst(classes)
