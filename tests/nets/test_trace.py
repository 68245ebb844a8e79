"""A graph computes the values and gradients that the module computes, however it is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hires.core.config.model_config import ModelConfig
from hires.nets.build_network import build_model, constant_tensor
from hires.nets.trace import trace
from hires.plan.graph import INPUT, Graph
from tests.helpers.simulated_tiles import check_tiles
from tests.helpers.tiny_nets import Forward, Net, traced

SHAPE = (2, 4, 6, 8)


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


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


def masks(n: Any, x: Tensor) -> Tensor:
    y = n.conv(x)
    y[y > 0] = 0.25
    y[:, [0, 2]] = 5.0
    y[:, :, torch.arange(2), torch.arange(2)] += 1
    z = torch.zeros_like(y)
    z[:, 1:].copy_(y[:, :1])
    return y + z.masked_fill_(z < 1, 2.0)


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


def without_gradients(n: Any, x: Tensor) -> Tensor:
    y = n.conv(x)
    with torch.no_grad():
        z = n.conv(y) * 2
        with torch.enable_grad():
            w = n.conv(z)
        mask = y > 0
    return (n.conv(z) + w) * mask + y


FORWARDS: list[Forward] = [
    *(slices, below_views, masks),
    *(write_below_untouched_dropout, into_the_image, types, without_gradients),
    # In place.
    lambda n, x: F.relu(n.conv(x), inplace=True),
    lambda n, x: (n.conv(x).add_(1)).mul_(x).clamp_(0, 1),
    lambda n, x: (x + 1).masked_fill_(x > 0, 2.0),
    lambda n, x: F.dropout(x * 2, training=False).relu_(),
    lambda n, x: (x * 2).view(2, -1).relu_().view(SHAPE),
    lambda n, x: (x * 2).contiguous().neg_(),
    # Control flow on shapes.
    lambda n, x: x if x.shape[2] > 100 else F.relu(x),
    lambda n, x: F.pad(x, (0, (-x.shape[3]) % 3, 0, (-x.shape[2]) % 5)),
    lambda n, x: sum(x * i for i in range(x.shape[1])),
    lambda n, x: F.interpolate(x[..., ::2], size=x.shape[2:]),
    # Tensors made beside the images, and parts without gradients, or computed twice.
    lambda n, x: n.conv(x) + torch.arange(8, device=x.device),
    lambda n, x: n.conv(x) + n.conv(x).data * n.conv.weight.data.mean(),
    lambda n, x: checkpoint(n.conv, F.relu(n.conv(x)), use_reentrant=True),
    lambda n, x: checkpoint(n.conv, F.relu(n.conv(x)), use_reentrant=False),
]


@pytest.mark.parametrize("part", range(2))
def test_graph_has_the_values_and_gradients_of_the_module(part):
    for forward in FORWARDS[part::2]:
        graph = check_tiles(Net(forward, conv=nn.Conv2d(4, 4, 1)), SHAPE, (1, 1))
        assert not [op for op in ops(graph) if op.split(".")[0].endswith("_")]
        assert "sym" not in str(ops(graph))


def test_values_are_named_after_their_modules():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)
            self.input = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.input(self.conv(self.conv(x)) + x)

    graph = trace(nn.Sequential(Block(), nn.Sigmoid()), list(SHAPE), True)
    names = ["0.conv", "0.conv.conv2d_1", "0", "0.input", "1"]
    assert [node.name for node in graph.nodes] == names
    assert trace(Block(), list(SHAPE), True).output == "input.relu"  # "input" is the images


def test_network_is_left_as_it_was_and_nothing_is_allocated():
    net = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for training in (True, False):
        graph = trace(net, list(SHAPE), training)
        assert [node.args.get("training") for node in graph.nodes] == [None, training]
    assert not net.training
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())
    # 64 images of a gigapixel: the shapes are known without a byte of them.
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.AdaptiveAvgPool2d(1))
    graph = trace(net, [64, 3, 32768, 32768], training=True)
    assert graph.nodes[0].shape == [64, 8, 16383, 16383]


def test_what_the_output_does_not_depend_on_is_left_out():
    def forward(n: Any, x: Tensor) -> Tensor:
        n.unused(x)
        y = n.used(x)
        half = y[:, :2]
        z = y + 1
        half.add_(1)  # which nobody reads
        return z

    graph = traced(forward, SHAPE, used=nn.Conv2d(4, 4, 1), unused=nn.Conv2d(4, 4, 1))
    assert ops(graph) == ["conv2d.default", "add.Tensor"]
    assert set(graph.params) == {"used.weight", "used.bias"}


def test_two_names_of_one_parameter_are_one_parameter():
    # The copy that is traced forgets the tie, so the second name was one that no rank could find.
    one, other = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False)
    other.weight = one.weight
    graph = traced(lambda n, x: n.other(n.one(x)), SHAPE, one=one, other=other)
    assert set(graph.params) == {"one.weight"}
    assert [node.params for node in graph.nodes] == [["one.weight"]] * 2


def test_gradients_flow_from_trainable_parameters_only():
    def forward(n: Any, x: Tensor) -> Tensor:
        y = n.frozen(x) * 2
        z = n.conv(y)
        return n.frozen(z) + z.detach() + (z > 0)

    frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
    graph = traced(forward, SHAPE, frozen=frozen, conv=nn.Conv2d(4, 4, 1))
    # No gradient comes to what is detached: one was expected, and autograd had none.
    flows = {"conv", "frozen.conv2d_2", "add", "add_1"}
    assert {node.name for node in graph.nodes if node.needs_grad} == flows
    assert {node.name for node in graph.nodes} - flows == {"frozen", "mul", "detach", "gt"}
    assert not graph.needs_grad(INPUT)
    assert not graph.params["frozen.weight"].trainable


TABLE = torch.tensor([0.5, 1.0, 2.0, 4.0])


def test_constants_are_part_of_the_graph():
    # A tensor held as an attribute or in a list, of the file, of NumPy, or made in the pass.
    def forward(n: Any, x: Tensor) -> Tensor:
        x = (x - n.mean) * n.scales[1] / TABLE.view(4, 1, 1)
        x = x + torch.from_numpy(np.linspace(0, 1, 8, dtype=np.float32))
        return x * torch.tensor([1, 2, 3, 4])[:, None, None] + torch.arange(8)

    parts = {"mean": torch.rand(4, 1, 1), "scales": [torch.tensor(2.0), torch.tensor(3.0)]}
    check_tiles(Net(forward, **parts), SHAPE, (1, 1))
    graph = Graph.from_dict(traced(forward, SHAPE, **parts).to_dict())
    assert graph == traced(forward, SHAPE, **parts)
    assert sum(fact.is_constant for fact in graph.params.values()) == 5
    assert torch.equal(constant_tensor(graph.params["constant.mean"]), parts["mean"])
    assert not any(node.needs_grad for node in graph.nodes)


def test_flops_are_those_that_torch_counts():
    model = build_model(ModelConfig(depth=18, classes=10), 0)
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(2, 3, 64, 48, device="meta"))
    graph = trace(model, [2, 3, 64, 48], training=True)
    counted = [node.flops for node in graph.nodes if node.kind in ("conv2d", "linear")]
    assert sum(counted) == counter.get_total_flops()
    graph = traced(lambda n, x: n.up(x), SHAPE, up=nn.ConvTranspose2d(4, 6, 3, 2, groups=2))
    # 2 per multiply-add, each of the 2*4*6*8 numbers spread over 3*3 pixels of 6/2 channels.
    assert graph.nodes[0].flops == 2 * (2 * 4 * 6 * 8) * (3 * 3 * 3)


def test_buffer_that_is_written_is_read_before_and_has_a_new_value():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.seen
            self.seen.view(-1)[0].add_(1)
            return y * self.seen

    graph = trace(Counts(), list(SHAPE), True)
    reads = [node for node in graph.nodes if node.params]
    assert [node.op for node in reads] == ["clone.default"]
    new = graph.updates["seen"]
    assert new in graph.nodes[-1].inputs
    assert reads[0].name in graph.by_name[new].inputs or reads[0].name in graph.nodes[1].inputs
