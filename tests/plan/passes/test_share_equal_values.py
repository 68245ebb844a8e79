"""Which equal nodes of an inference become one, and that this costs neither memory nor messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.cli.screens.show_plan import rewriting_lines
from hires.comm import rehearsal
from hires.core.config.run_config import RunConfig
from hires.engine.build import build_rank
from hires.engine.footprint import footprint
from hires.plan import planner
from hires.plan.graph import Graph
from hires.plan.passes import rewriting
from hires.plan.passes.share_equal_values import share_equal_values, share_in_stages
from hires.plan.plan import Plan
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.tiny_nets import Forward, traced

AMOEBANET = {"name": "amoebanet", "layers": 3, "filters": 16, "classes": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tiles": {"tiles": [2, 1]},
    "stages": {"stages": 3},
    "tiles and stages": {"tiles": [2, 1], "stages": 3, "spatial_stages": 1},
    "gems": {"stages": 2, "directions": 2, "schedule": "gems"},
}


def graph_of(forward: Forward, **parts: nn.Module) -> Graph:
    return traced(forward, training=False, **parts)


def in_stages(graph: Graph, *starts: int) -> Graph:
    """The network with what the stages share that begin at these nodes."""
    shared, bounds = share_in_stages(graph, [0, *starts, len(graph.nodes)])
    assert bounds[-1] == len(shared.nodes)
    return shared


def kinds(graph: Graph) -> list[str]:
    return [node.kind for node in graph.nodes]


def conv(width: int = 4) -> nn.Module:
    return nn.Conv2d(4, width, 3, padding=1)


def test_value_of_equal_nodes_takes_the_place_of_what_they_alone_read():
    graph = graph_of(
        lambda net, x: net.b(F.relu(y := net.a(x))) + net.c(F.relu(y)) * F.relu(y),
        a=conv(), b=conv(), c=conv(),
    )  # fmt: skip
    shared = share_equal_values(graph)
    assert kinds(shared).count("relu") == 1
    assert shared.shared == 2
    assert share_equal_values(shared) is shared
    assert "computed once for several nodes" in rewriting_lines({"graph": shared.to_dict()})[0]
    assert Graph.from_dict(shared.to_dict()).shared == 2


def test_value_beside_what_it_is_computed_from_is_shared_within_a_stage_alone():
    graph = graph_of(
        lambda net, x: torch.cat([net.b(F.relu(y := net.a(x))), net.c(F.relu(y)), y], 1),
        a=conv(), b=conv(16), c=conv(16),
    )  # fmt: skip
    assert share_equal_values(graph) is graph
    assert kinds(in_stages(graph)).count("relu") == 1
    assert kinds(in_stages(graph, 3)).count("relu") == 2
    assert kinds(in_stages(graph, 1)).count("relu") == 1


def test_value_is_computed_again_where_keeping_it_needs_more_memory():
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        early = F.silu(y).mean((2, 3), keepdim=True)
        large = net.b(y).mean((2, 3), keepdim=True)
        return y.mean((2, 3), keepdim=True) + early + large.sum() + F.silu(y)

    graph = graph_of(forward, a=conv(), b=conv(64))
    assert kinds(in_stages(graph)).count("silu") == 2


def test_modules_that_are_called_twice_and_views_are_shared():
    graph = graph_of(
        lambda net, x: net.a(x).flatten(2) + F.relu_(net.a(x)).flatten(2) + net.a(x).flatten(2),
        a=conv(),
    )  # fmt: skip
    made = kinds(in_stages(graph))
    assert (made.count("convolution") + made.count("conv2d"), made.count("relu")) == (1, 1)
    assert made.count("flatten") + made.count("view") + made.count("reshape") == 2


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: torch.rand_like(y := net.a(x)) - torch.rand_like(y),
        lambda net, x: F.dropout(y := net.a(x), 0.5) - F.dropout(y, 0.5),
        lambda net, x: net.n(y := net.a(x)) - net.n(y),
        lambda net, x: F.elu(y := net.a(x), 0.5) - F.elu(y, 0.25),
        lambda net, x: net.a(x) - net.b(x),
    ],
    ids=["random", "dropout", "statistics", "arguments", "parameters"],
)
def test_what_is_not_equal_stays(forward):
    graph = traced(forward, training=True, a=conv(), b=conv(), n=nn.BatchNorm2d(4))
    names = [node.name for node in graph.nodes]
    assert [node.name for node in in_stages(share_equal_values(graph)).nodes] == names


def test_equal_values_that_the_network_returns_keep_their_name():
    graph = graph_of(lambda net, x: (F.relu(y := net.a(x)).mean(), F.relu(y))[1], a=conv())
    shared = in_stages(share_equal_values(graph))
    assert shared.output == graph.output
    assert graph.output in shared.by_name


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans a config without sharing."""

    def planned(config: RunConfig) -> Plan:
        with monkeypatch.context() as patch:
            patch.setitem(rewriting.PASSES, "share_equal_values", lambda graph, config: graph)
            patch.setattr(rewriting, "share_equal_values", lambda graph: graph)
            patch.setattr(
                planner, "rewritten_stages", lambda config, graph, bounds: (graph, bounds)
            )
            return plan_of(config)

    return planned


def infer(model: dict[str, Any] = AMOEBANET, **keys: Any) -> RunConfig:
    return config_of(model=model, task={"name": "infer"}, **{"image": 64, "batch": 2, **keys})


def test_amoebanet_has_the_same_bits_in_float64(without):
    config, made = infer(), []
    for plan in (plan_of(config), without(config)):
        with rehearsal(0, shared_memory=False), torch.no_grad():
            engine = build_rank(config, plan, 0, 1)
            made += [engine.executor.step(engine.loaders, keep_outputs=True).outputs]
            engine.close()
    for key, value in made[0].items():
        assert torch.equal(value, made[1][key])


FAST = ("one process", "tiles and stages")
SOME = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", SOME)
def test_layouts_of_amoebanet_need_no_more_memory_and_messages(layout: str, without):
    config = infer(parallel=LAYOUTS[layout], precision={"name": "fp32"})
    plan, other = plan_of(config), without(config)
    assert plan.graph.shared > 5
    assert len(plan.graph.nodes) < len(other.graph.nodes)
    assert plan.totals["bytes"] <= other.totals["bytes"]
    pairs = zip(footprint(config, plan), footprint(config, other), strict=True)
    assert all(new.peak_bytes <= old.peak_bytes for new, old in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [{"name": "resnet", "classes": 4}, {"name": "unet", "classes": 4}, {"name": "edsr"}],
    ids=["resnet", "unet", "edsr"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_networks_need_no_more_memory(model: dict[str, Any], layout: str, without):
    config = infer(model, parallel=LAYOUTS[layout], precision={"name": "fp32"})
    pairs = zip(footprint(config, plan_of(config)), footprint(config, without(config)), strict=True)
    assert all(new.peak_bytes <= old.peak_bytes for new, old in pairs)


@pytest.mark.parametrize(
    "keys",
    [{"task": {"name": "calibrate"}}, {"engine": {"fuse": "off"}}, {"task": {"name": "train"}}],
)
def test_calibration_training_and_fuse_off_keep_every_value(keys):
    off = {"task": {"name": "infer"}, "engine": {"fuse": "off"}}
    graph = plan_of(config_of(model=AMOEBANET, **off)).graph
    bounds = [0, len(graph.nodes)]
    assert len(share_in_stages(graph, bounds)[0].nodes) < len(graph.nodes)
    config = config_of(model=AMOEBANET, **keys)
    assert rewriting.rewritten_stages(config, graph, bounds) == (graph, bounds)
