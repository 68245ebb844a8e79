"""A forward pass may write into memory: its graph computes the values that come of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.nets.trace import trace
from hires.plan.graph import Graph
from tests.helpers.run_graph import run_graph
from tests.helpers.tiny_nets import Net

SHAPE = [2, 4, 6, 8]


def slices(n: Any, x: Tensor) -> Tensor:
    y = x * 2
    y[:, :3] = 1
    y[..., ::2] += n.conv(x)[..., 1::2]
    y[:, -1, 2:5] *= 3
    y[1] = y[0]
    return y


def below_views(n: Any, x: Tensor) -> Tensor:
    y = n.conv(x)
    flat, turned = y.flatten(1), y.permute(0, 2, 3, 1)
    y.neg_()
    turned[..., 1].add_(1)
    return flat.view(y.shape) + turned.permute(0, 3, 1, 2) * y


def pieces(n: Any, x: Tensor) -> Tensor:
    y = x * 2  # torch refuses to write into pieces that have a gradient
    first, second = y.chunk(2, dim=1)
    first.mul_(second)
    rows = y.unbind(2)
    rows[1].zero_()
    narrow = y.narrow(3, 2, 4).transpose(1, 3).squeeze()
    narrow.sub_(0.5)
    return first + second * y[:, :2]


def masks(n: Any, x: Tensor) -> Tensor:
    y = n.conv(x)
    y[y > 0] = 0.25
    y[:, [0, 2]] = 5.0
    y[:, :, torch.arange(2), torch.arange(2)] += 1
    z = torch.zeros_like(y)
    z[:, 1:].copy_(y[:, :1])
    return y + z.masked_fill_(z < 1, 2.0)


def canvas(n: Any, x: Tensor) -> Tensor:
    # The image in the middle of a larger one, as padding is often written.
    y = torch.zeros(2, 4, 10, 12)
    y[:, :, 2:8, 2:10] = n.conv(x)
    y.diagonal(dim1=2, dim2=3).add_(1)
    return y


def write_through_view(n: Any, x: Tensor) -> Tensor:
    y = x * 2
    F.relu(y[:, 1:], inplace=True)
    return y


def write_below_untouched_dropout(n: Any, x: Tensor) -> Tensor:
    y = n.conv(x)
    same = F.dropout(y, training=False)
    y.neg_()
    return same


def into_the_image(n: Any, x: Tensor) -> Tensor:
    x -= 0.5
    x[:, 0] /= 2
    return n.conv(x)


def types(n: Any, x: Tensor) -> Tensor:
    counts = torch.zeros(SHAPE, dtype=torch.int64)
    counts += 3
    counts |= 4
    y = n.conv(x)
    y += counts
    y[:, 1] = counts[:, 0]
    return y


@pytest.mark.parametrize(
    "forward",
    [
        *(slices, below_views, pieces, masks, canvas, write_through_view),
        *(write_below_untouched_dropout, into_the_image, types),
    ],
)
def test_graph_has_the_values_and_gradients_that_writes_leave(forward):
    net = Net(forward, conv=nn.Conv2d(4, 4, 1)).double()
    graph = trace(net, SHAPE, training=True, dtype=torch.float64)
    assert not [node.op for node in graph.nodes if node.kind.endswith("_")]
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected, (weight, bias) = net(x.clone()), net.parameters()
    computed = run_graph(graph, net, x.clone())
    assert torch.equal(computed, expected)
    factor = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    if expected.requires_grad:
        grads = [torch.autograd.grad(y, (weight, bias), factor) for y in (computed, expected)]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def traced(forward: Any) -> Graph:
    return trace(Net(forward), SHAPE, training=True)


def test_write_into_channels_stays_an_operation_on_channels():
    def forward(n: Any, x: Tensor) -> Tensor:
        y = x * 2
        y[:, :3] = 1
        return y

    kinds = [node.kind for node in traced(forward).nodes]
    assert kinds == ["mul", "slice", "full_like", "slice_scatter"]


def test_write_that_nobody_reads_leaves_no_node():
    def forward(n: Any, x: Tensor) -> Tensor:
        y = x * 2
        half = y[:, :2]
        z = y + 1
        half.add_(1)
        return z

    assert [node.kind for node in traced(forward).nodes] == ["mul", "add"]


def test_out_argument_is_a_write():
    def forward(n: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        z = torch.add(x, 1, out=y)
        return (y.mul_(2) + z) if z is y else z

    graph = traced(forward)
    assert [node.kind for node in graph.nodes] == ["add", "mul", "add"]
    assert graph.nodes[-1].inputs == [graph.nodes[1].name]


def test_numbers_between_bounds_are_drawn():
    # The operator is named after a keyword: its trace was no Python.
    graph = traced(lambda n, x: x + torch.zeros_like(x).random_(3, 5))
    assert [node.op for node in graph.nodes][1:3] == ["random.to", "add.Tensor"]
    assert graph.nodes[1].args["to"] == 2


def test_buffer_that_is_written_is_read_before_and_has_a_new_value():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.seen
            self.seen.view(-1)[0].add_(1)
            return y * self.seen

    graph = trace(Counts(), SHAPE, True)
    reads = [node for node in graph.nodes if node.params]
    assert [node.op for node in reads] == ["clone.default"]
    new = graph.updates["seen"]
    assert new in graph.nodes[-1].inputs
    assert reads[0].name in graph.by_name[new].inputs or reads[0].name in graph.nodes[1].inputs


def test_attribute_that_is_assigned_and_never_read_before_is_traced():
    # As the positions of ConViT, which are made again for an image of another size.
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = torch.zeros(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            if self.places.shape[1] != x.shape[3]:
                self.places = torch.arange(x.shape[3]).view(1, -1) / x.shape[3]
            return x + self.places

    net = Positions()
    graph = trace(net, SHAPE, True)
    assert "arange" in [node.kind for node in graph.nodes]
    assert net.places.shape == (1, 1)
