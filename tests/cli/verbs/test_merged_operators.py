"""Does what a calibration keeps or measures of equal operators hold, of which a network has one?"""

from __future__ import annotations

import json

import pytest
import torch.nn.functional as F
from torch import nn

from hires.plan.plan import Plan
from hires.quant.scales import read_scales
from tests.cli.verbs.conftest import INT8, NET
from tests.helpers.tiny_nets import traced as trace

pytestmark = pytest.mark.usefixtures("traced")


@pytest.fixture
def graph():
    """Two equal ReLUs of a value that is read by something else, too: a run computes one."""

    def forward(net, x):
        y = net.stem(x)
        return net.head((net.left(F.relu(y)) + net.right(F.relu(y)) + y).mean((2, 3)))

    def conv(width):
        return nn.Conv2d(width, 8, 3, padding=1)

    parts = {"stem": conv(3), "left": conv(8), "right": conv(8), "head": nn.Linear(8, 10)}
    return trace(forward, (4, 3, 32, 32), training=False, **parts)


def relus(graph):
    return [node.name for node in graph.nodes if node.kind == "relu"]


def test_operators_that_a_run_merges_stay_in_float_where_the_file_is_read(hires, ranks, graph):
    """One was in 8 bits: the file named those alone that the network of one process has."""
    both = relus(graph)
    assert len(both) == 2
    answer = hires(*NET, "data=synthetic", "quant.keep=[*relu*]", "out=n8.safetensors")
    assert answer.code == 0, answer.err
    assert sorted(read_scales("n8.json").kept) == sorted(both)
    for keep in ("quant.keep=[*relu*]", "quant.keep=[]"):
        plan = hires(*INT8, keep, "--json")
        assert plan.code == 0, plan.out + plan.err
        kept = Plan.from_dict(json.loads(plan.out)).graph.kept
        assert both[0] in kept
        assert all(why.startswith("quant.keep") for name, why in kept.items() if name in both)


def test_operators_that_a_run_merges_are_shown_where_they_are(hires, ranks, graph):
    """The second one was in float by the table, which knew the network of one process alone."""
    ranks.alone = {name: 40.0 + k for k, name in enumerate(relus(graph))}
    answer = hires(*NET, "data=synthetic", "quant.auto=30dB", "out=n8.safetensors", "--json")
    assert answer.code == 0, answer.err
    facts = json.loads(answer.out)["alone"]
    assert [(one["operator"], one["in"]) for one in facts] == [(n, "int8") for n in relus(graph)]
