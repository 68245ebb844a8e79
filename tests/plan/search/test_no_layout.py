"""Which number of ranks does a search name that has no layout to offer?"""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest

from hires.plan.memory import Room, room_of
from hires.plan.search import no_layout
from hires.plan.search.candidates import NOTHING_GIVEN
from hires.plan.search.choice import Choice
from tests.helpers.small_plans import config_of

MANY = 2**30


@pytest.fixture
def fewest(monkeypatch):
    """Looks for the fewest ranks, from one on, where so many fit; a look at a shape takes time."""

    def look(enough, seconds):
        config = config_of(batch=48)
        memory = dataclasses.replace(config.memory, limit="1GiB")
        config = dataclasses.replace(config, memory=memory)

        def estimate(candidate):
            shape = candidate.shape
            ranks = shape.replicas * sum(shape.ranks_of_stages)
            return SimpleNamespace(peak_bytes=MANY if ranks >= enough else 2 * MANY)

        clock = itertools.count(0.0, seconds)
        monkeypatch.setattr(no_layout, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        estimator = SimpleNamespace(config=config, layers=[0, 1, 2, 3], estimate=estimate)
        return no_layout._fewest_ranks(estimator, 1, room_of(config), NOTHING_GIVEN, 1.0)

    return look


def test_fewest_ranks_are_found_by_looking_at_all(fewest):
    assert fewest(5, 0.0) == (5, 5, True)
    assert fewest(99, 0.0) == (None, no_layout.MOST_TIMES, True)


def test_ranks_that_would_do_are_known_before_all_were_looked_at(fewest):
    few, seen, is_all = fewest(3, 0.0)
    assert (few, is_all) == (3, True)
    # Twice and four times as many are looked at first; then the time is used.
    few, seen, is_all = fewest(3, no_layout.LONGEST_S / 40)
    assert few in (3, 4)
    few, seen, is_all = fewest(3, no_layout.LONGEST_S)
    assert (few, seen, is_all) == (None, 1, False)


def test_smaller_one_of_two_limits_counts():
    room = Room(4 * MANY, 6 * MANY, 1, "cluster.memory")
    one, many = (no_layout.limit_bytes(room, ranks) for ranks in (1, 6))
    assert one == 4 * MANY
    assert many == MANY - room.libraries_bytes


def test_whole_errors_say_why_no_layout_makes_a_plan():
    choice = Choice(2, "images_per_s", "")
    choice.reasons.update({"nccl needs a GPU for each rank": 3, "odd": 1})
    text = no_layout.no_plan(choice, {"nccl needs a GPU for each rank": "nccl needs one; use gloo"})
    assert text == "no layout of ranks=2 is possible: nccl needs one; use gloo; odd"
