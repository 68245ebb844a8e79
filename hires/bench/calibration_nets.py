"""Makes the networks whose layers a calibration times: chains that words describe.

c3:64/2   convolution, kernel 3, to 64 channels, stride 2; c3:64g32 in 32 groups
t2:64     transposed convolution, kernel and stride 2
save ... add, save ... cat    with the value that was kept
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SHAPE = re.compile(r"([ct])(\d+):(\d+)(?:/(\d+))?(?:g(\d+))?")
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "swish": F.silu,
    "smooth": F.gelu,
    "gate": torch.sigmoid,
    "soft": lambda x: F.softmax(x, 1),
    "max2": lambda x: F.max_pool2d(x, 2),
    "max3": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "shuffle": lambda x: F.pixel_shuffle(x, 2),
    "border": lambda x: F.pad(x, (1, 1, 1, 1)),
}


class Chain(nn.Module):
    """Layers one after the other, then the mean of the image and a classifier."""

    def __init__(self, words: str, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.words, self.layers = words.split(), nn.ModuleList()
        saved, self.places = 0, list[int]()
        for word in self.words:
            layer, before = _layer(word, channels), channels
            self.places.append(len(self.layers) if layer is not None else -1)
            self.layers.extend([] if layer is None else [layer])
            found = _SHAPE.fullmatch(word)
            channels = int(found[3]) if found else channels
            saved = channels if word == "save" else saved
            channels += saved if word == "cat" else 0
            channels = before // 4 if word == "shuffle" else channels
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> logits (n, classes)."""
        kept = x
        for word, place in zip(self.words, self.places, strict=True):
            if word == "save":
                kept = x
            elif word == "add":
                x = x + kept
            elif word == "cat":
                x = torch.cat([kept, x], 1)
            else:
                x = self.layers[place](x) if place >= 0 else _FUNCTIONS[word](x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _layer(word: str, channels: int) -> nn.Module | None:
    """Returns the layer of a word; None: it has no parameters."""
    if found := _SHAPE.fullmatch(word):
        kind, kernel, out = found[1], int(found[2]), int(found[3])
        stride, groups = int(found[4] or 1), int(found[5] or 1)
        if kind == "t":
            return nn.ConvTranspose2d(channels, out, kernel, kernel)
        pads = kernel // 2
        return nn.Conv2d(channels, out, kernel, stride, pads, groups=groups, bias=False)
    if word == "bn":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(min(8, channels), channels) if word == "gn" else None
