"""Names, numbers and lines as they are shown: units, tables, logs and offers for typos."""

from __future__ import annotations

import io
import logging
import re

import pytest

from hires.core import streams, units
from hires.core.errors import ConfigError
from hires.core.registry import Registry


def test_names_come_in_order_and_a_typo_is_answered_with_the_nearest():
    shapes: Registry[int] = Registry("shape")
    for number, name in enumerate(("circle", "square", "triangle")):
        shapes.register(name)(number)
    assert list(shapes) == ["circle", "square", "triangle"]
    assert (shapes["square"], shapes.get("sqare")) == (1, None)
    with pytest.raises(ConfigError, match=r"^unknown shape 'sqare'; did you mean square\?$"):
        shapes["sqare"]
    with pytest.raises(ConfigError, match="choose one of circle, square, triangle"):
        shapes["xyz"]
    with pytest.raises(AssertionError, match="shape square is registered twice"):
        shapes.register("square")(4)


def test_sizes_are_read_with_their_unit():
    sizes = {"4GiB": 4 << 30, "800MB": 800 * 10**6, "1.5 KiB": 1536, 4096: 4096, "4096": 4096}
    for text, num_bytes in {**sizes, "2g": 2 * 10**9, "7 B": 7}.items():
        assert units.parse_size(text) == num_bytes
    for odd in ("", "GiB", "-3", "0", 0, "4 GiBs", "1e9", None, True, [1]):
        assert units.parse_size(odd) is None


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
