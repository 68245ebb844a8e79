"""Is the first layout of a search the best one, and are the others out for the reason that is told?

The network is small, the machine is a roofline with round numbers, and memory is what a rule says.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from hires.core.errors import LateError, PlanError, RunError
from hires.core.units import MIB
from hires.plan.memory import RankMemory, Room
from hires.plan.partition import layer_starts
from hires.plan.planner import make_plan
from hires.plan.search.candidates import GivenKeys, orders, shapes
from hires.plan.search.choice import NoRoomError
from hires.plan.search.choose import FUSED_WITHIN, Chooser
from hires.plan.search.memory_rehearsal import MOST_FAILURES
from hires.plan.simulation.calibrated_device import Factors
from hires.plan.simulation.costs import Device
from hires.plan.simulation.machine_model import MachineModel
from hires.plan.simulation.simulate import Link, Network
from tests.helpers.calibrations import CALIBRATION, conv_work
from tests.helpers.searches import (
    LINK,
    LONG_S,
    MACHINE,
    SHORT_S,
    chooser,
    graph_of,
    limited,
)
from tests.helpers.small_plans import config_of, forked


@pytest.fixture(scope="module")
def of_four():
    return chooser(config_of()).choose(4)


def test_options_are_ranked_by_their_simulated_steps(of_four):
    times = [option.time.step_s for option in of_four.options]
    assert times == sorted(times)
    assert len(of_four.options) > 10
    assert all(option.config.parallel.num_ranks == 4 for option in of_four.options)
    assert of_four.considered >= of_four.planned >= len(of_four.options)


def test_best_is_no_slower_than_any_layout_that_is_planned_by_itself(of_four):
    base, best_s = config_of(), of_four.best.time.step_s
    for shape in itertools.islice(shapes(base, 4, 6), 0, None, 5):
        for order in orders(base, shape):
            config = order.change.apply(base)
            plan = make_plan(config, graph_of(8 // config.parallel.pieces))
            if plan.ok:
                # What was not planned was left for its estimate, which may be off.
                assert best_s <= 1.05 * MACHINE.step_time(plan).step_s, order


def test_step_of_an_option_is_that_of_its_plan(of_four):
    for option in of_four.options[:5]:
        plan = make_plan(option.config, graph_of(8 // option.config.parallel.pieces))
        assert option.time == MACHINE.step_time(plan)
        assert option.sent_bytes == plan.totals["bytes"]


def test_shares_of_a_step_are_all_of_it(of_four):
    for option in of_four.options:
        time = option.time
        whole = time.computing + time.messages + time.bubble + time.crowding
        assert whole == pytest.approx(1)
        assert option.limit in ("compute", "messages", "bubble", "cores", "memory")


def test_overrides_make_the_layout_again(of_four):
    for option in of_four.options:
        changed = option.candidate.change.apply(config_of())
        assert changed.parallel == option.config.parallel
        assert option.overrides


def test_slow_links_are_what_limits():
    slow = Network(Link(1e-6, 1e5), Link(1e-6, 1e5))
    machine = dataclasses.replace(MACHINE, network=slow)
    tiled = limited(None)
    choice = chooser(tiled, machine=machine).choose(2)
    assert choice.best.limit == "messages"


def test_cores_that_ranks_share_lengthen_the_step():
    alone = chooser(config_of()).choose(2)
    crowded = chooser(config_of(), machine=dataclasses.replace(MACHINE, cores=1)).choose(2)
    assert crowded.best.time.crowding > 0
    assert crowded.best.time.step_s > 1.5 * alone.best.time.step_s


@pytest.mark.parametrize(
    ("layout", "slower"),
    [({"tiles": [4, 1]}, 2.0), ({"tiles": [2, 1], "stages": 2, "spatial_stages": 2}, 1.0)],
    ids=["at once", "in turns"],
)
def test_ranks_that_share_cores_copy_their_messages_in_turns(layout, slower):
    plan = make_plan(config_of(**layout), graph_of(config_of().batch))
    quick = dataclasses.replace(MACHINE, device=Device(1e18, 1e18, 1e-12))
    shared = dataclasses.replace(quick, cores=2)
    alone_s = quick.step_time(plan).step_s
    assert alone_s > 0
    assert shared.step_time(plan).step_s == pytest.approx(slower * alone_s, rel=0.01)


@pytest.mark.parametrize("layout", [{"tiles": [4, 1]}, {"stages": 4, "microbatches": 4}])
def test_replica_on_several_nodes_has_the_cores_of_all(layout):
    parallel = config_of(**layout)
    graph = graph_of(parallel.batch // parallel.parallel.pieces)
    plan = make_plan(parallel, graph)
    one = dataclasses.replace(MACHINE, cores=4).step_time(plan)
    plan.num_nodes = 2
    network = dataclasses.replace(MACHINE.network, far=MACHINE.network.near)
    two = dataclasses.replace(MACHINE, cores=2, network=network).step_time(plan)
    assert one.crowding == two.crowding == 0.0
    assert two.step_s == pytest.approx(one.step_s, rel=0.05)


def test_layout_that_needs_too_much_by_its_rehearsal_is_out():
    def peak(config):
        return 1 if config.parallel.stages > 1 else 100

    choice = chooser(limited("50MiB"), peak).choose(2)
    assert choice.best.rehearsed
    assert choice.best.config.parallel.stages > 1
    rehearsed_out = [option for option in choice.out if option.rehearsed]
    assert rehearsed_out
    assert all(option.config.parallel.stages == 1 for option in rehearsed_out)


def test_least_memory_comes_first_if_it_is_the_objective():
    choice = chooser(config_of(), objective="memory", budget_s=SHORT_S).choose(4)
    peaks = [option.peak_bytes for option in choice.options]
    assert peaks == sorted(peaks)


def test_keys_of_the_user_stay():
    config = config_of(replicas=2, microbatches=2)
    given = GivenKeys({"parallel.replicas": 2, "parallel.microbatches": 2})
    choice = chooser(config, given=given).choose(4)
    found = {(o.config.parallel.replicas, o.config.parallel.microbatches) for o in choice.options}
    assert found == {(2, 2)}


def test_layouts_that_cannot_fit_by_their_estimates_are_not_planned():
    with pytest.raises(PlanError, match=r"ranks=2 fits memory.limit=1KiB: .* at the least; up to"):
        chooser(limited("1KiB")).choose(2)


def test_reasons_are_named_if_no_layout_makes_a_plan():
    given = GivenKeys({"parallel.balance": [1, 99]})
    with pytest.raises(PlanError, match=r"ranks=2 is possible: parallel.balance=\[1, 99\] "):
        chooser(config_of(), given=given, budget_s=SHORT_S).choose(2)


def test_more_ranks_that_would_do_are_named():
    estimates = [chooser(config_of()).choose(n).least_bytes for n in (1, 2)]
    assert estimates[1] < estimates[0]
    limit = f"{int(0.97 * estimates[0])}B"

    def peak(config):
        return estimates[0] / MIB if config.parallel.num_ranks == 1 else 0.001

    with pytest.raises(PlanError, match=r"ranks=\d would do, by the estimate"):
        chooser(limited(limit), peak).choose(1)


def test_ranks_without_a_layout_name_the_next_that_have_one():
    given = GivenKeys({"parallel.replicas": 3})
    with pytest.raises(
        PlanError, match=r"ranks=4 with the given parallel.replicas=3: .* use ranks=3 or"
    ):
        chooser(config_of(batch=6), given=given).choose(4)


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


def test_prediction_that_breaks_ends_the_search():
    search, asked = failing(RunError("predicting the memory failed (exit code -9)"))
    with pytest.raises(RunError, match="exit code -9"):
        search.choose(2)
    assert len(asked) == 1


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


def test_optimizer_that_is_divided_by_request_fits_where_nothing_divides_it():
    given = GivenKeys({"optimizer.shard": True, "parallel.stages": 2})
    choice = chooser(config_of(), given=given, objective="memory", budget_s=SHORT_S).choose(2)
    assert not choice.reasons
    assert all(option.config.optimizer.shard for option in choice.options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.stages", 2),
        ("parallel.tiles", [1, 2]),
        ("parallel.spatial_stages", 1),
        ("parallel.local_dp", 2),
        ("parallel.directions", 2),
        ("parallel.pairs", 2),
        ("parallel.schedule", "1f1b"),
        ("parallel.balance", [1, len(layer_starts(graph_of(8))) - 1]),
        ("parallel.halo.fuse", 2),
        ("memory.checkpoint", "block"),
        ("optimizer.shard", True),
    ],
)
def test_every_key_that_is_given_stays(key, value):
    choice = chooser(config_of(), given=GivenKeys({key: value}), budget_s=SHORT_S).choose(4)
    of_tiles = key == "parallel.halo.fuse"
    options = [o for o in choice.options if o.candidate.shape.spatial_stages or not of_tiles]
    assert options
    for option in options:
        assert option.candidate.change.keys[key] == value, option.overrides


def test_first_option_was_rehearsed_whatever_the_objective():
    def peak(config):
        return 40 if config.parallel.stages == 1 else 60

    for objective in ("images_per_s", "memory"):
        choice = chooser(config_of(), peak, objective=objective, budget_s=SHORT_S).choose(4)
        assert choice.best.rehearsed


def test_counts_add_up(of_four):
    planned = len(of_four.options) + len(of_four.out)
    assert of_four.planned == planned
    assert of_four.considered == planned + of_four.left + of_four.reasons.total()


@pytest.mark.slow
def test_vain_search_rehearses_few_layouts():
    asked = []

    def rehearse(config, plan):
        asked.append(config)
        need = RankMemory(0, 0, 0, 10**9, 0)
        return [need.to_dict()] * plan.ranks_per_replica

    search = Chooser(limited("100MiB"), graph_of, MACHINE, rehearse, budget_s=SHORT_S)
    with pytest.raises(PlanError, match=r"no layout of ranks=4 fits memory.limit=100MiB"):
        search.choose(4)
    assert len(asked) < 5


def test_libraries_of_too_many_ranks_are_the_reason(monkeypatch):
    monkeypatch.setattr("hires.plan.memory.machine_bytes", lambda: 2**30)
    with pytest.raises(PlanError, match=r"the libraries of ranks=8 alone take 2.5 GiB"):
        chooser(config_of()).choose(8)


def test_cut_by_memory_is_among_the_layouts_if_memory_is_the_objective():
    choice = chooser(config_of(), objective="memory").choose(2)
    cuts = {option.candidate.balance for option in [*choice.options, *choice.out]}
    assert len(cuts) > 1


def test_layouts_that_fit_by_the_corrected_estimates_are_next_where_none_fits():
    def peak(config):
        return 1 if config.memory.checkpoint != "none" else 1000

    # Estimates are far below: at first only layouts that compute nothing again are planned.
    choice = chooser(limited("500MiB"), peak).choose(2)
    assert choice.best.config.memory.checkpoint != "none"
    assert choice.out


def test_every_good_shape_in_tiles_is_tried_with_fused_halos(of_four):
    every = [*of_four.options, *of_four.out]
    ranked = sorted(every, key=lambda option: option.time.step_s, reverse=True)
    plain = {o.candidate.shape: o.time.step_s for o in ranked if o.candidate.fuse == 1}
    fused = {o.candidate.shape for o in every if o.candidate.fuse > 1}
    most_s = FUSED_WITHIN * min(plain.values())
    tiled = {shape: step_s for shape, step_s in plain.items() if shape.spatial_stages}
    assert {shape for shape, step_s in tiled.items() if step_s <= most_s} == fused
    assert fused
    assert fused != tiled.keys()


def test_layouts_that_make_no_plan_are_tried_once(monkeypatch):
    def impossible(config, graph):
        if config.parallel.tiles != [1, 1]:
            raise PlanError("a test refuses tiles; use one")
        return make_plan(config, graph)

    monkeypatch.setattr("hires.plan.search.trials.make_plan", impossible)
    # Nothing fits, so that there are several rounds.
    with pytest.raises(PlanError, match=r"fits memory\.limit=2MiB"):
        chooser(limited("2MiB"), lambda config: 100).choose(2)
    choice = chooser(config_of()).choose(2)
    layers = len(layer_starts(graph_of(8)))
    tiled = [shape for shape in shapes(config_of(), 2, layers) if shape.spatial_stages]
    each = sum(1 for shape in tiled for _ in orders(config_of(), shape))
    assert 0 < choice.reasons["a test refuses tiles"] <= each
    assert choice.left == choice.considered - choice.planned - choice.reasons.total()


def test_inference_is_estimated_with_the_nodes_that_ranks_compute():
    config = config_of("infer")
    search = chooser(config)
    search.graph_of = lambda samples: forked(samples, False)
    kinds = [node.kind for node in search._graph.nodes]
    assert kinds == [node.kind for node in make_plan(config, forked(8, False)).graph.nodes]
    assert kinds != [node.kind for node in forked(8, False).nodes]  # norms are folded


def test_source_says_that_the_layers_of_a_network_were_not_measured():
    machine = MachineModel("measured here", Network(LINK, LINK), CALIBRATION, cores=3)
    measured, other = conv_work(2**10), conv_work(2**12)
    assert machine.source_of([measured, other._replace(flops=1.0)]) == machine.source
    assert "hires doctor --calibrate KEY=VALUE" in machine.source_of([measured, other])
    refined = dataclasses.replace(machine, factors=Factors(1.1, 1.0, 1.0))
    assert refined.source_of([other]) == machine.source
    source = chooser(config_of(), machine=machine).choose(1).source
    assert "this network's layers were not measured" in source
