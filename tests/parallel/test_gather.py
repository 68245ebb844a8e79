"""The window of a tile beside neighbours whose pixels are at hand; strides of a gathered one."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from hires.parallel.conversion_kernels import count_once
from hires.parallel.halo import Frame, Piece, gather_window

ROW = (2, 3, 0, 3)
"""The row below a tile of two rows."""


class Neighbour:
    """Lends one row, and has borrowed the row above it."""

    exchange = SimpleNamespace(dtype=torch.float64)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def pieces(self) -> list[Piece]:
        return [(ROW, torch.full((1, 1, 1, 3), 5.0, dtype=torch.float64))]

    def add_gradient(self, origin: object, grad: Tensor, once: bool) -> None:
        self.gradient = grad[:, :, -1:].clone()

    def reduce_halo_gradients(self) -> SimpleNamespace:
        arrived = [((1, 2, 0, 3), torch.full((1, 1, 1, 3), 100.0, dtype=torch.float64))]
        return SimpleNamespace(returned=lambda: arrived)


def maps(rows: int) -> Tensor:
    return torch.ones(1, 1, rows, 3, dtype=torch.float64, requires_grad=True)


def test_window_holds_own_pixels_the_neighbours_and_the_ring():
    x, neighbour = maps(2), Neighbour()
    frame = Frame((0, 2, 0, 3), (-1, 3, 0, 3), (9, 3), fill=7.0)
    window = gather_window(x, neighbour, frame)  # type: ignore[arg-type]
    assert window[0, 0, :, 0].tolist() == [7.0, 1.0, 1.0, 5.0]
    window.sum().backward()
    assert x.grad is not None
    assert x.grad[0, 0, :, 0].tolist() == [1.0, 101.0]
    assert neighbour.gradient is not None
    assert neighbour.gradient[0, 0, :, 0].tolist() == [1.0]


def test_gradient_of_a_sum_is_left_to_the_other_operand():
    # An addition hands one tensor to both operands. The rows of one image lie dense in memory, and
    # what a neighbour gives back was added to them in place: to the other operand's gradient, too.
    x, other = maps(2), maps(3)
    frame = Frame((0, 2, 0, 3), (0, 3, 0, 3), (9, 3), private=False)
    doubled = other * 2  # made first, so its gradient is computed last
    window = gather_window(x, Neighbour(), frame)  # type: ignore[arg-type]
    (doubled + window).backward(torch.ones(1, 1, 3, 3, dtype=torch.float64))
    assert x.grad is not None
    assert x.grad[0, 0, :, 0].tolist() == [1.0, 101.0]
    assert other.grad is not None
    assert other.grad[0, 0, :, 0].tolist() == [2.0, 2.0, 2.0]


def test_use_of_a_parameter_that_is_whole_on_all_tiles_counts_on_the_first_alone():
    for tile in range(3):
        parameter = torch.ones(2, requires_grad=True)
        count_once(parameter, tile).sum().backward()
        assert (parameter.grad is not None) == (tile == 0)
