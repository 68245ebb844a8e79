"""A wait looks again until its time is over, and then once more."""

from __future__ import annotations

import time

from hires.comm.backends.polling import poll


def test_process_that_was_stopped_past_its_limit_sees_what_came_meanwhile():
    looks = iter((False, False, True))

    def done() -> bool:
        came = next(looks)
        time.sleep(0.02)
        return came

    assert poll(done, 0.01, 1)
    assert not poll(lambda: False, 0.01, 1)
