"""Which rank is this process, and which cores and devices does it keep to?"""

from __future__ import annotations

import pytest

from hires.core.errors import ConfigError
from hires.core.ranks.world import World, from_environment

WORLD = World(1, 4, 1, 4, "127.0.0.1", 29500, 2)


def test_environment_and_back():
    environ = WORLD.to_environment()
    assert environ["RANK"] == "1"
    assert environ["WORLD_SIZE"] == "4"
    assert environ["HIRES_ATTEMPT"] == "2"
    assert from_environment(environ) == WORLD


@pytest.mark.parametrize("name", sorted(WORLD.to_environment()))
def test_missing_variable_is_named_with_the_remedy(name):
    environ = WORLD.to_environment()
    del environ[name]
    with pytest.raises(ConfigError, match=rf"{name} is not set: .*launch\.sh"):
        from_environment(environ)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RANK", "one", "RANK='one' must be a number"),
        ("RANK", "4", "RANK=4 must be 0 to WORLD_SIZE-1=3"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE=5 do not fit"),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000 must be 1 to 65535"),
        ("HIRES_ATTEMPT", "-1", "HIRES_ATTEMPT=-1 must be 0 or more"),
    ],
)
def test_values_that_make_no_sense(name, value, text):
    with pytest.raises(ConfigError, match=text):
        from_environment({**WORLD.to_environment(), name: value})
