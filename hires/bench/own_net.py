"""A network as a user would write it, which stands for all those that hires has no file for.

It imports nothing of hires: ``model=custom model.target=hires.bench.own_net:OwnNet``. Operations
are modules, functions of torch and operators, as they come in networks of other people.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OwnNet(nn.Module):
    """A mobile encoder with gated channels, a dilated way beside it, and a skip to the end."""

    def __init__(self, classes: int = 5, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, 2 * width, 1)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 5, padding=2, groups=2 * width)
        self.squeeze = nn.Linear(2 * width, 4)
        self.excite = nn.Linear(4, 2 * width)
        self.project = nn.Conv2d(2 * width, width, 1, bias=False)
        self.project_norm = nn.BatchNorm2d(width)
        self.dilated = nn.Conv2d(width, width, 3, padding=2, dilation=2)
        self.slope = nn.Parameter(torch.linspace(0.1, 1, width).view(1, width, 1, 1))
        self.merge = nn.Conv2d(2 * width, width, (3, 1), padding=(1, 0))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> logits (n, classes)."""
        x = F.relu(self.stem_norm(self.stem(x)))
        skip = x
        y = F.silu(self.depthwise(F.relu6(self.expand(x))))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        y = self.project_norm(self.project(y * gate[:, :, None, None]))
        x = F.max_pool2d(x + y, 3, stride=2, padding=1)
        x = torch.tanh(self.dilated(x)) * self.slope + x
        x = F.interpolate(x, size=skip.shape[2:], mode="nearest")
        x = F.leaky_relu(self.merge(torch.cat([x, skip], dim=1)), 0.1)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]
