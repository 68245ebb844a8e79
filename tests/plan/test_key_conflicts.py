"""Are keys that do not go together told all at once, with values that do?"""

from __future__ import annotations

from typing import Any

import pytest

from hires.core.config.run_config import from_dict
from hires.plan.checks import check_together
from tests.helpers.small_plans import plan_of


def told(batch: int = 12, **parallel: Any) -> dict[str, str]:
    """What is said of a layout, by key."""
    config = from_dict({"batch": batch, "parallel": parallel})
    return {finding.key: finding.text for finding in check_together(config)}


def test_keys_that_go_together_are_no_finding():
    assert told() == {}
    assert told(stages=2, directions=2, pairs=3, schedule="gems") == {}
    assert told(stages=2, tiles=[2, 1], local_dp=2) == {}


def test_schedule_of_another_number_of_directions():
    assert told(schedule="gems") == {
        "parallel.schedule": "parallel.schedule=gems is for 2 directions; with "
        "parallel.directions=1 use parallel.schedule=gpipe or 1f1b"
    }
    assert told(stages=2, directions=2) == {
        "parallel.schedule": "parallel.schedule=gpipe is for 1 direction; with "
        "parallel.directions=2 use parallel.schedule=gems or gems_1f1b"
    }


@pytest.mark.parametrize(
    ("batch", "keys", "count"),
    [
        (12, {"pairs": 3}, 3),
        (12, {"pairs": 3, "microbatches": 2}, 6),
        # 3 was advised, which does not divide 4.
        (4, {"pairs": 3}, 2),
        (8, {"pairs": 3, "replicas": 2}, 2),
        (12, {"pairs": 4, "local_dp": 2}, 3),
    ],
)
def test_pairs_of_one_direction_become_microbatches_that_divide_the_batch(batch, keys, count):
    text = told(batch, **keys)["parallel.pairs"]
    assert text.endswith(f"use parallel.pairs=1 with parallel.microbatches={count}")
    mended = keys | {"pairs": 1, "microbatches": count}
    assert told(batch, **mended) == {}
    assert batch % from_dict({"parallel": mended}).parallel.pieces == 0


@pytest.mark.parametrize(
    ("keys", "others"),
    [
        ({"schedule": "gems"}, " with parallel.schedule=gpipe"),
        # Three pairs of one direction were advised, which are refused.
        ({"schedule": "gems", "pairs": 3}, " with parallel.schedule=gpipe and parallel.pairs=1"),
        ({"schedule": "1f1b"}, ""),
    ],
)
def test_one_rank_mirrors_nothing(keys, others):
    text = told(directions=2, **keys)["parallel.directions"]
    assert text.endswith(f"use parallel.stages=2, or parallel.directions=1{others}")
    mended = {"schedule": "gpipe"} if "gems" in keys["schedule"] else keys
    assert told(**mended) == {}


def test_shards_of_stages_that_are_all_tiled():
    text = told(tiles=[2, 1], local_dp=2)["parallel.local_dp"]
    assert text.endswith("but all 1 are tiled; use parallel.stages=2, or parallel.local_dp=1")
    text = told(tiles=[2, 1], local_dp=2, balance=[4])["parallel.local_dp"]
    assert "use parallel.stages=2 with parallel.balance=null, or" in text


def test_keys_the_batch_and_the_cuts_are_told_at_once():
    # The schedule alone was told, and the others after it had been mended.
    keys = {"stages": 9, "directions": 2, "pairs": 2, "schedule": "1f1b"}
    found = [f.key for f in plan_of(batch=3, **keys).findings]
    assert found == ["batch", "parallel.schedule", "parallel.stages"]


def test_batch_is_not_advised_pairs_of_one_direction():
    [batch, pairs] = [f.text for f in plan_of(batch=4, pairs=3).findings if f.severity == "error"]
    assert batch.endswith("use batch=3 or batch=6")
    assert pairs.endswith("use parallel.pairs=1 with parallel.microbatches=2")
