import io
import logging
import re

import pytest

from hires.core import log


@pytest.fixture(autouse=True)
def restored():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("rank", "lines"),
    [
        (0, ["rank 0: stage 0", "rank 0 warning: slow"]),
        (3, ["rank 3 warning: slow"]),
        (None, ["hires: stage 0", "hires warning: slow"]),
    ],
)
def test_rank_zero_speaks_and_the_others_warn(rank, lines):
    stream = io.StringIO()
    log.setup(rank, stream)
    log.setup(rank, stream)  # twice does not say everything twice
    logging.getLogger("hires.x").info("stage %d", 0)
    logging.getLogger("hires.x").warning("slow")
    said = stream.getvalue().splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d\.\d{3} ", "", line) for line in said] == lines


def test_traceback_follows_its_line():
    stream = io.StringIO()
    log.setup(0, stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("hires.x").exception("F3 failed")
    assert "rank 0 error: F3 failed\nTraceback" in stream.getvalue()
    assert stream.getvalue().endswith("ValueError: broken\n")
