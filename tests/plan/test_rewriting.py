"""Which operators of an inference become others, or one, and which must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from hires.core.config.run_config import RunConfig, from_dict
from hires.engine.footprint import footprint
from hires.plan.graph import Graph
from hires.plan.passes import rewriting
from hires.plan.passes.rewriting import rewritten
from hires.plan.passes.share_equal_values import share_equal_values
from hires.plan.plan import Plan
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.tiny_nets import Forward, traced

INFER: RunConfig = from_dict({"task": {"name": "infer"}, "precision": {"name": "fp32"}})


def rewritten_of(forward: Forward, **parts: nn.Module) -> Graph:
    graph = traced(forward, training=False, **parts)
    again = rewritten(INFER, rewritten(INFER, graph))
    assert rewritten(INFER, graph).to_dict() == again.to_dict()
    return again


def kinds(forward: Forward, **parts: nn.Module) -> list[str]:
    return kinds_of(rewritten_of(forward, **parts))


def kinds_of(graph: Graph) -> list[str]:
    return [node.kind for node in graph.nodes]


def conv(width: int = 4, **how: bool | int) -> nn.Module:
    return nn.Conv2d(4, width, 3, padding=1, **how)  # type: ignore[arg-type]


def test_norm_sum_and_activation_are_part_of_the_later_convolution():
    graph = rewritten_of(
        lambda net, x: F.relu(net.n2(net.c2(x)) + net.n1(net.c1(x))),
        c1=conv(bias=False), c2=conv(), n1=nn.BatchNorm2d(4), n2=nn.BatchNorm2d(4, affine=False),
    )  # fmt: skip
    first, last = graph.nodes
    assert (first.kind, first.name, last.kind, last.name) == (
        "conv2d",
        "n2",
        "fused_conv2d",
        "relu",
    )
    assert last.args["other"] == {"value": "n2"}
    assert last.args["activation"] == ["relu"]
    names = ["c1.weight", "n1.running_mean", "n1.running_var", "n1.weight", "n1.bias"]
    assert graph.params["n1:bias"].recipe is not None
    assert graph.params["n1:bias"].recipe["params"] == names
    assert graph.own_params(["n1:weight"]) == {*names}


def test_norm_behind_layers_of_other_kinds_is_folded():
    for layer in (nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Conv2d(4, 6, 1, groups=2)):
        norm = nn.BatchNorm2d(6)
        assert "batch_norm" not in kinds(lambda net, x: net.n(net.c(x)), c=layer, n=norm)


def test_norm_stays_where_its_input_has_other_readers_or_statistics_are_its_own():
    norm = nn.BatchNorm2d(4)
    assert "fused_norm" in kinds(lambda net, x: (y := net.c(x)) * net.n(y), c=conv(), n=norm)
    before = kinds(lambda net, x: net.c(F.silu(net.n(x))), c=conv(), n=norm)
    assert before == ["fused_norm", "conv2d"]
    free = nn.BatchNorm2d(4, track_running_stats=False)
    assert "batch_norm" in kinds(lambda net, x: net.n(net.c(x)), c=conv(), n=free)
    plain = nn.Linear(8, 4)  # its channels are not those of the norm
    tokens = nn.BatchNorm1d(9)
    assert "batch_norm" in kinds(lambda net, x: net.n(net.c(x[:, 0])), c=plain, n=tokens)


def test_activation_is_part_of_the_linear_layer_before_it():
    head = nn.Linear(4, 3)
    graph = rewritten_of(lambda net, x: F.gelu(net.c(x.mean((2, 3)))), c=head)
    assert graph.nodes[-1].kind == "fused_linear"
    assert graph.nodes[-1].args["activation"] == ["gelu", "none"]
    assert "linear" in kinds(lambda net, x: (y := net.c(x.mean((2, 3)))) * F.silu(y), c=head)
    assert "add" in kinds(lambda net, x: net.c(x.mean((2, 3))) + x.amax((2, 3))[:, :3], c=head)


def test_sum_that_broadcasts_or_is_weighted_stays():
    assert "add" in kinds(lambda net, x: net.c(x) + x.mean((2, 3), keepdim=True), c=conv())
    assert "add" in kinds(lambda net, x: torch.add(net.c(x), F.relu(x), alpha=2), c=conv())
    assert "add" in kinds(lambda net, x: (y := net.c(x)) + y, c=conv())


def test_dropout_goes_and_constants_are_computed_at_the_start():
    part = parametrizations.weight_norm(conv())
    graph = rewritten_of(
        lambda net, x: F.dropout(net.c(F.dropout(x, 0.5, False)), 0.5, False), c=part
    )
    assert [node.kind for node in graph.nodes] == ["conv2d", "dropout"]  # the output keeps its name
    assert [param.recipe is not None for param in graph.params.values()].count(True) == 1


def test_training_and_fuse_off_keep_the_network():
    graph = traced(lambda net, x: net.n(net.c(x)), training=False, c=conv(), n=nn.BatchNorm2d(4))
    assert (
        rewritten(from_dict({"task": {"name": "infer"}, "engine": {"fuse": "off"}}), graph) is graph
    )
    assert rewritten(from_dict({}), graph) is graph


AMOEBANET = {"name": "amoebanet", "layers": 3, "filters": 16, "classes": 4}


def graph_of(forward: Forward, **parts: nn.Module) -> Graph:
    return traced(forward, training=False, **parts)


def test_value_of_equal_nodes_takes_the_place_of_what_they_alone_read():
    graph = graph_of(
        lambda net, x: net.b(F.relu(y := net.a(x))) + net.c(F.relu(y)) * F.relu(y),
        a=conv(), b=conv(), c=conv(),
    )  # fmt: skip
    shared = share_equal_values(graph)
    assert kinds_of(shared).count("relu") == 1
    assert shared.shared == 2
    assert share_equal_values(shared) is shared
    assert Graph.from_dict(shared.to_dict()).shared == 2


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
    assert [node.name for node in share_equal_values(graph).nodes] == names


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans a config without sharing."""

    def planned(config: RunConfig) -> Plan:
        with monkeypatch.context() as patch:
            patch.setitem(rewriting.PASSES, "share_equal_values", lambda graph, config: graph)
            patch.setattr(rewriting, "share_equal_values", lambda graph: graph)
            return plan_of(config)

    return planned


def infer(**keys: Any) -> RunConfig:
    config = {"model": AMOEBANET, "task": {"name": "infer"}, "image": 32, "batch": 2, **keys}
    return config_of(**config)


def test_sharing_needs_no_more_memory_and_messages(without):
    layout = {"tiles": [2, 1], "stages": 3, "spatial_stages": 1}
    config = infer(parallel=layout, precision={"name": "fp32"})
    plan, other = plan_of(config), without(config)
    assert plan.graph.shared > 5
    assert len(plan.graph.nodes) < len(other.graph.nodes)
    assert plan.totals["bytes"] <= other.totals["bytes"]
    pairs = zip(footprint(config, plan), footprint(config, other), strict=True)
    assert all(new.peak_bytes <= old.peak_bytes for new, old in pairs)
