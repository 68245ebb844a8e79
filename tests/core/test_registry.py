"""Named choices, and the answer to a name that is none of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hires.core.errors import ConfigError
from hires.core.registry import Registry


@pytest.fixture
def shapes() -> Registry[Callable[[], int]]:
    registry: Registry[Callable[[], int]] = Registry("shape")
    for number, name in enumerate(("circle", "square", "triangle")):
        registry.register(name)(lambda number=number: number)
    return registry


def test_registered_function_is_found_and_stays_what_it_was(shapes):
    def hexagon() -> int:
        return 6

    assert shapes.register("hexagon")(hexagon) is hexagon
    assert shapes["hexagon"] is hexagon
    assert shapes.get("hexagon") is hexagon


def test_names_come_in_the_order_of_registration(shapes):
    assert list(shapes) == ["circle", "square", "triangle"]
    assert "square" in shapes
    assert "sqare" not in shapes


def test_name_that_may_be_missing(shapes):
    assert shapes.get("sqare") is None


def test_misspelt_name_is_answered_with_the_nearest(shapes):
    with pytest.raises(ConfigError, match=r"^unknown shape 'sqare'; did you mean square\?$"):
        shapes["sqare"]


def test_name_like_no_other_is_answered_with_all(shapes):
    with pytest.raises(ConfigError, match="choose one of circle, square, triangle"):
        shapes["xyz"]


def test_second_use_of_a_name_is_our_own_mistake(shapes):
    with pytest.raises(AssertionError, match="shape square is registered twice"):
        shapes.register("square")(lambda: 4)
