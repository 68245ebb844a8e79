"""The plan holds the route of every message, from facts that all ranks share."""

import json

import pytest

from hires.core.errors import ConfigError, PlanError
from hires.plan.event import JOINT, POSTS
from hires.plan.gradient_sums import LATE, TOGETHER
from hires.plan.message_routes import backends_of_plan
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.program import events
from hires.plan.routes import parse_route
from hires.plan.traffic import by_class, by_route
from tests.helpers.small_plans import BATCH, LAYOUTS, config_of, forked


def plan_of(comm=None, launcher=None, **parallel):
    config = config_of("train", BATCH, **parallel)
    for section, values in ((config.comm, comm), (config.launcher, launcher)):
        for key, value in (values or {}).items():
            setattr(section, key, value)
    return make_plan(config, forked(BATCH // config.parallel.pieces, True))


ROUTED = (*POSTS, *JOINT, "barrier")


def routed(plan):
    return [
        (rank, event) for rank in range(plan.world) for event in events(plan, rank)
        if event.kind in ROUTED
    ]  # fmt: skip


def table_file(tmp_path, rules, default="default"):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"format": 1, "rules": rules, "default": default}))
    return str(path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_message_has_the_route_of_its_other_side(name):
    plan = plan_of(**LAYOUTS[name])
    sides = {}
    for rank, event in routed(plan):
        assert event.route is not None or plan.world == 1, event
        if event.kind in POSTS:
            ends = (rank, event.peer) if event.kind == "send" else (event.peer, rank)
            key = *ends, event.tag, event.what
        else:
            key = event.peer, event.tag, event.what
        assert sides.setdefault(key, event.route) == event.route
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert routed(again) == routed(plan)


def test_default_table_is_what_one_machine_shares():
    plan = plan_of(**LAYOUTS["sp+gems"])
    ways = {(event.kind, str(event.route)) for _, event in routed(plan)}
    assert ways == {
        ("send", "shm:mailbox"), ("recv", "shm:mailbox"),
        ("send", "gloo:message"), ("recv", "gloo:message"),
        ("collective", "shm:slots"), ("collective", "cma:shares"), ("barrier", "gloo"),
    }  # fmt: skip
    assert plan.gradients == TOGETHER
    assert set(backends_of_plan(plan)) == {"gloo", "shm", "cma"}


def test_ranks_without_common_memory_use_the_backend():
    plan = plan_of(**LAYOUTS["sp+gems"], comm={"shared_memory": False})
    ways = {str(event.route) for _, event in routed(plan)}
    assert ways == {"gloo:message", "gloo:direct", "gloo:flat", "gloo"}
    assert plan.gradients != TOGETHER


def test_table_chooses_by_size_and_its_digest_is_kept(tmp_path):
    rules = [
        {"operation": "send", "bytes": "..8KiB", "route": "shm"},
        {"operation": "send", "bytes": "8KiB..", "route": "gloo"},
        {"operation": "all_reduce", "dtype": "float", "route": "gloo:two_step"},
    ]
    comm = {"table": table_file(tmp_path, rules), "backends": ["shm"]}
    plan = plan_of(**LAYOUTS["sp+gems"], comm=comm)
    assert plan.gradients in (LATE, "early")
    for _, event in routed(plan):
        if event.kind in POSTS:
            ways = "shm:mailbox", "shm:message", "gloo:message"
            assert str(event.route) in (ways if event.part.node else ways[1:])
        if event.kind == "issue":
            assert event.route == parse_route("gloo:two_step")
    assert plan.table["name"].endswith("table.json")
    assert len(plan.table["digest"]) == 16


def test_coarse_table_has_one_backend_for_an_operation(tmp_path):
    rules = [
        {"operation": "all_gather", "bytes": "..1KiB", "route": "shm"},
        {"operation": "all_gather", "bytes": "1KiB..", "route": "gloo:direct"},
    ]
    comm = {"table": table_file(tmp_path, rules), "granularity": "coarse"}
    plan = plan_of(**LAYOUTS["sp+gems"], comm=comm)
    ways = {str(e.route) for _, e in routed(plan) if e.kind == "collective" and e.part.node}
    assert ways == {"gloo"}


def test_table_of_a_busy_machine_and_of_few_sizes_is_named(tmp_path):
    path = tmp_path / "table.json"
    points = [f"all_reduce 2 2 cpu float {size} gloo 0.1" for size in (64, 2**18)]
    values = {"format": 1, "rules": [{"route": "gloo"}], "default": "gloo", "points": points}
    path.write_text(json.dumps({**values, "made": {"disturbed": "9 other programs"}}))
    plan = plan_of(**LAYOUTS["sp+gems"], comm={"table": str(path)})
    sizes, busy = [one.text for one in plan.findings if one.key == "comm.table"][:2]
    assert "all_reduce: only 64 B to 256.0 KiB were measured" in sizes
    assert busy == "the tuning table was measured on a busy machine: 9 other programs"


def test_backend_without_its_launcher_is_left_out_and_named(tmp_path):
    table = table_file(tmp_path, [{"operation": "send", "route": "mpi"}])
    plan = plan_of(**LAYOUTS["sp+gems"], comm={"table": table})
    assert backends_of_plan(plan) == ["gloo"]
    text, unruled = [one.text for one in plan.findings if one.key == "comm.table"]
    assert unruled == (
        "no rule of the tuning table has all_reduce, all_gather, reduce_scatter, all_to_all, "
        "broadcast, reduce, gather, scatter, barrier: gloo carries them"
    )
    assert "mpi of the tuning table cannot carry messages here" in text
    assert "launcher=mpirun" in text


@pytest.mark.parametrize(
    ("comm", "error"),
    [
        ({"table": "nowhere.json"}, "there is no such file; `hires tune comm` writes one"),
        ({"backends": ["glo"]}, "unknown 'glo'; did you mean gloo"),
    ],
)
def test_keys_that_cannot_be_meant(comm, error):
    with pytest.raises(ConfigError, match=error):
        plan_of(**LAYOUTS["sp+gems"], comm=comm)


def test_damaged_route_is_no_plan():
    values = plan_of(**LAYOUTS["sp+gems"]).to_dict()
    values["routes"][0][-1] = "gloo:magic"
    with pytest.raises(PlanError, match="damaged"):
        Plan.from_dict(values)


def test_plan_of_an_older_hires_has_no_routes():
    values = plan_of(**LAYOUTS["sp+gems"]).to_dict()
    del values["routes"]
    assert all(event.route is None for _, event in routed(Plan.from_dict(values)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_totals_by_route_are_those_by_class(name):
    plan = plan_of(**LAYOUTS[name])
    routes, kinds = by_route(plan), by_class(plan)
    assert {key[:2] for key in routes} == set(kinds)
    for key, sums in kinds.items():
        own = [value for held, value in routes.items() if held[:2] == key]
        assert sums == tuple(map(sum, zip(*own, strict=True)))
    ways = {str(event.route) for _, event in routed(plan)}
    assert {way for *_, route in routes for way in route.split(" / ")} <= ways


def test_routes_within_a_node_and_between_nodes(tmp_path):
    rules = [{"operation": "send", "ranks_per_node": "all", "route": "gloo:message"}]
    comm = {"table": table_file(tmp_path, rules, "mpi"), "backends": ["mpi"]}
    launcher = {"name": "mpirun", "hosts": ["a", "b"]}
    plan = plan_of(tiles=[4, 1], stages=1, comm=comm, launcher=launcher)
    assert plan.verdict.startswith("deadlock-free")
    for rank, event in routed(plan):
        if event.kind in POSTS:
            assert event.route.backend == ("gloo" if rank // 2 == event.peer // 2 else "mpi")
