"""Which pixels tiles borrow: each value's once, for all that read it."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hires.plan.graph import Graph
from hires.plan.halos import companions
from hires.plan.plan import CommOp, Stage
from tests.helpers.tiny_nets import Forward, tiled, traced


def staged(forward: Forward, tiles: tuple[int, int] = (2, 1), **parts: Any) -> tuple[Graph, Stage]:
    """The graph and only stage of a network on images of 12x8."""
    graph = traced(forward, (2, 4, 12, 8), **parts)
    return graph, tiled(graph, tiles)[0]


def halos(forward: Forward, tiles: tuple[int, int] = (2, 1), **parts: Any) -> list[CommOp]:
    """The exchanges of a network on images of 12x8."""
    stage, findings = tiled(traced(forward, (2, 4, 12, 8), **parts), tiles)
    assert not findings
    return [op for op in stage.comm if op.kind == "halo"]


def conv(kernel: int, **how: Any) -> nn.Conv2d:
    return nn.Conv2d(4, 4, kernel, padding=how.get("dilation", 1) * (kernel // 2), **how)


def test_branches_of_one_value_borrow_its_pixels_once_with_the_widest_margin():
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.stem(x)
        return n.narrow(x) + n.wide(x)

    [_, shared] = halos(forward, stem=conv(3), narrow=conv(3), wide=conv(5))
    assert (shared.node, shared.readers, shared.back) == ("narrow", ["narrow", "wide"], True)
    assert shared.messages == [[1, 0, 6, 8, 0, 8], [0, 1, 4, 6, 0, 8]]


def test_reader_that_needs_no_other_tile_does_not_take_part():
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.stem(x)
        return n.point(x) + n.next(x) + F.avg_pool2d(x, 1)

    [_, shared] = halos(forward, stem=conv(3), point=conv(1), next=conv(3))
    assert shared.readers == ["next"]


def test_reader_without_a_gradient_borrows_apart():
    # Its gradient would never come, and the others would wait for it for ever.
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.stem(x)
        return n.next(x) + n.watched(x).detach() + n.other(x)

    ops = halos(forward, stem=conv(3), next=conv(3), watched=conv(3), other=conv(3))
    assert [(op.readers, op.back) for op in ops[1:]] == [
        (["next", "other"], True),
        (["watched"], False),
    ]


def test_residual_block_with_a_windowed_shortcut_sends_one_halo():
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.stem(x)
        return n.second(F.relu(n.first(x))) + n.shortcut(x)

    parts = {name: conv(3) for name in ("stem", "first", "second", "shortcut")}
    assert [op.readers for op in halos(forward, (1, 2), **parts)] == [
        ["stem"],
        ["first", "shortcut"],
        ["second"],
    ]


def test_halos_of_two_values_of_a_cell_set_out_together():
    def forward(n: Any, x: Tensor) -> Tensor:
        x, y = n.left(x), n.right(x)
        return n.one(x) + n.two(y)

    parts = {"left": conv(1), "right": conv(1), "one": conv(3), "two": conv(3)}
    graph, stage = staged(forward, **parts)
    [(first, second)] = companions(graph, stage).items()
    assert (first, second.value) == ("halo of left for one", "right")


def test_halo_of_a_value_that_is_not_there_yet_waits_for_it():
    def forward(n: Any, x: Tensor) -> Tensor:
        return n.two(n.one(x))

    graph, stage = staged(forward, one=conv(3), two=conv(3))
    assert companions(graph, stage) == {}


def test_halos_of_two_segments_set_out_one_by_one():
    def forward(n: Any, x: Tensor) -> Tensor:
        x, y = n.left(x), n.right(x)
        return n.one(x) + n.two(y)

    parts = {"left": conv(1), "right": conv(1), "one": conv(3), "two": conv(3)}
    graph, stage = staged(forward, **parts)
    stage.segments = [stage.first, graph.position["two"], stage.last]
    assert companions(graph, stage) == {}
