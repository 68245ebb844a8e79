"""A tile's convolution in strips against the plain convolution of the whole image."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hires.parallel.halo import Piece, part
from hires.parallel.strips import Strips, strip_convolution, strips_of
from hires.plan.graph import Rect
from hires.plan.tiling import Axes, Axis, intersect, is_empty, need_of, own_rect

GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def convolutions(draw: st.DrawFn) -> Axis:
    kernel, stride = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    dilation, padding = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    size = draw(st.integers(1, 26))
    free = size + 2 * padding - dilation * (kernel - 1) - 1
    assume(free >= 0)
    return Axis("window", size, free // stride + 1, kernel, stride, padding, dilation)


class Lent:
    """Pixels that other tiles would send, in pieces, and a map for their gradients."""

    def __init__(self, image: Tensor, held: Rect, need: Rect) -> None:
        self.total = torch.zeros_like(image)
        r0, r1, c0, c1 = need
        rows = intersect(need, (held[0], held[1], c0, c1))
        around = [(r0, held[0], c0, c1), (held[1], r1, c0, c1)]
        around += [(*rows[:2], c0, held[2]), (*rows[:2], held[3], c1)]
        halves = [half for rect in around for half in _halves(intersect(rect, need))]
        self.lent: list[Piece] = [(h, crop_of(image, h).clone()) for h in halves if not is_empty(h)]

    def pieces(self) -> list[Piece]:
        return self.lent

    def add_gradient(self, origin: Rect, grad: Tensor, once: bool) -> None:
        for rect, _ in self.lent:
            common = intersect(rect, origin)
            if not is_empty(common):
                crop_of(self.total, common).add_(part(grad, origin, common))

    def reduce_halo_gradients(self) -> None:
        return None


def _halves(rect: Rect) -> list[Rect]:
    middle = (rect[2] + rect[3]) // 2
    return [(*rect[:2], rect[2], middle), (*rect[:2], middle, rect[3])]


def crop_of(image: Tensor, rect: Rect) -> Tensor:
    return image[:, :, rect[0] : rect[1], rect[2] : rect[3]]


def random_of(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def held_by(axes: Axes, grid: tuple[int, int], tile: int, wider: int) -> Rect:
    """What a tile owns, with so many more pixels on each side."""
    height, width = (axis.size_in for axis in axes)
    r0, r1, c0, c1 = own_rect([height, width], grid, tile)
    wide = r0 - wider, r1 + wider, c0 - wider, c1 + wider
    return intersect(wide, (0, height, 0, width))


def arguments(axes: Axes, groups: int) -> dict[str, Any]:
    kernel = [axis.kernel for axis in axes]
    return {
        "weight": random_of(6, 4 // groups, *kernel).requires_grad_(),
        "bias": random_of(6).requires_grad_(),
        "stride": [axis.stride for axis in axes],
        "padding": [axis.padding for axis in axes],
        "dilation": [axis.dilation for axis in axes],
        "groups": groups,
    }


def check(axes: Axes, strips: Strips, out: Rect, groups: int) -> None:
    """Compares a tile's value, and the gradients of everything that it depends on."""
    image = random_of(2, 4, *(axis.size_in for axis in axes)).requires_grad_()
    args = arguments(axes, groups)
    expected = crop_of(torch.conv2d(image, *args.values()), out)
    lent = Lent(image.detach(), strips.held, need_of(axes, out))
    tile = crop_of(image.detach(), strips.held).contiguous(memory_format=torch.channels_last)
    x = tile.requires_grad_()
    found = strip_convolution(x, lent, strips, args)  # type: ignore[arg-type]
    compare(found, expected)
    direction = random_of(*expected.shape)
    wanted = [args["weight"], args["bias"]]
    theirs = torch.autograd.grad(expected, [image, *wanted], direction)
    grad_x, *ours = torch.autograd.grad(found, [x, *wanted], direction)
    crop_of(lent.total, strips.held).add_(grad_x)
    for one, other in zip([lent.total, *ours], theirs, strict=True):
        compare(one, other)


def compare(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    largest = float(expected.detach().abs().max().clamp(min=1))
    assert float((found - expected).detach().abs().max()) <= 1e-12 * largest


@settings(max_examples=150, deadline=None)
@given(
    axes=st.tuples(convolutions(), convolutions()),
    grid=GRIDS,
    wider=st.integers(0, 3),
    groups=st.sampled_from([1, 2]),
)
def test_any_convolution_of_any_tile_equals_that_of_the_whole_image(axes, grid, wider, groups):
    size_out = [axis.size_out for axis in axes]
    for tile in range(grid[0] * grid[1]):
        out, held = own_rect(size_out, grid, tile), held_by(axes, grid, tile, wider)
        strips = None if is_empty(out) else strips_of(axes, held, out, "on")
        if strips is not None:
            check(axes, strips, out, groups)


def test_small_tiles_are_divided_only_on_request():
    axes = (Axis("window", 32, 32, 3, padding=1), Axis("window", 8, 8, 3, padding=1))
    for overlap, divided in (("auto", False), ("on", True), ("off", False)):
        strips = strips_of(axes, (0, 16, 0, 8), (0, 16, 0, 8), overlap)
        assert (strips is not None) == divided
    large = Axis("window", 128, 128, 3, padding=1), axes[1]
    assert strips_of(large, (0, 64, 0, 8), (0, 64, 0, 8), "auto") is not None
