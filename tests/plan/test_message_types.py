"""Do messages have the type that ``comm.dtype`` names, and do ranks agree on an update?"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hires.plan import traffic
from hires.plan.event import BYTES, WORLD
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.proof.prove import judged, verify
from hires.plan.simulation.costs import Device, Roofline
from hires.plan.simulation.simulate import Link, Network, simulate
from tests.helpers.small_plans import LAYOUTS, plan_of

MIXED = ("dp", "sp grid", "sp+pp 1f1b", "sp+gems")


def changed(name: str, **fields: Any) -> Plan:
    return replace(plan_of("train", **LAYOUTS[name]), **fields)


def types_of(plan: Plan) -> dict[str, set[str]]:
    """The types of the messages of each kind of event, over all ranks."""
    found: dict[str, set[str]] = {}
    for rank in range(plan.world):
        for event in events(plan, rank):
            if event.dtype:
                found.setdefault(event.kind, set()).add(event.dtype)
    return found


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_messages_have_the_named_type_and_statistics_their_own(name: str, dtype: str):
    plan = changed(name, message_dtype=dtype)
    found = types_of(plan)
    assert found.get("send", {dtype}) == found.get("recv", {dtype}) == {dtype}
    norms = plan.num_replicas > 1 or any(stage.num_tiles > 1 for stage in plan.stages)
    assert found["collective"] == ({dtype, "float32"} if norms else {dtype})
    assert not [f for f in verify(plan) if f.severity == "error"]


@pytest.mark.parametrize("name", MIXED)
def test_traffic_counts_the_bytes_of_the_messages(name: str):
    plain, narrow = changed(name), changed(name, message_dtype="bfloat16")
    sent = Counter()
    for rank in range(narrow.world):
        for event in events(narrow, rank):
            if event.kind == "send":
                number = 1
                for size in event.shape:
                    number *= size
                sent["bytes"] += number * BYTES[event.dtype]
    totals, before = traffic.totals(narrow)["by_kind"], traffic.totals(plain)["by_kind"]
    kinds = ("stage", "join", "halo")
    assert sum(totals[kind]["bytes"] for kind in kinds if kind in totals) == sent["bytes"]
    for kind in kinds:
        assert (
            totals.get(kind, {"bytes": 0})["bytes"] * 2 == before.get(kind, {"bytes": 0})["bytes"]
        )
    assert totals["gradient"]["bytes"] < before["gradient"]["bytes"]


@pytest.mark.parametrize("name", MIXED)
def test_ranks_agree_once_between_the_sums_and_the_update(name: str):
    plan = changed(name, scales_loss=True)
    for rank in range(plan.world):
        *_, agreement, last = events(plan, rank)
        assert (agreement.kind, agreement.peer, last.kind) == ("agree", WORLD, "optimise")
    found, plain = next(judged(plan)), next(judged(changed(name)))
    assert not found.proof.problems
    assert found.collectives == plain.collectives + 1
    assert traffic.totals(plan)["by_kind"]["agree"]["messages"] == plan.world


@pytest.mark.parametrize("name", MIXED)
def test_norm_of_all_gradients_is_one_sum_of_the_world(name: str):
    plan, plain = changed(name, scales_loss=True, clips_gradients=True), changed(name)
    for rank in range(plan.world):
        *_, agreement, norm, last = events(plan, rank)
        assert [e.kind for e in (agreement, norm, last)] == ["agree", "grad_norm", "optimise"]
        assert (norm.peer, norm.shape, norm.dtype) == (WORLD, (1,), "float64")
    found = next(judged(plan))
    assert not found.proof.problems
    assert found.collectives == next(judged(plain)).collectives + 2
    sent, before = traffic.totals(plan), traffic.totals(plain)
    assert sent["by_kind"]["grad_norm"] == sent["by_kind"]["agree"]
    assert sent["bytes"] - before["bytes"] == 2 * 2 * (plan.world - 1) * 8
    each = sum(map(sum, traffic.matrix(plan))) - sum(map(sum, traffic.matrix(plain)))
    assert each == 2 * plan.world * (plan.world - 1) * (2 * 8 // plan.world)


def test_norm_that_one_rank_leaves_out_is_found(monkeypatch: pytest.MonkeyPatch):
    def without(plan: Plan, rank: int, order: str):
        return (e for e in events(plan, rank, order) if rank or e.kind != "grad_norm")

    plan = changed("sp grid", clips_gradients=True)
    monkeypatch.setattr("hires.plan.proof.prove.events", without)
    [*errors] = [f.text for f in verify(plan) if f.severity == "error"]
    assert "the norm of all gradients" in " ".join(errors)


def test_agreement_that_one_rank_leaves_out_is_found(monkeypatch: pytest.MonkeyPatch):
    def without(plan: Plan, rank: int, order: str):
        return (e for e in events(plan, rank, order) if rank or e.kind != "agree")

    plan = changed("sp grid", scales_loss=True)
    monkeypatch.setattr("hires.plan.proof.prove.events", without)
    [*errors] = [f.text for f in verify(plan) if f.severity == "error"]
    assert "the agreement that all gradients are finite" in " ".join(errors)


def test_agreement_takes_time():
    device, network = Device(1e12, 1e12, 0.0), Network(Link(1.0))
    plain, scaled = changed("dp"), changed("dp", scales_loss=True)
    steps = [simulate(p, Roofline(p, device), network).step_s for p in (plain, scaled)]
    assert steps[1] == pytest.approx(steps[0] + 2)  # both ways of two ranks
