"""Networks of linear layers: a small vision transformer, and an MLP-Mixer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 12


class Mixer(nn.Module):
    """Linear layers over the tokens and over the channels, with LayerNorm and GELU between them.

    Source: Tolstikhin et al., "MLP-Mixer: an all-MLP architecture for vision", 2021.
    """

    def __init__(self, size: tuple[int, int], classes: int = 4) -> None:
        super().__init__()
        tokens = (size[0] // 3) * (size[1] // 3)
        self.patches = nn.Conv2d(3, WIDTH, 3, stride=3)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens1, self.tokens2 = nn.Linear(tokens, 10), nn.Linear(10, tokens)
        self.channels1, self.channels2 = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> logits (n, classes)."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        y = self.norm1(x).transpose(1, 2)
        x = x + self.tokens2(F.gelu(self.tokens1(y))).transpose(1, 2)
        x = x + self.channels2(F.gelu(self.channels1(self.norm2(x))))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Attention between tokens, and linear layers of each.

    Source: Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021.
    """

    def __init__(self, size: tuple[int, int], classes: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 3, stride=3)
        tokens = (size[0] // 3) * (size[1] // 3)
        self.position = nn.Parameter(torch.randn(1, tokens, WIDTH) / 3)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> logits (n, classes)."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        q, k, v = (one.unsqueeze(1) for one in self.qkv(self.norm1(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x[:, -1])  # type: ignore[no-any-return]


mixer, transformer = Mixer, Transformer
