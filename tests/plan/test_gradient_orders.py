"""Orders of gradient sums: what the plan has of each, the proof, refusals, predicted steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.core.gradient_orders import ORDERS
from hires.plan import updates
from hires.plan.event import Event
from hires.plan.groups import groups
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.program import events
from hires.plan.prove import judged, prove_each
from hires.plan.simulation.simulate import Link, Network, simulate
from tests.helpers.graphs import chain
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.random_plans import random_plan
from tests.helpers.simulated import EqualCosts
from tests.helpers.threaded import execute

SHORT = {"issue": "b", "wait_issued": "w", "collective": "c"}
SUMS = {
    "end": "| b0 b1 b2 b3 b4 b5 c w0 w1 w2 w3 w4 w5",
    "funnel": "b0 w0 b1 w1 b2 w2 b3 w3 b4 w4 b5 | c w5",
    "concurrent": "b0 b1' w0 w1' b2 b3' w2 w3' b4 b5' | c w4 w5'",
    "chain": "b0 b1 b2 b3 b4 b5 | c w0 w1 w2 w3 w4 w5",
}
"""b begins a sum, w waits for it, ' on the second communicator; c: all small gradients; | the end
of the backward pass."""


def planned(order: str, outstanding: int | None = 2, **keys: Any) -> Plan:
    """Returns the plan of three replicas, of whose gradients a part are sums of their own."""
    comm = {"gradient_order": order, "outstanding": outstanding, "shared_memory": False}
    comm |= keys.pop("comm", {})
    return plan_of(config_of(**{"batch": 6, "parallel": {"replicas": 3}, **keys, "comm": comm}))


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """Lets six gradients of the network travel alone."""
    monkeypatch.setattr(updates, "ALONE_BYTES", 2**16)
    return 2**16


def words_of(plan: Plan) -> Iterator[str]:
    home = min(event.peer for event in events(plan, 0) if event.kind == "collective")
    for event in events(plan, 0):
        if event.kind == "wait_sends":
            yield "|"
        elif event.kind in SHORT:
            number = "" if event.kind == "collective" else str(event.tag)
            yield f"{SHORT[event.kind]}{number}{chr(39) * (event.peer - home)}"


@pytest.mark.parametrize("order", SUMS)
def test_plan_holds_the_order(order: str, monkeypatch: pytest.MonkeyPatch):
    plan = planned(order)
    assert plan.ok, plan.findings
    assert plan.gradients == order
    assert " ".join(words_of(plan)) == SUMS[order]
    [note] = [one.text for one in plan.findings if one.key == "comm.gradient_order"]
    assert note.startswith(f"{order}: 6 large gradients (")
    monkeypatch.setattr(updates, "ALONE_BYTES", 2**20)
    assert "nothing is left to order" in planned(order).findings[-1].text


def shuffled(program: list[Event], rng: random.Random) -> list[Event]:
    """Returns a program whose sums next to each other are begun in any order."""
    own: list[Event] = []
    for is_sum, run in itertools.groupby(program, lambda event: event.kind == "issue"):
        some = [*run]
        own += rng.sample(some, len(some)) if is_sum else some
    return own


def test_any_order_of_readiness_ends_where_sums_are_bounded_and_not_without(monkeypatch):
    monkeypatch.setattr(updates, "ALONE_BYTES", 32)
    refused = 0
    for seed in range(40):
        rng = random.Random(seed)
        plan = replace(random_plan(rng), gradients=rng.choice([*ORDERS]))
        plan = replace(plan, outstanding=rng.randint(1, 4))
        assert not judged(plan).problems, seed
        programs = [[*events(plan, rank)] for rank in range(plan.world)]
        assert not prove_each(programs, groups(plan)), seed
        if plan.gradients == "concurrent":
            programs = [shuffled(program, rng) for program in programs]
            assert execute(programs, groups(plan)).ok, seed
        free = replace(plan, gradients="concurrent", outstanding=0)
        programs = [shuffled([*events(free, rank)], rng) for rank in range(plan.world)]
        if found := judged(free).problems:
            refused += 1
            assert "deadlock: rank" in found[0]
        else:
            assert execute(programs, groups(plan)).ok, seed
    assert refused > 5


def test_concurrent_sums_without_a_bound_are_refused_with_the_cycle():
    plan = planned("concurrent", None)
    [error] = [one for one in plan.findings if one.severity == "error"]
    assert (
        "comm.outstanding=null, and gradients that are ready in another order on rank 2 than on "
        "rank 0: deadlock: rank 0 waits for rank 2 to join gradients of stage 0, part 1 of 7; rank "
        "2 waits for rank 0 to join gradients of stage 0, part 6 of 7; use comm.outstanding=2"
    ) in error.text
    with pytest.raises(ConfigError, match=r"comm.outstanding=0 lets no sum .* use 1 or more"):
        planned("concurrent", 0)
    assert planned("chain", None).ok  # which it does not bound


SCATTER = {"optimizer": {"shard": True, "exchange": "scatter"}}
CODED = {"comm": {"codec": {"gradient": "bf16"}}}


@pytest.mark.parametrize("order", SUMS)
@pytest.mark.parametrize(("keys", "words"), [(SCATTER, "exchange=scatter"), (CODED, "codec=bf16")])
def test_one_message_at_the_end_has_no_order_beside_the_pass(order, keys, words):
    plan = planned(order, **keys)
    assert plan.ok == (order == "end")
    if not plan.ok:
        assert words in plan.findings[0].text
        assert "comm.gradient_order=end" in plan.findings[0].text
    assert planned(order, optimizer={"shard": True}).scatters == (order == "end")


def test_predicted_steps_overlap_as_the_order_says(monkeypatch):
    # Behind 6.5 s of forward pass the layers take 1, 1/2, 1 and 4 s, each sum 1 s and twice 1/4 s:
    #
    #   chain        | c3 | c2 | c1 | c0 ....... |              b0 7.5 9 10.5 12     b3 13 14.5
    #   funnel       | c3 | c2 | w | c1 | w | c0 ....... |      waits 1, 1/2 s       b3 14.5 16
    #   concurrent   | c3 | c2 | c1 | w | c0 ....... |          b1 8.5 (bytes of b0) 10:
    #                                                           waits 1 s            b3 14 15.5
    monkeypatch.setattr(updates, "ALONE_BYTES", 4)
    expected = {"end": 13 + 4 * 1.5, "chain": 14.5, "funnel": 16.0, "concurrent": 15.5}
    link = Link(0.25, 4)
    for order, seconds in expected.items():
        parallel = {"replicas": 2}
        comm = {"gradient_order": order}
        config = from_dict({"image": 8, "batch": 4, "parallel": parallel, "comm": comm})
        plan = make_plan(config, chain([(40, 4), (10, 4), (5, 4), (10, 4)]))
        found = simulate(plan, EqualCosts(plan, 6.5, 6.5), Network(link, link))
        assert found.step_s == pytest.approx(seconds), order
        assert found.unlinked_s == pytest.approx(13.0)
