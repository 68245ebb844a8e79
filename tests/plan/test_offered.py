"""Is a layout that is larger than the machine refused, with the nearest one that is not?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from hires.core.config import RunConfig, from_dict
from hires.plan.offered import offered


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


def test_most_stages_that_are_offered_are_named():
    assert remedy(stages=100) == "use parallel.stages=64"
    assert (
        remedy(stages=66, balance=[1] * 66) == "use parallel.stages=64 with parallel.balance=null"
    )


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
        "none of replicas, stages and tiles is enough alone: lower two of them"
    )


def test_every_advice_is_a_layout_that_is_offered():
    keys = {"replicas": 3, "tiles": [4, 4], "stages": 9}
    for words in remedy(96, **keys).removeprefix("use ").split(" or "):
        key, value = words.removeprefix("parallel.").split("=")
        assert offered(config_of(96, **keys | {key: json.loads(value)})) == []
