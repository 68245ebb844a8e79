"""Networks that mix what tiles hold apart: maps computed whole, samples, tokens, windows, turns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attends(nn.Module):
    """Maps that are computed whole between maps in tiles: attention, a spectrum, a position."""

    def __init__(self, size: tuple[int, int], classes: int = 5, dense: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        half = [(length + 1) // 2 for length in size]
        self.position = nn.Parameter(torch.randn(1, 6, *half) / 3)
        self.column = nn.Parameter(torch.randn(6, 1, half[1]) / 3)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6)
        self.qkv = nn.Conv2d(6, 18, 1)
        self.raw = nn.Parameter(torch.randn(6, 6, 3, 3) / 5)
        self.skip = nn.Conv2d(6, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.head = nn.Conv2d(12, classes, 3, padding=1)
        self.fc = nn.Linear(classes * 6, classes)
        self.dense = dense

    def forward(self, x: Tensor) -> Tensor:
        first = x = F.relu(self.stem(x) + self.position + torch.exp(self.column))
        rows = torch.linspace(0, 1, x.shape[2], device=x.device).view(-1, 1).to(x.dtype)
        y = self.mix(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        x = self.bn(self.skip(F.gelu(y)) * rows + x)
        q, k, v = self.qkv(x).flatten(2).chunk(3, 1)  # (n, 6, H W) each
        weights = ((q.transpose(1, 2) @ k) / 6**0.5).softmax(-1)
        x = x + (v @ weights.transpose(1, 2)).reshape(x.shape)
        spectrum = torch.fft.rfft2(x)  # complex numbers, through which gradients flow
        smooth = torch.fft.irfft2(spectrum / (1 + spectrum.abs()), s=x.shape[2:])
        x = torch.where((x > 0).roll(1, 2), x, smooth.view_as(x))
        weight = (self.raw - self.raw.mean((1, 2, 3), keepdim=True)) / self.raw.std()
        x = F.conv2d(F.relu(x), weight, self.mix.bias, padding=1)
        x = self.head(torch.cat([x, first], 1))
        return x if self.dense else self.fc(F.relu(F.adaptive_avg_pool2d(x, (2, 3))).flatten(1))


class MixesSamples(nn.Module):
    """What no sample computes alone: attention over samples, differences from their mean."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.linspace(0.5, 1, 4))
        self.head = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = self.conv2(x.flip(0) - x.mean(0, keepdim=True)) + x
        y = self.fc(x.mean((2, 3))) * torch.exp(self.gain)
        y = (y @ y.t()).softmax(1) @ self.fc(y) + y.mean(0)
        return self.head(y)  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """Rows and columns in other dims: ConvNeXt, channel shuffle, attention, windows of pixels."""

    def __init__(self, size: tuple[int, int], window: int, dense: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gamma = nn.Parameter(torch.rand(8))
        self.shuffled = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.position = nn.Parameter(torch.randn(1, size[0] * size[1], 8) / 3)
        self.reduce = nn.Conv2d(8, 8, 2, stride=2)
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8)
        self.qkv = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.randn(2, window**2, window**2) / 3)
        self.head = nn.Conv2d(8, 5, 3, padding=1)
        self.window, self.dense = window, dense

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(x.permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y))) * self.gamma
        x = x + y.permute(0, 3, 1, 2)
        n, channels, height, width = x.shape
        y = x.view(n, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        x = x + self.shuffled(y.view(n, channels, height, width))
        x = x + self._attended(x)
        first, x = x, self._windows(x)
        # Attention of channels: a sum over the image.
        flat = x.flatten(2)
        weights = torch.einsum("ncp,ndp->ncd", flat, flat * 0.1).softmax(-1)
        x = first + (weights @ flat).view_as(x)
        x = self.head(x)
        return x if self.dense else x.flatten(2).transpose(1, 2).mean(1)

    def _attended(self, x: Tensor) -> Tensor:
        # SegFormer: queries of all pixels, keys and values of fewer.
        n, channels, height, width = x.shape
        tokens = x.flatten(2).transpose(1, 2) + self.position
        fewer = self.reduce(x).flatten(2).transpose(1, 2)
        q = self.q(tokens).reshape(n, -1, 2, channels // 2).transpose(1, 2)
        k, v = self.kv(self.norm(fewer)).reshape(n, -1, 2, 2, channels // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        y = y + (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
        y = self.out(y.transpose(1, 2).reshape(n, -1, channels))
        return y.transpose(1, 2).reshape(n, channels, height, width)

    def _windows(self, x: Tensor) -> Tensor:
        # Swin: attention within windows; those that reach beyond the image are padded.
        size = self.window
        n, channels, height, width = x.shape
        rows, cols = -(-height // size), -(-width // size)
        y = F.pad(x, (0, cols * size - width, 0, rows * size - height)).permute(0, 2, 3, 1)
        y = y.view(n, rows, size, cols, size, channels).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(-1, size**2, channels)
        q, k, v = self.qkv(y).view(-1, size**2, 3, 2, channels // 2).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-2, -1) + self.bias).softmax(-1) @ v
        y = y.transpose(1, 2).reshape(-1, rows, cols, size, size, channels)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(n, rows * size, cols * size, channels)
        return y.permute(0, 3, 1, 2)[:, :, :height, :width]


class Panorama(nn.Module):
    """Rows and columns that turn round or stand in other dims, strips, softmax over pixels."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
        self.mix = nn.Conv2d(8, 8, 3, padding=1)
        self.table = nn.Embedding(8, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.stem(x))
        z = F.pad(y.permute(0, 2, 3, 1).roll((1, -2), (1, 2)), (0, 0, 1, 2, 0, 1))
        z = (z[:, 1:, 2:-1] * z[:, 1:, 3:]).permute(0, 3, 1, 2)
        y = y + self.mix(F.softmax(self.mix(y), 3) * y.shape[3])
        y = y[:, [7, 1, 0, 3, 4, 4, 6, 5]] + y.roll((-1, 4), (2, 3)).repeat_interleave(2, 1)[:, ::2]
        y = y + self.table(y.argmax(1)).permute(0, 3, 1, 2)
        strips = y.max(3, keepdim=True)[0] * y.mean(2, keepdim=True)
        y = F.rrelu(y + strips, training=self.training)
        noise = torch.bernoulli(y.detach().sigmoid()) * torch.randint_like(y, 3)
        weights = self.mix(y)[:, :1].flatten(2).softmax(2)
        context = (y + 0.1 * noise).flatten(2) @ weights.transpose(1, 2)
        return self.head(context.squeeze(2) + z.topk(2, 1)[0].mean((1, 2, 3))[:, None])
