"""A graph computes what the module computes, however it was written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hires.core.config.run_config import ModelConfig, RunConfig
from hires.nets.build_network import build_model
from hires.nets.trace import trace, trace_config
from hires.plan.graph import INPUT, Graph
from tests.helpers.custom_nets import zoo
from tests.helpers.run_graph import run_graph
from tests.helpers.tiny_nets import Forward, Net, traced

SHAPE = (2, 4, 9, 8)


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def same(forward: Forward, training: bool = True, **parts: Any) -> Graph:
    """Checks that the graph computes what the module does; returns it."""
    net = Net(forward, **parts).train(training)
    graph = trace(net, list(SHAPE), training)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(run_graph(graph, net, x.clone()), net(x.clone()))
    return graph


@pytest.mark.parametrize("dense", [False, True])
def test_graph_of_every_rule_computes_what_the_module_computes(dense):
    net = zoo(dense=dense).eval()
    x = torch.randn(2, 3, 33, 29, generator=torch.Generator().manual_seed(0))
    graph = trace(net, list(x.shape), training=False)
    with torch.no_grad():
        assert torch.equal(run_graph(graph, net, x), net(x))


def test_modules_and_functions_give_the_same_operations():
    def functional(n: Any, x: Tensor) -> Tensor:
        x = F.conv2d(x, n.conv.weight, n.conv.bias, padding=1)
        bn = n.bn
        x = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, True)
        return F.linear(F.adaptive_avg_pool2d(F.relu(x), 1).flatten(1), n.fc.weight, n.fc.bias)

    parts = {"conv": nn.Conv2d(4, 6, 3, padding=1), "bn": nn.BatchNorm2d(6), "fc": nn.Linear(6, 3)}
    layers = [parts["conv"], parts["bn"], nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)]
    module = nn.Sequential(*layers, nn.Flatten(), parts["fc"])
    as_modules, as_functions = trace(module, list(SHAPE), True), traced(functional, **parts)
    assert ops(as_modules) == ops(as_functions)
    assert as_modules.params.keys() == {
        "0.weight", "0.bias", "5.weight", "5.bias",
        *(f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")),
    }  # fmt: skip
    for one, other in zip(as_modules.nodes, as_functions.nodes, strict=True):
        assert (one.shape, one.dtype, one.flops) == (other.shape, other.dtype, other.flops)


def test_values_are_named_after_their_modules():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)
            self.input = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.input(self.conv(self.conv(x)) + x)

    graph = trace(nn.Sequential(Block(), nn.Sigmoid()), list(SHAPE), True)
    assert [node.name for node in graph.nodes] == [
        "0.conv",
        "0.conv.conv2d_1",
        "0",
        "0.input",
        "1",
    ]
    assert trace(Block(), list(SHAPE), True).output == "input.relu"  # "input" is the images


def test_network_is_left_as_it_was():
    net = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    trace(net, list(SHAPE), training=True)
    assert not net.training
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())


def test_nothing_is_allocated():
    # 64 images of a gigapixel: the shapes are known without a byte of them.
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.AdaptiveAvgPool2d(1))
    graph = trace(net, [64, 3, 32768, 32768], training=True)
    assert graph.nodes[0].shape == [64, 8, 16383, 16383]


@pytest.mark.parametrize(("training", "kinds"), [(True, [True]), (False, [False])])
def test_training_decides_what_norms_do(training, kinds):
    graph = same(lambda n, x: n.bn(x), training, bn=nn.BatchNorm2d(4))
    assert [node.args["training"] for node in graph.nodes] == kinds


@pytest.mark.parametrize(
    "forward",
    [
        lambda n, x: x if x.shape[2] > 100 else F.relu(x),
        lambda n, x: F.pad(x, (0, (-x.shape[3]) % 3, 0, (-x.shape[2]) % 5)),
        lambda n, x: sum(x * i for i in range(x.shape[1])),
        lambda n, x: F.interpolate(x[..., ::2], size=x.shape[2:]),
    ],
)
def test_control_flow_on_shapes_is_resolved(forward):
    graph = same(forward)
    assert "sym" not in str(ops(graph))


@pytest.mark.parametrize(
    "forward",
    [
        lambda n, x: F.relu(n.conv(x), inplace=True),
        lambda n, x: (n.conv(x).add_(1)).mul_(x).clamp_(0, 1),
        lambda n, x: F.hardtanh(F.leaky_relu_(x + 1, 0.2), inplace=True),
        lambda n, x: (x + 1).masked_fill_(x > 0, 2.0),
        lambda n, x: F.dropout(x * 2, training=False).relu_(),
        lambda n, x: (x * 2).view(2, -1).relu_().view(SHAPE),
        lambda n, x: (x * 2).contiguous().neg_(),
    ],
)
def test_in_place_operation_becomes_an_ordinary_one(forward):
    graph = same(forward, conv=nn.Conv2d(4, 4, 1))
    assert not [op for op in ops(graph) if op.split(".")[0].endswith("_")]


def test_value_is_read_as_it_is_after_a_write():
    def forward(n: Any, x: Tensor) -> Tensor:
        y = x + 1
        F.relu(y, inplace=True)
        return y * 2

    assert ops(same(forward)) == ["add.Tensor", "relu.default", "mul.Tensor"]


def test_what_the_output_does_not_depend_on_is_left_out():
    def forward(n: Any, x: Tensor) -> Tensor:
        n.unused(x)
        return n.used(x)

    graph = same(forward, used=nn.Conv2d(4, 4, 1), unused=nn.Conv2d(4, 4, 1))
    assert [node.name for node in graph.nodes] == ["used"]
    assert set(graph.params) == {"used.weight", "used.bias"}


def test_two_names_of_one_parameter_are_one_parameter():
    # The copy that is traced forgets the tie, so the second name was one that no rank could find.
    one, other = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False)
    other.weight = one.weight
    graph = same(lambda n, x: n.other(n.one(x)), one=one, other=other)
    assert set(graph.params) == {"one.weight"}
    assert [node.params for node in graph.nodes] == [["one.weight"]] * 2


def test_gradients_flow_from_trainable_parameters_only():
    def forward(n: Any, x: Tensor) -> Tensor:
        y = n.frozen(x) * 2
        z = n.conv(y)
        return n.frozen(z) + z.detach() + (z > 0)

    frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
    graph = same(forward, frozen=frozen, conv=nn.Conv2d(4, 4, 1))
    found = {node.name: node.needs_grad for node in graph.nodes}
    assert found == {
        "frozen": False,
        "mul": False,
        "conv": True,
        "frozen.conv2d_2": True,
        "detach": False,  # a gradient was expected here, and autograd had none
        "add": True,
        "gt": False,
        "add_1": True,
    }
    assert not graph.needs_grad(INPUT)
    assert not graph.params["frozen.weight"].trainable


def test_flops_are_those_that_torch_counts():
    model = build_model(ModelConfig(depth=18, classes=10), 0)
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(2, 3, 64, 48, device="meta"))
    graph = trace(model, [2, 3, 64, 48], training=True)
    counted = [node.flops for node in graph.nodes if node.kind in ("conv2d", "linear")]
    assert sum(counted) == counter.get_total_flops()


def test_flops_of_a_transposed_convolution_are_those_of_its_input():
    graph = traced(lambda n, x: n.up(x), up=nn.ConvTranspose2d(4, 6, 3, 2, groups=2))
    # 2 per multiply-add, each of the 2*4*9*8 numbers spread over 3*3 pixels of 6/2 channels.
    assert graph.nodes[0].flops == 2 * (2 * 4 * 9 * 8) * (3 * 3 * 3)


def test_microbatch_is_what_is_traced():
    config = RunConfig(image=[24, 20], batch=12, model=ModelConfig("preact_resnet", n=1, classes=3))
    config.parallel.replicas, config.parallel.microbatches = 2, 3
    assert trace_config(config).input_shape == [2, 3, 24, 20]
    config.parallel.microbatches = 50  # does not divide; the plan says so
    assert trace_config(config).input_shape == [1, 3, 24, 20]


def test_graph_survives_plain_values():
    graph = trace(zoo(), [2, 3, 33, 29], training=True)
    again = Graph.from_dict(graph.to_dict())
    assert again == graph
    assert again.to_dict() == graph.to_dict()
