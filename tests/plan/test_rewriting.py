"""Which operators of an inference become others, or one, and which must not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from hires.core.config.run_config import from_dict
from hires.plan.graph import Graph
from hires.plan.passes.rewriting import rewritten
from tests.helpers.tiny_nets import Forward, traced

INFER = from_dict({"task": {"name": "infer"}, "precision": {"name": "fp32"}})


def rewritten_of(forward: Forward, **parts: nn.Module) -> Graph:
    graph = traced(forward, training=False, **parts)
    again = rewritten(INFER, rewritten(INFER, graph))
    assert rewritten(INFER, graph).to_dict() == again.to_dict()
    return again


def kinds(forward: Forward, **parts: nn.Module) -> list[str]:
    return [node.kind for node in rewritten_of(forward, **parts).nodes]


def conv(**how: bool) -> nn.Module:
    return nn.Conv2d(4, 4, 3, padding=1, **how)


def pooled(net, x):
    return net.c(x.mean((2, 3)))


def test_norm_sum_and_activation_are_part_of_the_later_convolution():
    graph = rewritten_of(
        lambda net, x: F.relu(net.n2(net.c2(x)) + net.n1(net.c1(x))),
        c1=conv(bias=False), c2=conv(), n1=nn.BatchNorm2d(4), n2=nn.BatchNorm2d(4, affine=False),
    )  # fmt: skip
    assert [(node.kind, node.name) for node in graph.nodes] == [
        ("conv2d", "n2"), ("fused_conv2d", "relu"),
    ]  # fmt: skip
    last = graph.nodes[-1].args
    assert (last["other"], last["activation"]) == ({"value": "n2"}, ["relu"])
    names = ["c1.weight", "n1.running_mean", "n1.running_var", "n1.weight", "n1.bias"]
    assert graph.params["n1:bias"].recipe["params"] == names
    assert graph.own_params(["n1:weight"]) == {*names}
    # Behind layers of other kinds, too; and an activation is part of a linear layer.
    for layer in (nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Conv2d(4, 6, 1, groups=2)):
        folded = kinds(lambda net, x: net.n(net.c(x)), c=layer, n=nn.BatchNorm2d(6))
        assert "batch_norm" not in folded
    last = rewritten_of(lambda net, x: F.gelu(pooled(net, x)), c=nn.Linear(4, 3)).nodes[-1]
    assert (last.kind, last.args["activation"]) == ("fused_linear", ["gelu", "none"])


def test_norm_stays_where_its_input_has_other_readers_or_statistics_are_its_own():
    norm = nn.BatchNorm2d(4)
    assert "fused_norm" in kinds(lambda net, x: (y := net.c(x)) * net.n(y), c=conv(), n=norm)
    before = kinds(lambda net, x: net.c(F.silu(net.n(x))), c=conv(), n=norm)
    assert before == ["fused_norm", "conv2d"]
    free = nn.BatchNorm2d(4, track_running_stats=False)
    assert "batch_norm" in kinds(lambda net, x: net.n(net.c(x)), c=conv(), n=free)
    plain, tokens = nn.Linear(8, 4), nn.BatchNorm1d(9)  # its channels are not those of the norm
    assert "batch_norm" in kinds(lambda net, x: net.n(net.c(x[:, 0])), c=plain, n=tokens)


def test_sum_that_broadcasts_or_is_weighted_stays():
    head = nn.Linear(4, 3)
    assert "add" in kinds(lambda net, x: net.c(x) + x.mean((2, 3), keepdim=True), c=conv())
    assert "add" in kinds(lambda net, x: torch.add(net.c(x), F.relu(x), alpha=2), c=conv())
    assert "add" in kinds(lambda net, x: (y := net.c(x)) + y, c=conv())
    assert "add" in kinds(lambda net, x: pooled(net, x) + x.amax((2, 3))[:, :3], c=head)
    assert "linear" in kinds(lambda net, x: (y := pooled(net, x)) * F.silu(y), c=head)


def test_dropout_goes_and_constants_are_computed_at_the_start():
    part = parametrizations.weight_norm(conv())
    graph = rewritten_of(
        lambda net, x: F.dropout(net.c(F.dropout(x, 0.5, False)), 0.5, False), c=part
    )
    assert [node.kind for node in graph.nodes] == ["conv2d", "dropout"]  # the output keeps its name
    assert [param.recipe is not None for param in graph.params.values()].count(True) == 1


def test_training_and_fuse_off_keep_the_network():
    graph = traced(lambda net, x: net.n(net.c(x)), training=False, c=conv(), n=nn.BatchNorm2d(4))
    for keys in ({"task": {"name": "infer"}, "engine": {"fuse": "off"}}, {}):
        assert rewritten(from_dict(keys), graph) is graph
