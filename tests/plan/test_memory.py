"""Is memory that does not fit said with the rank, the numbers and what would fit?"""

from __future__ import annotations

from hires.core.config.cluster_config import ClusterConfig
from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.run_config import MemoryConfig, RunConfig, from_dict
from hires.core.units import MIB
from hires.nets.trace import trace
from hires.plan import memory
from hires.plan.memory import (
    LIBRARIES_BYTES,
    RankMemory,
    Room,
    likeness,
    memory_finding,
    representatives,
    room_of,
)
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from tests.helpers.small_plans import Forked, plan_of


def entry(peak: int) -> dict[str, int]:
    return RankMemory(0, 0, 0, peak, 0).to_dict()


def test_parts_add_up_to_the_peak():
    assert RankMemory(1, 2, 3, 4, 5).to_dict()["peak_bytes"] == 15


def test_rank_beyond_the_limit_is_named_with_both_numbers():
    plan = plan_of(stages=2)
    plan.memory = [entry(50 * MIB), entry(70 * MIB)]
    config = RunConfig(memory=MemoryConfig(limit="60MiB"))
    text = Room(60 * MIB, None).shortage(config, plan)
    assert text == ("rank 1 needs 70.0 MiB, predicted, which is more than memory.limit=60MiB")
    assert Room(70 * MIB, None).shortage(config, plan) is None


def test_machine_holds_all_ranks_together_with_their_libraries():
    plan = plan_of(stages=2, replicas=2)
    plan.memory = [entry(50 * MIB), entry(70 * MIB)]
    exact = 2 * (120 * MIB + 2 * LIBRARIES_BYTES)
    assert Room(None, exact).shortage(RunConfig(), plan) is None
    text = Room(None, exact - 1).shortage(RunConfig(), plan)
    assert text is not None
    assert text.startswith("4 ranks on this machine need 1.5 GiB, predicted, most of all rank 1")
    assert Room(None, None).shortage(RunConfig(), plan) is None


def test_each_node_of_a_job_holds_its_own_ranks():
    plan = plan_of(stages=3, replicas=2)
    plan.memory = [entry(50 * MIB), entry(70 * MIB), entry(10 * MIB)]
    launcher = LauncherConfig(name="slurm", nodes=2)
    fullest = 130 * MIB + 3 * LIBRARIES_BYTES
    config = RunConfig(launcher=launcher, cluster=ClusterConfig(memory=fullest))
    room = room_of(config)
    needs = [(list(node.ranks), node.bytes) for node in room.per_node(plan)]
    assert needs == [([0, 1, 2], fullest), ([3, 4, 5], fullest)]
    assert room.shortage(config, plan) is None
    config = RunConfig(launcher=launcher, cluster=ClusterConfig(memory="1GiB"))
    plan.memory[1] = entry(140 * MIB)
    text = room_of(config).shortage(config, plan)
    assert text is not None
    assert text.startswith("3 ranks on one node need 1.1 GiB, predicted, most of all rank 1 with")
    assert text.endswith("which is more than cluster.memory=1GiB")


def test_uneven_nodes_are_judged_by_the_fullest():
    plan = plan_of(stages=5)
    plan.memory = [entry(10 * MIB)] * 3 + [entry(300 * MIB)] * 2
    config = RunConfig(launcher=LauncherConfig(name="slurm", nodes=2))
    first, second = room_of(config).per_node(plan)
    assert first.bytes == 30 * MIB + 3 * LIBRARIES_BYTES
    assert second.bytes == room_of(config).needed(plan) == 600 * MIB + 2 * LIBRARIES_BYTES
    # Nothing is known of the nodes, and this machine's memory says nothing about them.
    assert room_of(config).shortage(config, plan) is None


def test_node_counts_beside_the_limit_of_a_rank():
    plan = plan_of(stages=2)
    plan.memory = [entry(50 * MIB), entry(70 * MIB)]
    cluster = ClusterConfig(memory="500MiB")
    config = RunConfig(cluster=cluster, memory=MemoryConfig(limit="100MiB"))
    assert "cluster.memory=500MiB" in str(room_of(config).shortage(config, plan))
    config = RunConfig(memory=MemoryConfig(limit="100MiB"))
    assert room_of(config).shortage(config, plan) is None


def test_this_machine_counts_where_the_ranks_run_on_it(monkeypatch):
    monkeypatch.setattr(memory, "machine_bytes", lambda: 8 * MIB)
    large = ClusterConfig(memory="1GiB")
    assert room_of(RunConfig(cluster=large)).machine_bytes == 8 * MIB
    mpirun = LauncherConfig(name="mpirun")
    assert room_of(RunConfig(launcher=mpirun)).machine_bytes == 8 * MIB
    small = ClusterConfig(memory="4MiB")
    assert room_of(RunConfig(cluster=small)).machine_bytes == 4 * MIB


def test_finding_names_what_would_fit_or_what_was_tried():
    found = memory_finding("too much", ["memory.checkpoint=block (1.0 GiB)"], "tried: much else")
    assert (found.severity, found.key) == ("error", "memory.limit")
    assert found.text == "too much; memory.checkpoint=block (1.0 GiB) would fit"
    text = memory_finding("too much", [], "tried: parallel.stages=2 (210.0 MiB)").text
    assert text.startswith("too much; tried: parallel.stages=2 (210.0 MiB); combine such changes")


def test_equal_tiles_with_equal_neighbours_are_alike():
    config = from_dict({"image": [64, 16], "batch": 2, "parallel": {"tiles": [4, 1]}})
    plan = make_plan(config, trace(Forked(), [2, 3, 64, 16], training=True))
    assert plan.ok, plan.findings
    top, *inner, bottom = [likeness(plan, rank) for rank in range(4)]
    assert inner[0] == inner[1]
    assert inner[0] not in (top, bottom)
    uneven = plan_of(tiles=[2, 1])  # 13 rows
    assert likeness(uneven, 0) != likeness(uneven, 1)
    stages = plan_of(stages=3)
    assert len({likeness(stages, rank) for rank in range(3)}) == 3


def test_large_grid_is_stood_for_by_its_largest_tile():
    config = from_dict({"image": [64, 64], "batch": 2, "parallel": {"tiles": [5, 5]}})
    plan = make_plan(config, trace(Forked(), [2, 3, 64, 64], training=True))
    assert plan.ok, plan.findings
    [rank] = set(representatives(plan))
    row, column = divmod(rank, 5)
    assert 0 < row < 4  # it borrows on all sides
    assert 0 < column < 4


def test_few_kinds_stand_for_themselves():
    plan = plan_of(stages=3, tiles=[2, 1], spatial_stages=1)
    assert representatives(plan) == list(range(plan.ranks_per_replica))


def test_plan_json_keeps_the_memory():
    plan = plan_of()
    plan.memory = [entry(5)]
    assert Plan.from_dict(plan.to_dict()).memory == plan.memory
