"""AmoebaNet-D (18, 208), a sequence of cells (Real et al. 2018): model.layers, model.filters.

    skip  ---> +------+  ---> next skip = state       two tensors cross every cut between cells
    state ---> | cell |  ---> next state

Maps are halved rounding up, so images may have any size.

Source:
    Real et al., "Regularized evolution for image classifier architecture search", AAAI 2019; the
    cells are those of the authors' TensorFlow code, which the papers on GPipe, torchgpipe and
    MPI4DL train too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.errors import ConfigError
from hires.nets.build_network import NETS

Cells = tuple[list[tuple[int, str]], list[int]]
Size = tuple[int, int]

NORMAL: Cells = (
    [
        *((1, "conv1x1"), (1, "max3x3")),
        *((1, "same"), (0, "conv7x7")),
        *((0, "conv1x1"), (0, "conv7x7")),
        *((2, "max3x3"), (2, "same")),
        *((1, "avg3x3"), (5, "conv1x1")),
    ],
    [0, 3, 4, 6],
)
"""One line for each sum: (index of its operand, operation) twice; then what the output joins.

Operand 0 is the reduced state, 1 the reduced skip, 2 and more are the sums. The paper joins 4, 5
and 6; the authors' code, and all published parameter counts, join these.
"""

REDUCTION: Cells = (
    [
        *((0, "max2x2"), (0, "max3x3")),
        *((2, "same"), (1, "conv3x3")),
        *((2, "conv7x7"), (2, "max3x3")),
        *((3, "same"), (1, "max2x2")),
        *((2, "avg3x3"), (3, "conv1x1")),
    ],
    [4, 5, 6],
)
"""As ``NORMAL``, for the cells that halve the map."""


class ReluConvBN(nn.Sequential):
    """ReLU, a convolution without bias that keeps or halves the map, and a norm."""

    def __init__(
        self, width_in: int, width: int, kernel: Size = (1, 1), stride: Size = (1, 1)
    ) -> None:
        padding = (kernel[0] // 2, kernel[1] // 2)
        conv = nn.Conv2d(width_in, width, kernel, stride, padding, bias=False)
        super().__init__(nn.ReLU(), conv, nn.BatchNorm2d(width))


class FactorizedReduction(nn.Module):
    """Halves the map: half of the channels from even rows and columns, half from odd ones."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width // 2, 1, 2, bias=False)
        self.conv2 = nn.Conv2d(width_in, width - width // 2, 1, 2, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width_in, h, w) -> (n, width, ceil(h / 2), ceil(w / 2))."""
        x = F.relu(x)
        # Shifted up and left by one; only maps of odd size read the zeros that are padded behind.
        shifted = F.pad(x, (-1, 1, -1, 1))
        return self.bn(torch.cat([self.conv1(x), self.conv2(shifted)], 1))  # type: ignore[no-any-return]


class Cell(nn.Module):
    """Five sums of two operations each, on the reduced state and skip and on earlier sums.

    Every operation has ``width`` channels; with ``reduces`` the cell halves the map, and with
    ``skip_is_larger`` the skip's map is twice the state's.
    """

    def __init__(
        self, width_skip: int, width_state: int, width: int, reduces: bool, skip_is_larger: bool
    ) -> None:
        super().__init__()
        chosen, self.joined = REDUCTION if reduces else NORMAL
        self.reads = [index for index, _ in chosen]
        self.reduce_state = ReluConvBN(width_state, width)
        self.reduce_skip: nn.Module = nn.Identity()
        if skip_is_larger:
            self.reduce_skip = FactorizedReduction(width_skip, width)
        elif width_skip != width:
            self.reduce_skip = ReluConvBN(width_skip, width)
        # A reduction halves the two inputs; the sums already have the size of the output.
        self.operations = nn.ModuleList(
            _operation(name, width, 2 if reduces and index < 2 else 1) for index, name in chosen
        )

    def forward(self, skip: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next skip, which is this state, and the next state."""
        made = [self.reduce_state(state), self.reduce_skip(skip)]
        for k in range(0, len(self.reads), 2):
            left = self.operations[k](made[self.reads[k]])
            right = self.operations[k + 1](made[self.reads[k + 1]])
            made.append(left + right)
        return state, torch.cat([made[index] for index in self.joined], 1)


@NETS.register("amoebanet")
class AmoebaNetD(nn.Module):
    """The network with the ImageNet stem: three halvings before the first normal cell.

    A third of ``layers`` normal cells follows the stem and each of two reduction cells; ``filters``
    is four times the channels of the stem.
    """

    def __init__(self, layers: int, filters: int, classes: int, channels: int = 3) -> None:
        super().__init__()
        _check_sizes(layers, filters)
        width = width_skip = width_state = filters // 4
        self.conv = nn.Conv2d(channels, width, 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.cells = nn.ModuleList()
        normal = [False] * (layers // 3)
        reduced = False
        for reduces in (True, True, *normal, True, *normal, True, *normal):
            width *= 2 if reduces else 1
            cell = Cell(width_skip, width_state, width, reduces, skip_is_larger=reduced)
            self.cells.append(cell)
            width_skip, width_state = width_state, width * len(cell.joined)
            reduced = reduces
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width_state, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, H, W) -> logits (n, classes)."""
        state = self.bn(self.conv(x))
        skip = state
        for cell in self.cells:
            skip, state = cell(skip, state)
        return self.fc(self.avgpool(state).flatten(1))  # type: ignore[no-any-return]


def _check_sizes(layers: int, filters: int) -> None:
    for name, number, least, factor in (("layers", layers, 3, 3), ("filters", filters, 8, 4)):
        if number < least or number % factor:
            low = max(least, number // factor * factor)
            raise ConfigError(
                f"model.{name}={number} must be a multiple of {factor}, and {least} or more; use "
                f"{low} or {low + factor}"
            )


def _operation(name: str, width: int, stride: int) -> nn.Module:
    if name == "same":
        return nn.Identity() if stride == 1 else FactorizedReduction(width, width)
    if name == "max2x2":
        return nn.MaxPool2d(2, stride, ceil_mode=True)  # an odd last row has a window of its own
    if name == "max3x3":
        return nn.MaxPool2d(3, stride, 1)
    if name == "avg3x3":
        return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
    if name == "conv1x1":
        return ReluConvBN(width, width, (1, 1), (stride, stride))
    quarter = width // 4
    inner = {
        "conv3x3": [((3, 3), (stride, stride))],
        "conv7x7": [((1, 7), (1, stride)), ((7, 1), (stride, 1))],
    }[name]
    return nn.Sequential(
        ReluConvBN(width, quarter),
        *(ReluConvBN(quarter, quarter, kernel, strides) for kernel, strides in inner),
        ReluConvBN(quarter, width),
    )
