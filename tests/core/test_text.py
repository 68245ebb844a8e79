"""Names, numbers and lines as they are shown: units, tables, logs and offers for typos."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable

import pytest

from hires.core import streams, units
from hires.core.errors import ConfigError
from hires.core.registry import Registry


@pytest.fixture
def shapes() -> Registry[Callable[[], int]]:
    registry: Registry[Callable[[], int]] = Registry("shape")
    for number, name in enumerate(("circle", "square", "triangle")):
        registry.register(name)(lambda number=number: number)
    return registry


def test_names_come_in_order_and_a_typo_is_answered_with_the_nearest(shapes):
    def hexagon() -> int:
        return 6

    assert shapes.register("hexagon")(hexagon) is hexagon is shapes["hexagon"]
    assert list(shapes) == ["circle", "square", "triangle", "hexagon"]
    assert "sqare" not in shapes
    assert shapes.get("sqare") is None
    with pytest.raises(ConfigError, match=r"^unknown shape 'sqare'; did you mean square\?$"):
        shapes["sqare"]
    with pytest.raises(ConfigError, match="choose one of circle, square, triangle"):
        shapes["xyz"]
    with pytest.raises(AssertionError, match="shape square is registered twice"):
        shapes.register("square")(lambda: 4)


def test_sizes_are_read_with_their_unit():
    sizes = {"4GiB": 4 << 30, "800MB": 800 * 10**6, "1.5 KiB": 1536, 4096: 4096, "4096": 4096}
    for text, num_bytes in {**sizes, "2g": 2 * 10**9, "7 B": 7}.items():
        assert units.parse_size(text) == num_bytes
    for odd in ("", "GiB", "-3", "0", 0, "4 GiBs", "1e9", None, True, [1]):
        assert units.parse_size(odd) is None


def test_numbers_are_shown_in_the_unit_that_suits():
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 44 << 20: "44.0 MiB", 3 << 50: "3.0 PiB"}
    for num_bytes, text in sizes.items():
        assert units.size(num_bytes) == text
    assert (units.gib(5 << 28), units.gib(1 << 38)) == ("1.25 GiB", "256 GiB")
    times = {310e-6: "310 us", 0.0415: "41.5 ms", 3.214: "3.21 s", 250: "4 min 10 s"}
    for value_s, text in {**times, 7500: "2 h 5 min", -0.5: "-500.0 ms"}.items():
        assert units.seconds(value_s) == text
    for value, text in {832: "832", 25.6e6: "25.6 M", 4.1e9: "4.1 G"}.items():
        assert units.count(value) == text


def test_rank_zero_speaks_and_the_others_warn():
    for rank, lines in (
        (0, ["rank 0: stage 0", "rank 0 warning: slow"]),
        (3, ["rank 3 warning: slow"]),
        (None, ["hires: stage 0", "hires warning: slow"]),
    ):
        stream = io.StringIO()
        streams.setup_log(rank, stream)
        streams.setup_log(rank, stream)  # twice does not say everything twice
        logging.getLogger("hires.x").info("stage %d", 0)
        logging.getLogger("hires.x").warning("slow")
        texts = [
            re.sub(r"^\d{4}-\d\d-\d\dT[\d:.]+Z ", "", line)
            for line in stream.getvalue().splitlines()
        ]
        assert texts == lines
