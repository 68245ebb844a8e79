"""Random small networks of convolutions, norms, activations and sums, for properties."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    F.relu, F.relu6, F.silu, F.hardswish, torch.sigmoid, F.gelu, torch.tanh, F.leaky_relu,
    F.hardsigmoid, lambda x: x.clamp(-0.3, 0.8), lambda x: x.clamp_min(-0.1), lambda x: x,
    lambda x: F.dropout(x, 0.5, training=False), lambda x: F.relu(x + 0, inplace=True),
]  # fmt: skip


class _Step(nn.Module):
    """Convolutions, norms, an activation and a sum, in an order that is drawn once."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        kinds = ["post", "post", "pre", "two norms", "shared", "scaled", "plain"]
        self.kind = draw.choice(kinds)
        self.conv, self.other = _conv(draw, width), _conv(draw, width)
        self.norm, self.second = _norm(draw, width), _norm(draw, width)
        self.act = draw.randrange(len(ACTIVATIONS))
        self.adds = draw.choice([None, "before", "after", "twice", "itself"])

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        act = ACTIVATIONS[self.act]
        if self.kind == "pre":
            y = self.conv(act(self.norm(x)))
        elif self.kind == "shared":  # one norm and one convolution, each read twice
            y = self.norm(self.conv(x)) + self.norm(self.other(self.conv(x)))
        else:
            y = self.conv(x) * (0.5 if self.kind == "scaled" else 1)
            y = self.norm(y) if self.kind != "plain" else y
            y = self.second(y) if self.kind == "two norms" else y
        if self.adds == "before":
            y = y + first
        elif self.adds == "twice":
            y = first + 2 * y + y
        elif self.adds == "itself":
            y = x + y
        return act(y) + x if self.adds == "after" else act(y)


def _norm(draw: random.Random, width: int) -> nn.Module:
    affine, stored = draw.random() < 0.8, draw.random() < 0.9
    if draw.random() < 0.1:
        return nn.GroupNorm(2, width)
    return nn.BatchNorm2d(width, affine=affine, track_running_stats=stored)


def _conv(draw: random.Random, width: int) -> nn.Module:
    kernel, dilation = draw.choice([(1, 1), (3, 3), (1, 5), (3, 1), (5, 5)]), draw.choice([1, 1, 2])
    groups, bias = draw.choice([1, 1, 2, width]), draw.choice([False, True])
    if draw.random() < 0.2:
        return nn.ConvTranspose2d(width, width, 3, padding=1, groups=groups, bias=bias)
    mode = draw.choice(["zeros"] * 8 + ["reflect"])
    if draw.random() < 0.2:
        return parametrizations.weight_norm(
            nn.Conv2d(width, width, kernel, padding="same", dilation=dilation, bias=bias)
        )
    how = {"groups": groups, "bias": bias, "padding_mode": mode}
    return nn.Conv2d(width, width, kernel, padding="same", dilation=dilation, **how)


class Composed(nn.Module):
    """Steps that are drawn once; maps keep their size, so that sums always fit."""

    def __init__(self, seed: int, classes: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        width = draw.choice([4, 6])
        self.stem = nn.Conv2d(3, width, 3, stride=draw.choice([1, 2]), padding=1)
        self.steps = nn.ModuleList(_Step(draw, width) for _ in range(draw.randint(3, 7)))
        self.gain = nn.Parameter(torch.rand(width, 1, 1))
        self.head, self.last = nn.Linear(width, classes), nn.BatchNorm1d(classes)
        for module in self.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                    if tensor.is_floating_point():
                        least = 0.2 if name == "running_var" else -0.4
                        tensor.data.uniform_(least, least + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = first = x * torch.exp(self.gain) + torch.exp(self.gain).flatten()[:1]
        for step in self.steps:
            x = step(x, first)
        return self.last(self.head(x.mean((2, 3))))


def composed(seed: int, classes: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return Composed(seed, classes)
