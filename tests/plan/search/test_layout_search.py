"""Are changes that fit found however far away, near ones first, and is a vain search told truly?"""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.units import GIB, MIB
from hires.plan import memory
from hires.plan.graph import INPUT, Graph, Node, Parameter
from hires.plan.memory import LIBRARIES_BYTES, RankMemory, Room
from hires.plan.search import layout_search
from hires.plan.search.advice import needs, out_of_reach, would_fit
from hires.plan.search.layout_search import Budget, Change, Measure, Search, less_memory

LAYERS = 21


class Predictor:
    """Predicts what a rule says for every rank of a layout."""

    def __init__(self, rule: Any) -> None:
        self.asked: list[RunConfig] = []
        self._rule = rule

    def __call__(self, config: RunConfig) -> Any:
        self.asked.append(config)
        peak = self._rule(config.parallel)
        if peak is None:
            return None
        ranks, replicas = config.parallel.num_ranks, config.parallel.replicas
        memory = [RankMemory(0, 0, 0, peak, 0).to_dict()] * (ranks // replicas)
        return SimpleNamespace(memory=memory, world=ranks, num_replicas=replicas)


def config_of(**parallel: Any) -> RunConfig:
    return from_dict({"image": 64, "batch": 8, "parallel": parallel})


def search(config: RunConfig, room: Room, rule: Any) -> tuple[list[str], str, Predictor]:
    predictor = Predictor(rule)

    def predict(changed: RunConfig) -> Measure | None:
        plan = predictor(changed)
        there = dataclasses.replace(room, nodes=changed.launcher.num_nodes)
        if plan is None:
            return None
        return Measure(there.shortage(changed, plan) is None, needs(there, plan))

    tried = Search(config, lambda changed: out_of_reach(changed, room, EMPTY), predict)
    trials = tried.nearest(less_memory(config, LAYERS, room))
    return [trial.words for trial in trials], tried.summary(), predictor


def texts(config: RunConfig, room: Room) -> list[list[str]]:
    return [[change.text for change in ladder] for ladder in less_memory(config, LAYERS, room)]


EMPTY = Graph([], "images", [1, 3, 64, 64])
"""A network without parameters, of which nothing is known to need memory."""
LIMITED = Room(100 * MIB, None)


def test_smallest_number_of_stages_that_fits_is_found_far_away():
    config = config_of(stages=2, directions=2, schedule="gems_1f1b")
    found, _, predictor = search(config, LIMITED, lambda p: 450 * MIB // p.stages)
    assert found == ["parallel.stages=5 (90.0 MiB)"]
    stages = [c.parallel.stages for c in predictor.asked if c.parallel.stages != 2]
    assert stages == [3, 4, 8, 6, 5]


def test_search_ends_on_the_rung_where_something_fits():
    rule = {1: 150, 2: 90, 4: 50}
    found, _, predictor = search(config_of(), LIMITED, lambda p: rule[p.microbatches] * MIB)
    assert found == ["parallel.microbatches=2 (90.0 MiB)"]
    assert len(predictor.asked) == 5


def test_changes_that_keep_the_ranks_come_before_those_that_add_few():
    found, _, _ = search(
        config_of(stages=4, tiles=[2, 1]), LIMITED, lambda p: 99 if p.stages > 4 else 10**9
    )
    assert found == ["parallel.stages=5 (99 B)"]
    found, _, _ = search(config_of(), LIMITED, lambda p: 10**9 if p.num_ranks == 1 else 99)
    assert found == ["parallel.stages=2 (99 B)", "parallel.tiles=[2,1] (99 B)"]
    found, _, _ = search(config_of(stages=2, tiles=[4, 4]), LIMITED, lambda p: 99)
    assert found[0] == "parallel.microbatches=2 (99 B)"
    assert found[1] == "optimizer.shard=true (99 B)"
    assert found[4] == "parallel.stages=3 (99 B)"


def test_vain_search_says_exactly_what_was_tried():
    config = from_dict({"batch": 1, "task": {"name": "infer"}, "launcher": {"max_ranks": 4}})
    found, summary, _ = search(config, LIMITED, lambda p: 800 * MIB // p.stages)
    assert found == []
    assert summary == (
        "tried: parallel.stages=2 (400.0 MiB), parallel.tiles=[2,1] (800.0 MiB), "
        "parallel.stages=4 (200.0 MiB), parallel.tiles=[2,2] (800.0 MiB)"
    )


def test_changes_without_a_plan_are_neither_offered_nor_said_to_be_tried():
    found, summary, _ = search(config_of(), LIMITED, lambda p: None)
    assert found == []
    assert summary == "tried: nothing that makes a plan"


def test_search_ends_when_its_time_is_used(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(layout_search.time, "monotonic", lambda: now[0])

    def slow(parallel: Any) -> int:
        now[0] += layout_search.DEADLINE_S / 3
        return GIB

    found, summary, predictor = search(config_of(), LIMITED, slow)
    assert found == []
    assert len(predictor.asked) == 2
    assert summary.startswith(
        "tried until the time was used: parallel.microbatches=2 (1.0 GiB), mem"
    )


def test_machine_that_is_too_small_for_all_ranks_is_offered_fewer_of_them():
    room = Room(None, 10 * (LIBRARIES_BYTES + MIB))
    found, _, predictor = search(config_of(tiles=[8, 8]), room, lambda p: MIB)
    assert found == ["parallel.tiles=[4,2] (2.5 GiB in all)"]
    # The libraries alone of 16 ranks are too much, so that grid is not predicted.
    assert [config.parallel.num_ranks for config in predictor.asked] == [8]
    found, _, _ = search(config_of(replicas=8), Room(None, 2 * GIB), lambda p: MIB)
    assert found == ["parallel.replicas=4 (1.3 GiB in all)"]


def test_more_nodes_are_offered_to_a_job_whose_nodes_are_too_small():
    room = Room(None, 2 * (LIBRARIES_BYTES + MIB), 2, "cluster.memory")
    keys = {"parallel": {"stages": 6}, "launcher": {"name": "slurm", "nodes": 2}}
    found, _, _ = search(from_dict({"batch": 1, **keys}), room, lambda p: MIB)
    assert found[0] == "launcher.nodes=4 (642.0 MiB on a node)"


def test_fewer_stages_are_bisected_back_to_the_most_that_fit():
    room = Room(None, 7 * (LIBRARIES_BYTES + MIB))
    config = from_dict({"batch": 1, "parallel": {"stages": 12}})
    assert search(config, room, lambda p: MIB)[0] == ["parallel.stages=7 (2.2 GiB in all)"]
    room = Room(None, 5 * (LIBRARIES_BYTES + MIB))
    assert search(config, room, lambda p: MIB)[0] == ["parallel.stages=5 (1.6 GiB in all)"]


def test_ladders_go_from_near_to_far_and_leave_out_what_makes_no_sense():
    assert texts(config_of(stages=3, microbatches=2), LIMITED) == [
        ["parallel.microbatches=4", "parallel.microbatches=8"],
        ["memory.checkpoint=block"],
        ["memory.checkpoint=stage"],
        [f"parallel.stages={n}" for n in (4, 6, 12, 21)],
        ["parallel.tiles=[2,1]", "parallel.tiles=[2,2]"],
    ]
    inference = from_dict({"batch": 1, "task": {"name": "infer"}, "parallel": {"stages": 21}})
    assert texts(inference, LIMITED)[1] == []  # nothing is computed again, and no more layers
    kept = from_dict({"memory": {"checkpoint": "block"}})
    assert ["memory.checkpoint=stage"] in texts(kept, LIMITED)
    assert ["memory.checkpoint=block"] not in texts(kept, LIMITED)
    grids = config_of(tiles=[[2, 2], [2, 1]], stages=3)
    assert texts(grids, LIMITED)[-1][0] == "parallel.tiles=[[4,2],[2,2]]"
    # What keeps the ranks comes before all that gives some up.
    shared = texts(grids, Room(None, GIB))
    first = [["optimizer.shard=true"], ["memory.checkpoint=block"]]
    assert shared[:3] == [[], *first]  # and there are no nodes to add
    assert shared[4] == ["parallel.tiles=[[2,1],[1,1]]", "parallel.tiles=[[1,1],[1,1]]"]


def test_change_reaches_a_section_within_a_section():
    config = config_of(tiles=[2, 1], microbatches=2)
    change = Change({"parallel.halo.fuse": 2, "optimizer.shard": True})
    changed = change.apply(config)
    assert changed is not None
    assert changed.optimizer.shard
    assert changed.parallel.halo.fuse == 2
    assert config.parallel.halo.fuse == 1
    assert not config.optimizer.shard
    assert changed.optimizer.lr == config.optimizer.lr
    assert changed.parallel.microbatches == config.parallel.microbatches


def test_layers_that_were_given_to_stages_are_taken_back_in_so_many_words():
    ladder = texts(config_of(stages=2, balance=[1, 20]), LIMITED)[-2]
    assert ladder[0] == "parallel.stages=3 parallel.balance=null"


def test_trials_are_counted_not_only_timed():
    predictor = Predictor(lambda parallel: GIB)
    tried = Search(
        config_of(),
        predict=lambda config: Measure(False, "much") if predictor(config) else None,
        budget=Budget(trials=3),
    )
    assert tried.nearest([[Change({"parallel.microbatches": n}) for n in (2, 4, 8)] * 3]) == []
    assert len(predictor.asked) == 3
    assert tried.summary().startswith("tried until the time was used: parallel.microbatches=2 (")


def test_no_trial_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(layout_search.time, "monotonic", lambda: now[0])
    budget = Budget(deadline_s=110.0)

    def slow(config: RunConfig) -> Measure:
        now[0] += 6
        return Measure(False, "much")

    tried = Search(config_of(), predict=slow, budget=budget)
    tried.nearest([[Change({"parallel.microbatches": n}) for n in (2, 4, 8)]])
    assert len(tried.trials) == 1  # a second one would end at 112


def test_ladders_are_generated_no_further_than_the_search_goes():
    made = []

    def endless():
        for count in itertools.count(2):
            made.append(count)
            yield Change({"parallel.stages": count})

    assert Search(config_of(stages=9)).first_of_each([endless()])[0].text == "parallel.stages=2"
    assert made == [2]


def test_layout_that_is_out_of_reach_is_never_planned(monkeypatch: pytest.MonkeyPatch):
    # 340 images on each tile of a network of 4080 ranks: minutes and 21 GiB went into that plan.
    images = [8, 4, 4096, 4096]
    args = {"input": {"value": INPUT}, "weight": {"param": "w"}}
    conv = Node("conv", "conv2d.default", args, images, "float32")
    graph = Graph([conv], "conv", images, {"w": Parameter([4, 4, 1, 1], "float32", True)})
    layout = {"tiles": [4, 4], "replicas": 85}
    config = from_dict(
        {"image": 4096, "batch": 680, "parallel": layout, "launcher": {"max_ranks": 4080}}
    )
    monkeypatch.setattr(memory, "machine_bytes", lambda: 20 * GIB)
    monkeypatch.setattr(layout_search, "SHOWN_OUT", 20)
    predictor = Predictor(lambda parallel: GIB)
    text = would_fit(config, "too much", graph, predictor, Budget()).text
    # One replica of 16 ranks would fit but for its 680 images of 256 MiB.
    assert [c.parallel.replicas for c in predictor.asked] == []
    assert "parallel.replicas=1 (at least 175.0 GiB)" in text
    assert text.startswith("too much; tried: nothing that makes a plan; out without a trial: ")


def test_gpus_that_are_free_are_taken_before_there_are_fewer_ranks():
    config = config_of()
    ladders = less_memory(config, 40, Room(None, GIB, 1, "cluster.gpu_memory", 4))
    texts = [change.text for ladder in ladders for change in ladder]
    assert "parallel.stages=2" in texts
    assert "parallel.stages=4" in texts
    assert "parallel.stages=8" not in texts  # there are four
    assert any(text.startswith("parallel.tiles") for text in texts)
