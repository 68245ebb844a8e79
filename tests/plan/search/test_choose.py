"""All layouts are listed, the best one comes first, and the others are out for the reason told."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import time
from typing import Any

import pytest
from torch import nn

from hires.core.config.run_config import from_dict
from hires.core.errors import PlanError
from hires.core.schedules import Pipeline, one_forward_one_backward
from hires.core.units import MIB, size
from hires.nets.trace import trace
from hires.plan.checks import check_numbers
from hires.plan.memory import RankMemory, Room
from hires.plan.partition import crossing
from hires.plan.planner import make_plan
from hires.plan.route_choice import resolve
from hires.plan.search.candidates import (
    DECIDED,
    Candidate,
    LayoutShape,
    candidate_of,
    orders,
    others,
    shapes,
    variants,
)
from hires.plan.search.choice import MOST_FAILURES, NoRoomError
from hires.plan.search.choose import Chooser
from hires.plan.search.estimate import Estimator
from hires.plan.search.remedies import offered
from hires.plan.simulation.costs import Device
from hires.plan.simulation.machine_model import MachineModel
from hires.plan.simulation.simulate import Link, Network
from tests.helpers.small_plans import IMAGE, config_of, forked

LAYERS = 6
LINK = Link(1e-6, 1e9)
MACHINE = MachineModel("a test", Network(LINK, LINK), device=Device(1e9, 1e9, 1e-6))
LITTLE = 0.3
"""Effort where any layouts will do."""


def graph_of(samples):
    return forked(samples, True)


def need(plan, mib, **facts):
    return [RankMemory(0, 0, 0, mib * MIB, 0, **facts).to_dict()] * plan.ranks_per_replica


def chooser(config=None, peak=lambda config: 1, machine=MACHINE, **options):
    """A search whose rehearsals need what ``peak`` says of a config, in MiB."""
    options = {"effort": LITTLE, **options}
    rehearse = lambda config, plan: need(plan, peak(config))  # noqa: E731
    return Chooser(config or config_of(), graph_of, machine, rehearse, **options)


def limited(limit):
    config = config_of()
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, limit=limit))


@pytest.mark.parametrize("ranks", [4])
def test_every_order_of_every_shape_is_sensible_and_has_the_ranks(ranks):
    base, seen = config_of(batch=12), set()
    for shape in shapes(base, ranks, LAYERS):
        for one in (one for order in orders(base, shape) for one in variants(base, order)):
            assert one not in seen
            assert candidate_of(one.keys) == one
            seen.add(one)
            changed = one.applied(base)
            assert changed.parallel.num_ranks == ranks
            assert not [*check_numbers(changed)]
    assert {one.checkpoint for one in seen} == {"none", "block", "stage"}
    assert {one.shards_optimizer for one in seen} == {False, ranks > 1}
    tiles = Candidate(LayoutShape(1, 1, 1, (2, 1), 1, 1))
    tried = [(o.fuse, o.shards_optimizer) for o in (tiles, *others(base, tiles, {}, "planned"))]
    assert sorted(tried) == [*itertools.product((1, 2, 4), (False, True))]


def test_given_orders_and_those_with_the_fewest_microbatches_in_flight_are_listed():
    tiles, base = LayoutShape(1, 1, 1, (2, 1), 1, 1), config_of()
    for schedule in ("gpipe", "1f1b"):  # of one stage, 1f1b was denied
        given = {"parallel.schedule": schedule, "parallel.microbatches": 4}
        assert {one.schedule for one in orders(base, tiles, given)} == {schedule}
    listed = {one.microbatches: one.schedule for one in orders(base, tiles)}
    assert listed == {1: "gpipe", 2: "1f1b", 4: "1f1b", 8: "1f1b"}


def test_ranks_that_share_cores_take_longer():
    def step_s(shape, cores):
        seconds = lambda node, share, back: share  # noqa: E731
        free = Network(Link(), Link())
        config, graph = config_of(batch=8), graph_of(8)
        return (
            Estimator(config, graph, seconds, free, 1e12, cores).estimate(Candidate(shape)).step_s
        )

    for shape in (
        LayoutShape(1, 1, 1, (4, 1), 1, 1),  # tiles
        LayoutShape(1, 1, 0, (1, 1), 4, 1),  # shards
        LayoutShape(4, 1, 0, (1, 1), 1, 1),  # replicas
    ):
        assert step_s(shape, 2) == pytest.approx(2 * step_s(shape, 4), rel=1e-3)


def test_message_takes_the_time_of_the_cut_that_it_crosses():
    """Forward and back; a walk of our own has the same length."""
    graph, shape = graph_of(8), LayoutShape(1, 3, 0, (1, 1), 1, 1)
    layout = Candidate(shape, microbatches=8, schedule="1f1b")
    seconds = lambda node, share, back: share if node.kind == "conv2d" else 0.0  # noqa: E731
    link = Link(0.0, 1e4)
    estimator = Estimator(config_of(batch=8), graph, seconds, Network(link, link), 1e12)
    bounds = estimator.bounds(layout)
    stages = [*itertools.pairwise(bounds)]
    pass_s = [sum(n.kind == "conv2d" for n in graph.nodes[a:b]) / 8 for a, b in stages]
    numbers = crossing(graph, 0, len(graph.nodes), lambda node: node.num_elements if node else 0)
    cut_s = [numbers[bound] / 8 * 4 / link.bytes_per_s for bound in bounds[1:-1]]
    assert cut_s[0] != cut_s[1]
    ranks = ((0,), (1,), (2,))
    pipeline = Pipeline((ranks,), 8)
    free_s, done = [0.0] * 3, {}
    todo = pipeline.tasks_of(one_forward_one_backward(pipeline))
    while any(todo):
        for stage, tasks in enumerate(todo):
            before = pipeline.before(tasks[0]) if tasks else None
            if not tasks or before not in (None, *done):
                continue
            came_s = done.get(before, 0.0)
            if before is not None and before.stage < stage:
                came_s += cut_s[before.stage]
            elif before is not None and before.stage > stage:
                came_s += cut_s[stage]
            free_s[stage] = max(free_s[stage], came_s) + pass_s[stage]
            done[tasks.pop(0)] = free_s[stage]
    assert estimator.estimate(layout).step_s == pytest.approx(max(free_s), rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 6])
def test_shapes_are_all_there_are(ranks):
    base, numbers = config_of(batch=72), range(1, ranks + 1)
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


def test_options_are_ranked_and_counted():
    base = config_of()
    choice = chooser(effort=1.0).choose(2)
    times = [option.time.step_s for option in choice.options]
    assert times == sorted(times)
    assert len(times) > 6
    assert all(option.config.parallel.num_ranks == 2 for option in choice.options)
    assert choice.best.rehearsed
    for option in choice.options[:2]:
        plan = make_plan(option.config, graph_of(8 // option.config.parallel.pieces))
        assert option.time == MACHINE.step_time(plan)
        assert option.sent_bytes == plan.totals["bytes"]
        assert option.candidate.applied(base).parallel == option.config.parallel
    assert choice.planned == len(choice.options) + len(choice.out)
    assert choice.considered == choice.planned + choice.left + choice.reasons.total()
    for spent in (option.time for option in choice.options):
        whole = spent.computing + spent.messages + spent.bubble + spent.crowding
        assert whole == pytest.approx(1)
    peaks = [option.peak_bytes for option in chooser(objective="memory").choose(2).options]
    assert peaks == sorted(peaks)


@functools.cache
def heavy(samples):
    """A network most of whose step is the update of its parameters."""
    wide = nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 5)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), *wide
    return trace(nn.Sequential(*layers), [samples, 3, *IMAGE], True)


@pytest.mark.parametrize(
    ("ranks", "batch", "graph_of"),
    [
        (2, 4, heavy),
        *(pytest.param(*case, graph_of, marks=pytest.mark.slow) for case in ((2, 4), (4, 2))),
    ],
)
def test_no_layout_that_fits_is_much_faster_than_the_chosen_one(ranks, batch, graph_of):
    """Every layout is planned by itself, and needs what its estimate says.

    A divided optimiser was looked at only where memory is short: more memory chose a slower layout.
    """
    base, every, chosen_s = config_of(batch=batch), [], [0.0]
    estimator = Chooser(base, graph_of, MACHINE, None)._estimator(ranks)

    def need_of(candidate):
        return int(estimator.estimate(candidate).peak_bytes)

    def rehearse(config, plan):
        keys = {key: functools.reduce(getattr, key.split("."), config) for key in DECIDED}
        return [RankMemory(0, 0, 0, need_of(candidate_of(keys)), 0).to_dict()]

    every_shape = shapes(base, ranks, len(estimator.layers))
    listed = (order for shape in every_shape for order in orders(base, shape))
    for one in (one for order in listed for one in variants(base, order)):
        config = resolve(one.applied(base))
        plan = make_plan(config, graph_of(batch // config.parallel.pieces))
        if plan.ok:
            every.append((need_of(one), MACHINE.step_time(plan).step_s))
    every.sort()
    for share in (1.0, 0.5, 0.4, 0.25, 0.15, 0.1, 0.03):
        limit = every[int(share * (len(every) - 1))][0] + 1
        memory = dataclasses.replace(base.memory, limit=f"{limit}B")
        search = Chooser(dataclasses.replace(base, memory=memory), graph_of, MACHINE, rehearse)
        fastest_s = min(step_s for need, step_s in every if need <= limit)
        best_s = search.choose(ranks).best.time.step_s
        assert chosen_s[-1] <= 1.02 * best_s <= 1.02 * 1.05 * fastest_s, limit
        chosen_s.append(best_s)


def test_layout_that_only_another_cut_lets_fit_is_found_and_the_least_is_that_of_all_cuts():
    """The least was that of the cut by FLOPs, which puts both wide layers into one stage."""
    base, given = config_of(batch=4), {"parallel.stages": 2, "memory.checkpoint": "none"}
    given |= {"parallel.directions": 1, "parallel.microbatches": 1}
    estimator = Chooser(base, heavy, MACHINE, None)._estimator(2)
    [shape] = shapes(base, 2, len(estimator.layers), given)
    every = [Candidate(shape, balance=(n, 3 - n)) for n in (1, 2)]
    least, most = sorted(estimator.estimate(one).peak_bytes for one in every)
    assert most == estimator.estimate(Candidate(shape)).peak_bytes > 1.3 * least

    def choice(limit):
        memory = dataclasses.replace(base.memory, limit=f"{int(limit)}B")
        config = dataclasses.replace(base, memory=memory)
        rehearse = lambda config, plan: need(plan, least / MIB)  # noqa: E731
        return Chooser(config, heavy, MACHINE, rehearse, given).choose(2)

    assert choice(1.05 * least).best.candidate.balance == (2, 1)
    with pytest.raises(NoRoomError, match=f"needs about {re.escape(size(least))} at the least"):
        choice(0.7 * least)


def test_estimate_counts_the_bytes_of_messages_as_the_plan_does():
    """Estimates took all messages for float32, and every exchange for one of two thirds."""

    def sent_s(shape, codec="none", exchange="auto", shard=False):
        config = config_of(batch=8)
        config.comm.codec, config.optimizer.exchange = codec, exchange
        found = Chooser(config, graph_of, MACHINE, None)._estimator(6)
        link = Link(0.0, 1e6)
        free = {"seconds": lambda *of_node: 0.0, "network": Network(link, link)}
        estimator = dataclasses.replace(found, bytes_per_s=math.inf, **free)
        return estimator.estimate(Candidate(shape, shards_optimizer=shard)).step_s

    tiles_and_stages, replicas = (
        LayoutShape(2, 2, 1, (2, 1), 1, 1),
        LayoutShape(6, 1, 0, (1, 1), 1, 1),
    )
    for shape in (tiles_and_stages, replicas):
        assert sent_s(shape, "bf16") == pytest.approx(sent_s(shape) / 2)
    assert sent_s(replicas, exchange="scatter", shard=True) == sent_s(replicas)
    assert sent_s(replicas, exchange="broadcast", shard=True) == 1.5 * sent_s(replicas)
    # Gradients in bfloat16, parameters in float32: 1/2 + 1 of 1 + 1.
    scattered = sent_s(replicas, {"gradient": "bf16"}, "scatter", shard=True)
    assert scattered == pytest.approx(0.75 * sent_s(replicas))
    kinds = ("halo", "join", "gradient")  # no two stages of as many ranks
    saved = [sent_s(tiles_and_stages) - sent_s(tiles_and_stages, {k: "bf16"}) for k in kinds]
    assert min(saved) > 0 == sent_s(tiles_and_stages) - sent_s(tiles_and_stages, {"stage": "bf16"})
    assert sum(saved) == pytest.approx(sent_s(tiles_and_stages) / 2)


def test_choice_does_not_depend_on_a_clock(monkeypatch):
    """The same command gave layouts of 33 and then of 44 s a step on a busy machine."""
    expected = chooser().choose(4).to_dict()
    hours = itertools.count(step=3600)
    for clock in ("monotonic", "perf_counter", "time", "process_time"):
        monkeypatch.setattr(time, clock, lambda: float(next(hours)))
    found = chooser().choose(4).to_dict()
    assert found.pop("seconds") > 3000 > expected.pop("seconds")
    assert found == expected


def test_machine_decides_what_limits():
    slow = dataclasses.replace(MACHINE, network=Network(*[Link(1e-6, 1e5)] * 2))
    assert chooser(machine=slow).choose(2).best.limit == "messages"
    crowded = chooser(machine=dataclasses.replace(MACHINE, cores=1)).choose(2).best.time
    assert crowded.crowding > 0
    assert crowded.step_s > 1.5 * chooser().choose(2).best.time.step_s


def test_layout_that_needs_too_much_by_its_rehearsal_is_out():
    peak = lambda config: 1 if config.parallel.stages > 1 else 100  # noqa: E731
    choice = chooser(limited("50MiB"), peak, effort=1.0).choose(2)
    assert choice.best.rehearsed
    assert choice.best.config.parallel.stages > 1
    assert {o.config.parallel.stages for o in choice.out if o.rehearsed} == {1}
    # Those that cannot fit by their estimates are not planned.
    with pytest.raises(
        PlanError, match=r"ranks=2 fits memory.limit=1KiB: .* the least, by the estimate; up to"
    ):
        chooser(limited("1KiB")).choose(2)


def test_steps_that_no_rank_can_run_are_the_reason_and_not_the_memory():
    def failing(error):
        asked = []

        def peak(config):
            asked.append(config)
            raise error

        return chooser(peak=peak, effort=1.0), asked

    search, asked = failing(PlanError("a rank cannot run its step: the loss is odd"))
    with pytest.raises(PlanError, match="no layout of ranks=2 can run: a rank cannot") as caught:
        search.choose(2)
    assert not isinstance(caught.value, NoRoomError)
    assert len(asked) == MOST_FAILURES


def test_memory_beside_the_gpus_is_looked_at_too(monkeypatch):
    def rooms(config):
        return [Room(None, None, 1), Room(None, 2**20, 1, "cluster.memory", beside_gpus=True)]

    monkeypatch.setattr("hires.plan.search.choose.rooms_of", rooms)
    rehearse = lambda config, plan: need(plan, 1, host_bytes=2**30)  # noqa: E731
    search = Chooser(config_of(), graph_of, MACHINE, rehearse, effort=LITTLE)
    with pytest.raises(NoRoomError, match="of the host's memory beside its GPUs") as caught:
        search.choose(2)
    assert "use a smaller image, a smaller batch or fewer ranks" in str(caught.value)


def test_every_key_that_is_given_stays():
    given = {"parallel.tiles": [1, 2], "parallel.halo.fuse": 2, "optimizer.shard": True}
    given |= {"parallel.stages": 2, "parallel.schedule": "1f1b", "parallel.balance": [1, 6]}
    choice = chooser(given=given).choose(4)
    assert choice.options
    for option in choice.options:
        assert given.items() <= option.candidate.keys.items(), option.candidate.overrides


def test_tiles_that_no_image_has_are_named_before_anything_is_looked_at():
    """The answer said of any tiles that they cut the image, and to use other keys."""
    search = chooser(config_of(tiles=[1, 64]), given={"parallel.tiles": [1, 64]})
    text = "tiles=[1, 64] cuts 10 columns of the image into 64 tiles; use at most 10, or a larger"
    with pytest.raises(PlanError, match=re.escape(text)):
        search.choose(2)


def test_cores_and_hosts_of_a_job_bound_its_ranks():
    [finding] = offered(from_dict({"batch": 160, "parallel": {"replicas": 80}}))
    assert (finding.severity, finding.key) == ("error", "launcher.max_ranks")
    assert "launcher=local offers 64 on a machine" in finding.text
    assert "use parallel=auto ranks=64, or allow them with launcher.max_ranks=80" in finding.text

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
