"""Which pixels tiles borrow, when, and how many layers one exchange serves."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hires.plan.plan import Box, CommOp, Stage, Transfer
from tests.helpers.tiny_nets import Forward, laid_out, tiled, traced


def halos(forward: Forward, tiles: tuple[int, int] = (2, 1), **parts: Any) -> list[CommOp]:
    """The exchanges of a network on images of 12x8."""
    stage, findings = tiled(traced(forward, (2, 4, 12, 8), **parts), tiles)
    assert not findings
    return halos_of(stage)


def halos_of(stage: Stage) -> list[CommOp]:
    return [op for op in stage.comm if op.kind == "halo"]


def conv(kernel: int, **how: Any) -> nn.Conv2d:
    return nn.Conv2d(4, 4, kernel, padding=how.get("dilation", 1) * (kernel // 2), **how)


def test_branches_of_one_value_borrow_its_pixels_once_with_the_widest_margin():
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.stem(x)
        return n.first(x) + n.second(x)

    for first, second in ((3, 5), (5, 3)):
        [_, shared] = halos(forward, stem=conv(3), first=conv(first), second=conv(second))
        assert (shared.node, shared.readers, shared.back) == ("first", ["first", "second"], True)
        assert shared.messages == [
            Transfer(1, 0, Box(0, 2, (6, 8, 0, 8))),
            Transfer(0, 1, Box(0, 2, (4, 6, 0, 8))),
        ]


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


def fused(forward: Forward, fuse: int, **parts: Any) -> Stage:
    """The stage of a network on images of 12x8 in two rows of tiles."""
    graph = traced(forward, (2, 4, 12, 8), **parts)
    [stage], findings = laid_out(graph, [Stage(0, 0, len(graph.nodes), [2, 1], 0)], fuse)
    assert not findings
    return stage


def chain(n: Any, x: Tensor) -> Tensor:
    return n.pool(n.d(n.c(F.relu(n.b(n.a(x))))))


CHAIN = {**{name: conv(3) for name in "abcd"}, "pool": nn.AdaptiveAvgPool2d(1)}


def test_chain_exchanges_once_for_every_so_many_layers():
    expected = {
        1: [("a", 1), ("b", 1), ("c", 1), ("d", 1)],
        2: [("a", 2), ("c", 2)],
        3: [("a", 3), ("d", 1)],
        4: [("a", 4)],
    }
    for fuse, exchanges in expected.items():
        found = halos_of(fused(chain, fuse, **CHAIN))
        # Tile 1 sends its first rows to tile 0.
        sent = [next(m.box.rect for m in op.messages if m.source == 1) for op in found]
        rows = [rect[1] - rect[0] for rect in sent]
        assert list(zip([op.node for op in found], rows, strict=True)) == exchanges
    # Values between two exchanges are held as wide as the next layers need.
    assert fused(chain, 3, **CHAIN).extents == {
        "a": [[0, 8, 0, 8], [4, 12, 0, 8]],
        "b": [[0, 7, 0, 8], [5, 12, 0, 8]],
        "relu": [[0, 7, 0, 8], [5, 12, 0, 8]],
    }


def residual(n: Any, x: Tensor) -> Tensor:
    for first, second in ((n.a, n.b), (n.c, n.d)):
        x = F.relu(x + second(F.relu(first(x))))
    return n.pool(x)


def test_both_branches_of_a_residual_block_start_from_the_pixels_of_one_exchange():
    # Three layers would fit, but within a block two values are alive.
    for fuse in (2, 3):
        assert [op.node for op in halos_of(fused(residual, fuse, **CHAIN))] == ["a", "c"]
    [whole] = halos_of(fused(residual, 4, **CHAIN))
    assert whole.readers == ["a", "add"]


def test_values_that_leave_the_stage_are_not_held_wider():
    graph = traced(chain, (2, 4, 12, 8), **CHAIN)
    cut = graph.position["c"]
    stages = [Stage(0, 0, cut, [2, 1], 0), Stage(1, cut, len(graph.nodes), [2, 1], 2)]
    stages, findings = laid_out(graph, stages, 4)
    assert not findings
    assert [op.node for stage in stages for op in halos_of(stage)] == ["a", "c"]
    assert set(stages[0].extents) == {"a"}
    assert set(stages[1].extents) == {"c"}
