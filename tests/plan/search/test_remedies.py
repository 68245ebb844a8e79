"""Are changes that fit found however far away, near ones first, and is a vain search told truly?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.units import GIB, MIB
from hires.plan.memory import LIBRARIES_BYTES, RankMemory, Room
from hires.plan.search import remedies
from hires.plan.search.remedies import Search, ladders

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
    found = Search(config, room, predictor)
    return found.remedies(LAYERS), found.summary(), predictor


def texts(config: RunConfig, room: Room) -> list[list[str]]:
    return [[change.text for change in ladder] for ladder in ladders(config, LAYERS, room)]


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
    assert found[3] == "parallel.stages=3 (99 B)"


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
    monkeypatch.setattr(remedies.time, "monotonic", lambda: now[0])

    def slow(parallel: Any) -> int:
        now[0] += remedies.BUDGET_S / 2
        return GIB

    found, summary, predictor = search(config_of(), LIMITED, slow)
    assert found == []
    assert len(predictor.asked) == 2
    assert summary.startswith("tried in 20 s: parallel.microbatches=2 (1.0 GiB), memory.check")


def test_machine_that_is_too_small_for_all_ranks_is_offered_fewer_of_them():
    room = Room(None, 10 * (LIBRARIES_BYTES + MIB))
    found, _, predictor = search(config_of(tiles=[8, 8]), room, lambda p: MIB)
    assert found == ["parallel.tiles=[4,2] (2.5 GiB in all)"]
    # The libraries alone of 16 ranks are too much, so nobody asks about them.
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
    assert texts(inference, LIMITED)[:2] == [[], []]
    kept = from_dict({"memory": {"checkpoint": "block"}})
    assert ["memory.checkpoint=stage"] in texts(kept, LIMITED)
    assert ["memory.checkpoint=block"] not in texts(kept, LIMITED)
    grids = config_of(tiles=[[2, 2], [2, 1]], stages=3)
    assert texts(grids, LIMITED)[-1][0] == "parallel.tiles=[[4,2],[2,2]]"
    # Recomputation keeps the ranks, so it comes before all that gives some up.
    shared = texts(grids, Room(None, GIB))
    assert shared[0] == ["memory.checkpoint=block"]
    assert shared[2] == ["parallel.tiles=[[2,1],[1,1]]", "parallel.tiles=[[1,1],[1,1]]"]


def test_layers_that_were_given_to_stages_are_taken_back_in_so_many_words():
    ladder = texts(config_of(stages=2, balance=[1, 20]), LIMITED)[-2]
    assert ladder[0] == "parallel.stages=3 parallel.balance=null"
