"""Norms share messages wherever the graph allows it, and nowhere else."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from torch import Tensor, nn

from hires.plan.conversions import convert
from hires.plan.graph import Graph, Node
from hires.plan.layout import connected, with_norms_together
from hires.plan.operators.operator_facts import facts_of
from hires.plan.plan import Plan, Stage
from hires.plan.program import events
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.tiny_nets import traced


def gathers(plan: Plan) -> dict[bool, int]:
    """Returns how often rank 0 gathers statistics on its way, and on its way back."""
    ops = plan.stages[0].comm
    inner = (e.part for e in events(plan, 0) if e.kind == "collective" and e.part.node)
    return Counter(part.back for part in inner if ops[part.number].kind == "norm")


def messages(graph: Graph) -> tuple[Graph, list[list[str]]]:
    """Returns a graph on two tiles, reordered, and the norms of each message."""
    stage = Stage(0, 0, len(graph.nodes), [2, 1], 0)
    graph, [stage], refused, _ = convert(graph, [stage])
    assert not refused
    graph = with_norms_together(graph, [stage])
    assert stage.last == len(graph.nodes)
    stage = connected(graph, stage, joint=True)
    return graph, [op.readers or [op.node] for op in stage.comm if op.kind == "norm"]


def norms_of(target: str, image: list[int], joint: bool = True, **args: Any) -> tuple[Plan, list]:
    """The plan of a network of norms on two tiles, and the norms of each message."""
    model = {"name": "custom", "target": f"tests.helpers.custom_nets:{target}", "args": args}
    keys = {"model": model, "image": image, "comm": {"joint_norms": joint}}
    plan = plan_of(config_of(**keys, parallel={"tiles": [2, 1]}))
    assert plan.ok, plan.findings
    return plan, [op.readers or [op.node] for op in plan.stages[0].comm if op.kind == "norm"]


def test_norms_of_samples_share_messages_with_those_of_batches():
    size = [22, 26]
    (one, _), (other, groups) = (
        norms_of("SampleNorms", size, joint, size=size) for joint in (False, True)
    )
    assert gathers(one) == {False: 12, True: 11}
    assert gathers(other) == {False: 5, True: 4}
    norms = {n: op for op in other.stages[0].comm for n in op.readers or [op.node]}
    assert groups[0] == ["group", "instance", "layer", "batch", "layer_of_channels"]
    # Means and variances of 2 samples: of 3, 6, 1 and 6 groups, and of 6 channels of all samples.
    assert norms["group"].elements == 2 * (2 * 3 + 2 * 6 + 2 * 1 + 6 + 2 * 6)
    # Two uses of one norm join, unless both move its running statistics.
    uses = [node.name for node in other.graph.nodes if node.name.startswith("twice")]
    assert norms[uses[0]] is norms[uses[1]]
    tracked = [node.name for node in other.graph.nodes if node.name.startswith("tracked_twice")]
    assert norms[tracked[0]] is not norms[tracked[1]]


def is_norm(node: Node) -> bool:
    """Whether a node normalises by statistics of the image."""
    return facts_of(node.kind).statistics is not None


class Tangle(nn.Module):
    """A random network: each layer reads one or two earlier values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.reads = [[draw.randrange(i + 1) for _ in range(2)] for i in range(14)]
        kinds = [draw.choice("bgic+") for _ in self.reads]
        layers = {
            "b": lambda: nn.BatchNorm2d(4),
            "g": lambda: nn.GroupNorm(2, 4),
            "i": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
            "c": lambda: nn.Conv2d(4, 4, 3, padding=1),
        }
        self.layers = nn.ModuleList(layers.get(kind, nn.Identity)() for kind in kinds)
        self.kinds = kinds

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, kind, (a, b) in zip(self.layers, self.kinds, self.reads, strict=True):
            values.append(values[a] + values[b] if kind == "+" else layer(values[a]))
        return sum(values)


@pytest.mark.parametrize("seed", range(4))
def test_order_is_legal_and_has_as_few_messages_as_the_longest_path(seed):
    graph = traced(lambda net, x: net.tangle(x), tangle=Tangle(seed))
    longest: dict[str, int] = {}
    for node in graph.nodes:
        here = max((longest.get(name, 0) for name in node.inputs), default=0)
        longest[node.name] = here + is_norm(node)
    ordered, groups = messages(graph)
    made = set[str]()
    for node in ordered.nodes:
        assert {name for name in node.inputs if name in graph.by_name} <= made
        made.add(node.name)
    assert len(made) == len(graph.nodes)
    norms = [name for group in groups for name in group]
    assert sorted(norms) == sorted(node.name for node in graph.nodes if is_norm(node))
    # Norms that no gradient reaches through their input travel apart.
    ways = {name: graph.needs_grad(graph.by_name[name].inputs[0]) for name in norms}
    assert all(len({ways[name] for name in group}) == 1 for group in groups)
    apart = sum(not ways[group[0]] for group in groups)
    assert len(groups) <= max(longest.values()) + apart
