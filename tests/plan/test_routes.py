"""Routes have a text that people write and the plan stores."""

import pytest

from hires.core.errors import ConfigError
from hires.plan.routes import Route, parse_route


@pytest.mark.parametrize(
    ("text", "route"),
    [
        ("gloo", Route("gloo")),
        ("shm:mailbox", Route("shm", "mailbox")),
        ("mpi:segmented:4MiB", Route("mpi", "segmented", 4 * 2**20)),
        ("mpi:two_step:1000", Route("mpi", "two_step", 1000)),
        ("gloo:segmented:96KiB", Route("gloo", "segmented", 96 * 1024)),
    ],
)
def test_text_and_route(text, route):
    assert parse_route(text) == route
    assert str(route) == text


def test_sizes_in_other_units():
    assert str(parse_route(" mpi:segmented:1024KiB ")) == "mpi:segmented:1MiB"
    assert parse_route("mpi:segmented:4MB").segment_bytes == 4_000_000


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("glo", "unknown backend 'glo'; did you mean gloo"),
        ("mpi:segmentd:4MiB", "unknown algorithm 'segmentd'; did you mean segmented"),
        ("mpi:segmented", "no segment size; write mpi:segmented:4MiB"),
        ("mpi:segmented:4XB", "segment '4XB' is no size"),
        ("mpi:segmented:-1", "is no size"),
        ("mpi:segmented:nan", "is no size"),
        ("mpi:mailbox:4MiB", "mailbox has no segments"),
        ("mpi:segmented:4MiB:x", "has 4 parts"),
        ("", "unknown backend ''"),
    ],
)
def test_errors_offer_what_works(text, error):
    with pytest.raises(ConfigError, match=error):
        parse_route(text)
