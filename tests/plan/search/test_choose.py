"""All layouts are listed, the best one comes first, and the others are out for the reason told."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from hires.core.config.run_config import from_dict
from hires.core.errors import LateError, PlanError
from hires.plan.checks import check_numbers
from hires.plan.memory import RankMemory, Room
from hires.plan.planner import make_plan
from hires.plan.search.advice import offered
from hires.plan.search.candidates import (
    Candidate,
    GivenKeys,
    LayoutShape,
    candidate_of,
    orders,
    shapes,
    variants,
)
from hires.plan.search.choice import NoRoomError
from hires.plan.search.choose import Chooser
from hires.plan.search.estimate import Estimator
from hires.plan.search.memory_rehearsal import MOST_FAILURES
from hires.plan.simulation.simulate import Link, Network
from tests.helpers.searches import LONG_S, MACHINE, SHORT_S, chooser, graph_of, limited
from tests.helpers.small_plans import config_of, forked

LAYERS = 6


def config(batch=8, image=(16, 16), **parallel):
    return dataclasses.replace(config_of(batch=batch, **parallel), image=[*image])


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_order_of_every_shape_is_sensible_and_has_the_ranks(ranks):
    base, seen = config(batch=24), set()
    for shape in shapes(base, ranks, LAYERS):
        for order in orders(base, shape):
            for one in variants(base, order):
                assert one not in seen
                assert candidate_of(one.change.keys) == one
                seen.add(one)
                changed = one.change.apply(base)
                assert changed is not None, one
                assert changed.parallel.num_ranks == ranks
                assert check_numbers(changed) == []
    assert seen


NO_TIME = Link()
FOUR_RANKS = {
    "tiles": LayoutShape(1, 1, 1, (4, 1), 1, 1),
    "shards": LayoutShape(1, 1, 0, (1, 1), 4, 1),
    "replicas": LayoutShape(4, 1, 0, (1, 1), 1, 1),
}


def estimator(network=Network(NO_TIME, NO_TIME), cores=math.inf):  # noqa: B008, it is frozen
    config = config_of(batch=8)
    return Estimator(config, forked(8, True), lambda node, share, back: share, network, 1e12, cores)


def test_ranks_that_share_cores_take_longer():
    for candidate in map(Candidate, FOUR_RANKS.values()):
        alone_s = estimator(cores=4).estimate(candidate).step_s
        shared_s = estimator(cores=2).estimate(candidate).step_s
        assert shared_s == pytest.approx(2 * alone_s, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 6])
def test_shapes_are_all_there_are(ranks):
    base, numbers = config(batch=72, image=(16, 20)), range(1, ranks + 1)
    every = set()
    for replicas, stages, spatial, shards, rows, cols in itertools.product(
        numbers, numbers, range(ranks + 1), numbers, numbers, numbers
    ):
        tiled = rows * cols > 1
        if spatial > stages or stages > LAYERS or tiled != (spatial > 0):
            continue
        if shards > 1 and stages == max(1, spatial):
            continue  # shards of one stage are replicas
        if replicas * (spatial * rows * cols + (stages - spatial) * shards) == ranks:
            every.add((replicas, stages, spatial, (rows, cols), shards))
    listed = {
        (s.replicas, s.stages, s.spatial_stages, s.grid, s.local_dp)
        for s in shapes(base, ranks, LAYERS)
    }
    assert listed == every


@pytest.fixture(scope="module")
def of_four():
    return chooser(config_of()).choose(4)


def test_best_is_no_slower_than_any_layout_that_is_planned_by_itself(of_four):
    base, best_s = config_of(), of_four.best.time.step_s
    for shape in itertools.islice(shapes(base, 4, 6), 0, None, 5):
        for order in itertools.islice(orders(base, shape), 0, None, 3):
            config = order.change.apply(base)
            plan = make_plan(config, graph_of(8 // config.parallel.pieces))
            if plan.ok:
                # What was not planned was left for its estimate, which may be off.
                assert best_s <= 1.05 * MACHINE.step_time(plan).step_s, order


def test_options_are_ranked_and_counted(of_four):
    times = [option.time.step_s for option in of_four.options]
    assert times == sorted(times)
    assert len(times) > 10
    assert all(option.config.parallel.num_ranks == 4 for option in of_four.options)
    assert of_four.best.rehearsed
    for option in of_four.options[:3]:
        plan = make_plan(option.config, graph_of(8 // option.config.parallel.pieces))
        assert option.time == MACHINE.step_time(plan)
        assert option.sent_bytes == plan.totals["bytes"]
        assert option.candidate.change.apply(config_of()).parallel == option.config.parallel
    assert of_four.planned == len(of_four.options) + len(of_four.out)
    assert of_four.considered == of_four.planned + of_four.left + of_four.reasons.total()
    for time in (option.time for option in of_four.options):
        whole = time.computing + time.messages + time.bubble + time.crowding
        assert whole == pytest.approx(1)
    least = chooser(config_of(), objective="memory", budget_s=SHORT_S).choose(2)
    peaks = [option.peak_bytes for option in least.options]
    assert peaks == sorted(peaks)
    assert least.best.rehearsed


def test_machine_decides_what_limits():
    slow = Network(Link(1e-6, 1e5), Link(1e-6, 1e5))
    machine = dataclasses.replace(MACHINE, network=slow)
    assert chooser(config_of(), machine=machine).choose(2).best.limit == "messages"
    alone = chooser(config_of()).choose(2)
    crowded = chooser(config_of(), machine=dataclasses.replace(MACHINE, cores=1)).choose(2)
    assert crowded.best.time.crowding > 0
    assert crowded.best.time.step_s > 1.5 * alone.best.time.step_s


def test_layout_that_needs_too_much_by_its_rehearsal_is_out():
    def peak(config):
        return 1 if config.parallel.stages > 1 else 100

    choice = chooser(limited("50MiB"), peak).choose(2)
    assert choice.best.rehearsed
    assert choice.best.config.parallel.stages > 1
    rehearsed_out = [option for option in choice.out if option.rehearsed]
    assert rehearsed_out
    assert all(option.config.parallel.stages == 1 for option in rehearsed_out)


def test_layouts_that_cannot_fit_by_their_estimates_are_not_planned():
    with pytest.raises(PlanError, match=r"ranks=2 fits memory.limit=1KiB: .* at the least; up to"):
        chooser(limited("1KiB")).choose(2)


def failing(error):
    """Returns a search whose rehearsals fail, and the layouts that it rehearsed."""
    asked = []

    def rehearse(config, plan):
        asked.append(config)
        raise error

    return Chooser(config_of(), graph_of, MACHINE, rehearse, budget_s=LONG_S), asked


def test_steps_that_no_rank_can_run_are_the_reason_and_not_the_memory():
    search, asked = failing(PlanError("a rank cannot run its step: the loss is odd"))
    with pytest.raises(PlanError, match="no layout of ranks=2 can run: a rank cannot") as caught:
        search.choose(2)
    assert not isinstance(caught.value, NoRoomError)
    assert len(asked) == MOST_FAILURES


def test_estimates_decide_where_there_is_no_time_for_predictions():
    search, asked = failing(LateError("the time for it is used up"))
    choice = search.choose(2)
    assert not any(option.rehearsed for option in choice.options)
    assert len(asked) == 1


def test_memory_beside_the_gpus_is_looked_at_too(monkeypatch):
    def rooms(config):
        return [Room(None, None, 1), Room(None, 2**20, 1, "cluster.memory", beside_gpus=True)]

    def rehearse(config, plan):
        need = RankMemory(0, 0, 0, 1, 0, host_bytes=2**30)
        return [need.to_dict()] * plan.ranks_per_replica

    monkeypatch.setattr("hires.plan.search.choose.rooms_of", rooms)
    search = Chooser(config_of(), graph_of, MACHINE, rehearse, budget_s=SHORT_S)
    with pytest.raises(NoRoomError, match="of the host's memory beside its GPUs") as caught:
        search.choose(2)
    assert "use a smaller image, a smaller batch or fewer ranks" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.tiles", [1, 2]),
        ("parallel.schedule", "1f1b"),
        ("parallel.balance", [1, 6]),
        ("parallel.halo.fuse", 2),
        ("optimizer.shard", True),
    ],
)
def test_every_key_that_is_given_stays(key, value):
    choice = chooser(config_of(), given=GivenKeys({key: value}), budget_s=0.5).choose(4)
    of_tiles = key == "parallel.halo.fuse"
    options = [o for o in choice.options if o.candidate.shape.spatial_stages or not of_tiles]
    assert options
    for option in options:
        assert option.candidate.change.keys[key] == value, option.overrides


def test_more_ranks_than_a_machine_offers_are_refused():
    [finding] = offered(from_dict({"batch": 160, "parallel": {"replicas": 80}}))
    assert (finding.severity, finding.key) == ("error", "launcher.max_ranks")
    assert finding.text == (
        "the layout has 80 ranks, but launcher=local offers 64 on a machine; use parallel=auto "
        "ranks=64, or allow them with launcher.max_ranks=80"
    )


def test_cores_and_hosts_of_a_job_bound_its_ranks():
    def job(cores: int | None, **launcher: Any) -> list[str]:
        launcher = {"name": "slurm", "nodes": 2, "threads": 2, **launcher}
        keys = {"batch": 8, "parallel": {"replicas": 8}, "cluster": {"cores": cores}}
        return [one.text for one in offered(from_dict({**keys, "launcher": launcher}))]

    assert job(None) == job(8) == job(7, nodes=3) == job(7, threads=1) == []
    assert job(7) == [
        "4 ranks of 2 threads on a node need 8 cores, but cluster.cores=7; use launcher.nodes=3 or "
        "launcher.threads=1"
    ]
    assert job(1)[0].endswith("cluster.cores=1; use fewer ranks")
    [text] = job(None, name="mpirun", nodes=1, hosts=[f"h{n}" for n in range(9)])
    assert text.startswith("launcher.hosts names 9, which is more than the ranks")
