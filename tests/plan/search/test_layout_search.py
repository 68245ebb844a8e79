"""A layout that is too large is refused with the nearest ones that are not."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.units import GIB, MIB
from hires.plan import memory
from hires.plan.graph import INPUT, Graph, Node, Parameter
from hires.plan.memory import LIBRARIES_BYTES, RankMemory, Room
from hires.plan.search import layout_search
from hires.plan.search.advice import needs, offered, out_of_reach, would_fit
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


EMPTY = Graph([], "images", [1, 3, 64, 64])
"""A network without parameters, of which nothing is known to need memory."""


LIMITED = Room(100 * MIB, None)


def test_smallest_number_of_stages_that_fits_is_found_far_away():
    config = config_of(stages=2, directions=2, schedule="gems_1f1b")
    found, _, predictor = search(config, LIMITED, lambda p: 450 * MIB // p.stages)
    assert found == ["parallel.stages=5 (90.0 MiB)"]
    stages = [c.parallel.stages for c in predictor.asked if c.parallel.stages != 2]
    assert stages == [3, 4, 8, 6, 5]


def test_machine_that_is_too_small_for_all_ranks_is_offered_fewer_of_them():
    room = Room(None, 10 * (LIBRARIES_BYTES + MIB))
    found, _, predictor = search(config_of(tiles=[8, 8]), room, lambda p: MIB)
    assert found == ["parallel.tiles=[4,2] (2.5 GiB in all)"]
    # The libraries alone of 16 ranks are too much, so that grid is not predicted.
    assert [config.parallel.num_ranks for config in predictor.asked] == [8]
    found, _, _ = search(config_of(replicas=8), Room(None, 2 * GIB), lambda p: MIB)
    assert found == ["parallel.replicas=4 (1.3 GiB in all)"]


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


def remedy(batch: int = 640, **parallel: Any) -> str:
    """What the one finding advises for a layout of more ranks than a machine offers."""
    config = from_dict({"batch": batch, "parallel": parallel})
    [finding] = offered(config)
    assert (finding.severity, finding.key) == ("error", "launcher.max_ranks")
    problem, text = finding.text.split("; ")
    ranks = config.parallel.num_ranks
    assert problem == f"the layout has {ranks} ranks, but launcher=local offers 64 on a machine"
    own, allow = text.rsplit(", ", 1)
    assert allow == f"or allow them with launcher.max_ranks={ranks}"
    return own


@pytest.mark.parametrize(
    ("batch", "parallel", "expected"),
    [
        (160, {"replicas": 80, "microbatches": 2}, "parallel.replicas=40"),
        # It was said that replicas, stages and tiles were not enough.
        (200, {"local_dp": 200}, "parallel.local_dp=50"),
        # A batch that does not divide anyway is another finding.
        (7, {"microbatches": 2, "local_dp": 70}, "parallel.local_dp=64"),
        (640, {"stages": 66, "balance": [1] * 66}, "parallel.stages=64 parallel.balance=null"),
        (640, {"tiles": [7, 10]}, "parallel.tiles=[7,9]"),
        (640, {"tiles": [[9, 8], [1, 2]], "stages": 2}, "parallel.tiles=[[7,8],[1,2]]"),
        # No number of stages is enough: that of tiles is too large.
        (640, {"tiles": [9, 9], "stages": 3}, "parallel.tiles=[7,8]"),
        # 3 replicas of 16 tiles and 8 more ranks.
        (
            96,
            {"replicas": 3, "tiles": [4, 4], "stages": 9},
            "parallel.replicas=2 or parallel.stages=6 or parallel.tiles=[3,4]",
        ),
    ],
)
def test_every_single_change_to_the_ranks_of_a_machine_is_advised(batch, parallel, expected):
    assert remedy(batch, **parallel) == f"use {expected}"
    for words in expected.split(" or "):
        keys = (word.removeprefix("parallel.").split("=") for word in words.split())
        changed = parallel | {key: json.loads(value) for key, value in keys}
        assert offered(from_dict({"batch": batch, "parallel": changed})) == []


def test_layout_that_no_single_change_fits_says_so():
    assert remedy(replicas=80, stages=80) == (
        "none of replicas, stages, tiles and local_dp is enough alone: lower two of them"
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
