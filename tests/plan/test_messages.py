"""The messages of one rank written out: their order, their types, and the routes that they take."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional

from hires.core.codecs import codec_named, codecs_of
from hires.core.errors import ConfigError, PlanError
from hires.core.gradient_orders import TOGETHER
from hires.nets.trace import trace
from hires.plan import traffic, updates
from hires.plan.event import POSTS, Event
from hires.plan.groups import trained
from hires.plan.plan import SCHEMA, Plan
from hires.plan.planner import make_plan, with_validation
from hires.plan.program import events
from hires.plan.prove import judged
from hires.plan.traffic import backends_of_plan
from tests.helpers.custom_nets import Scaled
from tests.helpers.small_plans import (
    BATCH,
    IMAGE,
    LAYOUTS,
    Forked,
    by_kind,
    config_of,
    forked,
    plan_of,
)


def lines(plan: Plan, rank: int) -> list[str]:
    """The program of a rank in words; of what concerns no other rank only the kind and action."""
    return [
        f"{event.kind} {event.part.action}".rstrip()
        if event.peer < 0
        else f"{event.kind} {event.what} / {event.peer}"
        for event in events(plan, rank)
    ]


def test_receives_are_posted_one_action_ahead_and_sends_are_waited_for_at_the_end():
    plan = plan_of(stages=2, microbatches=2, balance=[6, 1])
    assert lines(plan, 0) == [
        *("barrier", "begin"),
        *("read F0", "forward F0", "send mean_1 in F0 / 1", "end F0"),
        "recv the gradient of mean_1 in B0 / 1",  # before F1, which comes first
        *("read F1", "forward F1", "send mean_1 in F1 / 1", "end F1"),
        "recv the gradient of mean_1 in B1 / 1",
        *("wait_recv the gradient of mean_1 in B0 / 1", "backward B0", "end B0"),
        *("wait_recv the gradient of mean_1 in B1 / 1", "backward B1", "end B1"),
        *("wait_sends", "statistics", "optimise"),
    ]
    assert [line for line in lines(plan, 1) if " / " in line or "read" in line] == [
        *("recv mean_1 in F0 / 0", "recv mean_1 in F1 / 0"),
        *("wait_recv mean_1 in F0 / 0", "read F0"),  # the targets
        *("wait_recv mean_1 in F1 / 0", "read F1"),
        "send the gradient of mean_1 in B0 / 0",
        "send the gradient of mean_1 in B1 / 0",
    ]


def test_tiles_exchange_halos_statistics_and_gradients_in_order():
    # The engine waits for the sends of a halo too; the proof left that out.
    assert lines(plan_of("infer", tiles=[1, 2]), 1)[3:7] == [
        "recv the halo of relu in F0 / 0",
        "send the halo of relu in F0 / 0",
        "wait_recv the halo of relu in F0 / 0",
        "wait_send the halo of relu in F0 / 0",
    ]
    norms = [line.split(" / ")[0] for line in lines(plan_of(tiles=[2, 1]), 0) if " norm " in line]
    order = ("bn1 in F0", "bn3 in F0", "bn3 in B0", "bn1 in B0")
    assert norms == [f"collective norm of {name}" for name in order]
    plan = plan_of(tiles=[2, 1], stages=2, replicas=1)
    end = ["statistics", "optimise"]
    assert lines(plan, 0)[-4:] == ["wait_sends", "collective gradients of stage 0 / 2", *end]
    assert lines(plan, 2)[-3:] == ["wait_sends", *end]
    assert lines(plan_of("infer", tiles=[2, 1]), 0)[-1] == "wait_sends"


@pytest.mark.parametrize("mode", ["chain", "end"])
def test_large_gradients_travel_alone_and_the_last_layer_goes_first(mode, monkeypatch):
    large = 4 * 4 * 4 * 9  # bytes of the weight of conv3
    monkeypatch.setattr(updates, "ALONE_BYTES", large)
    plan = replace(plan_of(tiles=[2, 1]), gradients=mode)
    weights = {name: plan.graph.params[f"{name}.weight"] for name in ("last", "conv3", "conv2")}
    program = [*events(plan, 0)]
    issued = [event for event in program if event.kind == "issue"]
    assert [event.shape for event in issued] == [(w.num_elements,) for w in weights.values()]
    places = [program.index(event) for event in issued]
    pass_end = next(i for i, e in enumerate(program) if e.kind == "end" and e.part.action == "B0")
    assert all((place < pass_end) == (mode == "chain") for place in places)
    assert program[places[-1]].part.node == ("conv2" if mode == "chain" else "")
    for event, place in zip(issued, places, strict=True):
        # A gradient is complete when the pass is behind its node, with what that exchanges.
        node = event.part.node
        inner = [i for i, e in enumerate(program) if e.part.node == node != "" and e.part.back]
        assert all(i < place for i in inner if program[i].kind != "issue")
    at_end = ["collective", *["wait_issued"] * 3, "statistics", "optimise"]
    assert [event.kind for event in program[-6:]] == at_end
    small = sum(p.num_elements for p in plan.graph.params.values() if p.trainable)
    assert program[-6].shape == (small - sum(w.num_elements for w in weights.values()),)


def test_sum_of_a_parameter_that_two_nodes_use_is_never_early(monkeypatch):
    # Autograd adds to it twice where the nodes lie in two segments that are computed again.
    monkeypatch.setattr(updates, "ALONE_BYTES", 16)
    config = config_of(tiles=[2, 1])
    plan = make_plan(config, trace(Scaled(), [config.batch, 3, *config.image], True))
    plan = replace(plan, gradients="chain")
    nodes = {one.parameters[0]: one.node for one in updates.sums_of(plan, 0) if one.alone}
    assert (nodes["norm.weight"], nodes["conv1.weight"]) == ("", "conv1")


def changed(name: str, **fields: Any) -> Plan:
    return replace(plan_of("train", **LAYOUTS[name]), **fields)


@pytest.mark.parametrize(
    ("name", "codec"),
    [("dp", "bf16"), ("sp grid", "int8"), ("sp+pp 1f1b", "bf16"), ("sp+gems", "fp8")],
)
def test_messages_are_counted_as_their_codec_sends_them_and_statistics_have_none(name, codec):
    plan, plain = changed(name, codecs=codecs_of(codec)), changed(name)
    ratio = codec_named(codec).num_bytes(2**20) / 2**22
    for rank in range(plan.world):
        pairs = zip(events(plan, rank), events(plain, rank), strict=False)
        for event, before in ((a, b) for a, b in pairs if a.kind in ("send", "recv")):
            assert (event.shape, event.dtype, event.codec) == (before.shape, before.dtype, codec)
            assert before.num_bytes * ratio <= event.num_bytes <= before.num_bytes * ratio + 8
        of_norms = {e.codec for e in events(plan, rank) if e.traffic in ("norm", "loss", "barrier")}
        assert of_norms <= {""}
    assert not judged(plan).findings
    after, before = (by_kind(one.with_results(totals=traffic.totals(one))) for one in (plan, plain))
    for kind in {"stage", "join", "halo"} & before.keys():
        assert 0 <= after[kind][1] - before[kind][1] * ratio <= 8 * after[kind][0]
    for stage in plan.stages:  # each gradient begins a block
        params = (plan.graph.params[name] for name in trained(plan, stage.index))
        elements = sum(codec_named(codec).padded(one.num_elements) for one in params)
        sums = updates.sums_of(plan, stage.index)
        expected = [(elements, codec)] if sums else []
        assert [(one.elements, one.codec) for one in sums if one.parameters] == expected


def test_half_precision_messages_are_decoded_to_fp32_and_only_those_that_are_named():
    plan = changed("sp+pp 1f1b", dtype="bfloat16", codecs={"halo": "fp32"})
    found = {
        (event.traffic, event.dtype, event.codec, event.num_bytes / math.prod(event.shape))
        for rank in range(plan.world)
        for event in events(plan, rank)
        if event.kind == "send"
    }
    others = {(kind, "bfloat16", "", 2.0) for kind in ("stage", "join")}
    assert found - others == {("halo", "float32", "fp32", 4.0)}


def routed_plan(comm=None, launcher=None, **parallel: Any) -> Plan:
    config = config_of("train", BATCH, **(parallel or LAYOUTS["sp+gems"]))
    for section, values in ((config.comm, comm), (config.launcher, launcher)):
        for key, value in (values or {}).items():
            setattr(section, key, value)
    return make_plan(config, forked(BATCH // config.parallel.pieces, True))


def routed(plan: Plan) -> list[tuple[int, Event]]:
    every = ((rank, e) for rank in range(plan.world) for e in events(plan, rank))
    return [(rank, event) for rank, event in every if event.traffic]


@pytest.fixture
def table(tmp_path):
    """Writes a tuning table; returns its path."""

    def write(rules, default="default", **more):
        path = tmp_path / "table.json"
        path.write_text(json.dumps({"format": 2, "rules": rules, "default": default, **more}))
        return str(path)

    return write


def test_default_table_uses_common_memory_where_there_is_some():
    plan = routed_plan()
    assert {str(event.route) for _, event in routed(plan)} == {
        *("shm:message", "shm", "shm:flat", "gloo")
    }
    assert (plan.gradients, {*backends_of_plan(plan)}) == (TOGETHER, {"gloo", "shm"})
    plan = routed_plan({"shared_memory": False})
    ways = {str(event.route) for _, event in routed(plan)}
    assert ways == {"gloo:message", "gloo:direct", "gloo:flat", "gloo"}
    assert plan.gradients != TOGETHER


class Larger(Forked):
    """Sees images at twice their size when it is evaluated."""

    def forward(self, x: Tensor) -> Tensor:
        """As of the network."""
        return super().forward(x if self.training else functional.interpolate(x, scale_factor=2.0))


def test_backends_of_evaluations_are_joined_at_the_start(table):
    # Ranks joined those of a step alone: the first evaluation met a route without a backend.
    sends = [e.num_bytes for _, e in routed(routed_plan(tiles=[2, 1])) if e.kind == "send"]
    rules = [{"operations": ["send"], "min_bytes": max(sends) + 1, "route": "mpi"}]
    config = config_of("train", BATCH, tiles=[2, 1])
    config.comm.table, config.comm.backends = table(rules, "gloo"), ["mpi"]
    config.launcher.name, config.validate.every = "mpirun", 2
    plan = make_plan(config, forked(BATCH, True))
    assert backends_of_plan(plan) == ["gloo"]
    plan = with_validation(config, plan, lambda _: trace(Larger(), [BATCH, 3, *IMAGE], False))
    assert plan.validation is not None
    assert plan.ok, plan.findings
    assert backends_of_plan(plan) == ["gloo", "mpi"]


def test_limits_of_a_table_are_findings(table):
    busy = {"made": {"forced": True, "noise": 0.3}}
    plan = routed_plan({"table": table([{"route": "gloo"}], "gloo", **busy)})
    [text] = [one.text for one in plan.findings if one.key == "comm.table"]
    assert text == "the tuning table was measured on a busy machine: noise 0.3"
    for keys, error in (
        ({"table": "nowhere.json"}, "there is no such file; `hires tune comm` writes one"),
        ({"backends": ["glo"]}, "unknown 'glo'; did you mean gloo"),
    ):
        with pytest.raises(ConfigError, match=error):
            routed_plan(keys)


def test_damaged_routes_and_other_schemas_are_no_plan():
    values = routed_plan().to_dict()
    values["routes"][0]["route"] = "gloo:magic"
    with pytest.raises(PlanError, match="damaged"):
        Plan.from_dict(values)
    with pytest.raises(PlanError, match=rf"plan\.json has schema 99, this hires reads {SCHEMA}"):
        Plan.from_dict({**values, "schema": 99})


def test_routes_within_a_node_and_between_nodes(table):
    rules = [{"operations": ["send"], "same_node": True, "route": "gloo:message"}]
    comm = {"table": table(rules, "mpi"), "backends": ["mpi"]}
    launcher = {"name": "mpirun", "hosts": ["a", "b"]}
    plan = routed_plan(comm, launcher, tiles=[4, 1], stages=1)
    assert plan.verdict.startswith("deadlock-free")
    for rank, event in routed(plan):
        if event.kind in POSTS:
            assert event.route.backend == ("gloo" if rank // 2 == event.peer // 2 else "mpi")


def test_every_replica_that_nodes_divide_otherwise_is_proved(table, monkeypatch):
    rules = [{"operations": ["send"], "same_node": True, "route": "gloo:message"}]
    comm = {"table": table(rules, "mpi"), "backends": ["mpi"]}
    launcher = {"name": "mpirun", "hosts": ["a", "b", "c"]}
    layout = {"tiles": [2, 2], "stages": 1, "replicas": 2}  # nodes of 3, 3 and 2 ranks
    plan = routed_plan(comm, launcher, **layout)
    assert plan.verdict.startswith("deadlock-free")

    def dropped(plan: Plan, rank: int) -> list[Event]:
        program = [*events(plan, rank)]
        index = next((i for i, event in enumerate(program) if event.kind == "send"), 0)
        return program if rank != 5 else program[:index] + program[index + 1 :]

    monkeypatch.setattr("hires.plan.prove.counted_events", dropped)
    assert any("from rank 5, which never sends it" in one.text for one in judged(plan).findings)
