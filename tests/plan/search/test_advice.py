"""Is a layout that is larger than the machine refused, with the nearest one that is not?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig, from_dict
from hires.plan.plan import Finding
from hires.plan.search.advice import fewer_on_a_node, offered


def config_of(batch: int = 640, **parallel: Any) -> RunConfig:
    return from_dict({"batch": batch, "parallel": parallel})


def remedy(batch: int = 640, **parallel: Any) -> str:
    """What the one finding advises."""
    [finding] = offered(config_of(batch, **parallel))
    assert (finding.severity, finding.key) == ("error", "launcher.max_ranks")
    problem, text = finding.text.split("; ")
    ranks = config_of(batch, **parallel).parallel.num_ranks
    assert problem == f"the layout has {ranks} ranks, but launcher=local offers 64 on a machine"
    own, allow = text.rsplit(", ", 1)
    assert allow == f"or allow them with launcher.max_ranks={ranks}"
    return own


def test_layout_that_fits_is_no_finding():
    assert offered(config_of(replicas=64)) == []


def test_fewer_replicas_divide_the_batch_too():
    assert remedy(160, replicas=80, microbatches=2) == "use parallel.replicas=40"
    assert remedy(100, replicas=100) == "use parallel.replicas=50"


def test_most_shards_that_are_offered_and_divide_are_named():
    # It was said that replicas, stages and tiles were not enough.
    assert remedy(200, local_dp=200) == "use parallel.local_dp=50"
    assert remedy(100, tiles=[2, 1], stages=2, spatial_stages=1, local_dp=100) == (
        "use parallel.local_dp=50"
    )
    # A batch that does not divide anyway is another finding.
    assert remedy(7, microbatches=2, local_dp=70) == "use parallel.local_dp=64"


def test_fewer_replicas_divide_the_shards_too():
    config = config_of(60, replicas=20, local_dp=6)
    assert "use parallel.replicas=10 or parallel.local_dp=3, or" in offered(config)[0].text


def test_grids_are_no_finer_than_the_image():
    config = config_of(tiles=[224, 1])
    config.image = [16, 16]
    assert "use parallel.tiles=[16,1]," in offered(config)[0].text


def test_network_of_few_layers_is_offered_no_more_stages():
    [finding] = offered(config_of(stages=100), layers=21)
    assert "; use parallel.stages=21, or" in finding.text


def test_most_stages_that_are_offered_are_named():
    assert remedy(stages=100) == "use parallel.stages=64"
    assert remedy(stages=66, balance=[1] * 66) == "use parallel.stages=64 parallel.balance=null"


@pytest.mark.parametrize(
    ("tiles", "expected"),
    [
        ([9, 9], "[8,8]"),
        ([7, 10], "[7,9]"),
        ([100, 1], "[64,1]"),
        ([[9, 8], [1, 2]], "[[7,8],[1,2]]"),
    ],
)
def test_largest_grids_that_are_offered_are_named(tiles, expected):
    stages = len(tiles) if isinstance(tiles[0], list) else 1
    assert remedy(tiles=tiles, stages=stages) == f"use parallel.tiles={expected}"


def test_all_single_changes_are_offered():
    # 3 replicas of 16 tiles and 8 more ranks.
    assert remedy(96, replicas=3, tiles=[4, 4], stages=9) == (
        "use parallel.replicas=2 or parallel.stages=6 or parallel.tiles=[3,4]"
    )


def test_stages_behind_the_tiles_stay():
    # No number of stages is enough: that of tiles is too large.
    assert remedy(tiles=[9, 9], stages=3) == "use parallel.tiles=[7,8]"


def test_two_directions_keep_two_ranks():
    config = config_of(tiles=[3, 1], stages=1, directions=2, schedule="gems")
    config.launcher.max_ranks = 1
    assert "lower two of them" in offered(config)[0].text


def test_layout_that_no_single_change_fits_says_so():
    assert remedy(replicas=80, stages=80) == (
        "none of replicas, stages, tiles and local_dp is enough alone: lower two of them"
    )


def test_every_advice_is_a_layout_that_is_offered():
    keys = {"replicas": 3, "tiles": [4, 4], "stages": 9}
    for words in remedy(96, **keys).removeprefix("use ").split(" or "):
        key, value = words.removeprefix("parallel.").split("=")
        assert offered(config_of(96, **keys | {key: json.loads(value)})) == []


def job(cores: int | None, threads: int = 2, nodes: int = 2, ranks: int = 8) -> list[Finding]:
    launcher = LauncherConfig(name="slurm", nodes=nodes, threads=threads)
    keys = {"parallel": ParallelConfig(replicas=ranks), "batch": ranks}
    return offered(RunConfig(launcher=launcher, cluster=ClusterConfig(cores=cores), **keys))


def test_job_that_asks_for_more_cores_than_a_node_has_is_refused_with_what_would_do():
    assert job(None) == job(8) == []
    [finding] = job(7)
    assert (finding.severity, finding.key) == ("error", "cluster.cores")
    assert finding.text == (
        "4 ranks of 2 threads on a node need 8 cores, but cluster.cores=7; use launcher.nodes=3 or "
        "launcher.threads=1"
    )
    assert job(7, nodes=3) == job(7, threads=1) == []
    assert job(1)[0].text.endswith("cluster.cores=1; use fewer ranks")


def test_hosts_without_a_rank_are_refused():
    launcher = LauncherConfig(name="mpirun", hosts=["a", "b"])
    [finding] = offered(RunConfig(launcher=launcher))
    assert finding.text.startswith("launcher.hosts names 2, which is more than the ranks")


@pytest.mark.parametrize(
    ("launcher", "advice"),
    [
        ({"name": "slurm", "nodes": 2}, "launcher.nodes=3 or more, a smaller image or a smaller"),
        ({"name": "slurm", "nodes": 4}, "a smaller image, a smaller batch or fewer ranks"),
        ({"name": "local"}, "a smaller image, a smaller batch or fewer ranks"),
    ],
)
def test_need_for_the_memory_of_a_node_falls_with_its_ranks(launcher, advice):
    config = from_dict({"parallel": {"tiles": [2, 2]}, "launcher": launcher})
    assert fewer_on_a_node(config).startswith(f"use {advice}")
