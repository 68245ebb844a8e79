"""Small networks that hold every operator with a rule for 8-bit integers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.config.model_config import ModelConfig
from hires.nets.build_network import build_model, materialise

SIZES = {
    "resnet": (45, 39),
    "preact_resnet": (19, 22),
    "amoebanet": (38, 35),
    "unet": (37, 45),
    "edsr": (19, 22),
    "mobile": (45, 37),
    "efficient": (41, 38),
    "mixed": (29, 31),
}
"""Name -> rows and columns of its images, whose quotients by the strides leave remainders."""


class Inverted(nn.Module):
    """MobileNet-V2's block: wide depthwise convolutions between narrow maps."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.steps = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU6(), nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.adds = stride == 1 and channels == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.steps(x) if self.adds else self.steps(x)  # type: ignore[no-any-return]


class Mobile(nn.Module):
    """A MobileNet-V2 of three blocks."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        stem = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6()
        self.maps = nn.Sequential(*stem, Inverted(8, 8, 1), Inverted(8, 12, 2), Inverted(12, 12, 1))
        self.head = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.maps(x).mean([2, 3]))  # type: ignore[no-any-return]


class Excited(nn.Module):
    """Blocks of MobileNet-V3 and EfficientNet: every channel is weighted by what it sees."""

    def __init__(self, channels: int, gate: nn.Module, behind: nn.Module) -> None:
        super().__init__()
        self.wide = nn.Conv2d(channels, channels, 3, 1, 1, groups=channels, bias=False)
        self.norm, self.behind, self.gate = nn.BatchNorm2d(channels), behind, gate
        self.less, self.more = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)
        self.last = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.behind(self.norm(self.wide(x)))
        weights = self.more(self.behind(self.less(y.mean((2, 3), keepdim=True))))
        return x + self.last(y * self.gate(weights))  # type: ignore[no-any-return]


class Efficient(nn.Module):
    """Activations that are tables, and products of maps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.blocks = nn.Sequential(
            Excited(8, nn.Sigmoid(), nn.SiLU()), Excited(8, nn.Hardsigmoid(), nn.Hardswish())
        )
        self.mask, self.other = nn.Conv2d(8, 1, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.less, self.more, self.head = nn.Linear(8, 6), nn.Linear(6, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(F.mish(self.stem(x)))
        y = torch.sigmoid(self.mask(y)) * y + y * torch.tanh(self.other(y))
        y = F.max_pool2d(F.gelu(y), 2)
        y = F.relu(self.less(F.silu(self.other(y) + y).mean((2, 3))))
        return F.hardswish(self.head(F.gelu(self.more(y))))


class Mixed(nn.Module):
    """Operators that the other networks lack, and two that have no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.dilated = nn.Conv2d(3, 8, 3, padding=2, dilation=2)
        self.plain = nn.Conv2d(8, 8, 3, padding=1)
        self.same = nn.Conv2d(12, 4, (2, 4), padding="same")
        self.up = nn.ConvTranspose2d(8, 6, 3, 2, 1, output_padding=1, groups=2)
        self.wide = nn.ConvTranspose2d(6, 8, 4, 3, 0, dilation=2)
        self.norm = nn.BatchNorm2d(8)
        self.row = nn.Conv2d(2, 2, (1, 7), (2, 1), (0, 3))
        self.column = nn.Conv2d(2, 2, (7, 1), padding=(3, 0), groups=2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.elu(self.dilated(x))
        z = F.softshrink(F.leaky_relu(self.plain(y), 0.1))
        y = torch.cat([F.relu(self.plain(y)), z[:, :4]], 1)
        y = self.same(F.pad(y, [1, 2, 0, 1]))
        y = F.interpolate(y, scale_factor=2, mode="bilinear")
        y = F.interpolate(y, scale_factor=1.5, mode="nearest")
        y = torch.cat([y, y], 1)
        y = F.avg_pool2d(y, 3, 2, 1, count_include_pad=False, ceil_mode=True)
        y = F.pad(self.wide(self.up(y)), [1, 1, 1, 1], mode="reflect")
        y = F.max_pool2d(F.relu(self.norm(y)), (3, 2), 2, 1, ceil_mode=True)
        y = F.pixel_shuffle(F.avg_pool2d(y, 2, 1, 1), 2) * 0.5
        return F.adaptive_avg_pool2d(self.column(F.relu(self.row(y))), 3)


def network(name: str, size: tuple[int, int]) -> nn.Module:
    """Returns a small network of some kind, with norms that do something."""
    sizes = {
        "resnet": {"depth": 18, "classes": 4},
        "preact_resnet": {"depth": 11, "classes": 4},
        "amoebanet": {"layers": 3, "filters": 8, "classes": 4},
        "unet": {"width": 4, "levels": 2, "classes": 3},
        "edsr": {"width": 8, "blocks": 2, "scale": 2, "res_scale": 0.1},
    }
    own = {"mobile": Mobile, "mixed": Mixed, "efficient": Efficient}
    torch.manual_seed(1)
    if name in own:
        net: nn.Module = own[name]()
    else:
        config = ModelConfig(name=name, **sizes[name])  # type: ignore[arg-type]
        net = build_model(config, 0, size)
        materialise(net, [*net.state_dict()], 0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    return net
