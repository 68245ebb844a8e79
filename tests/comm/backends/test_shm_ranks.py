"""Backends of one machine between real ranks: all operations, and how they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import api_jobs, shm_jobs
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("backends", "members"), [(["shm"], None), (["cma", "shm"], [0, 2])])
def test_every_operation_and_type_is_right(backends: list[str], members: list[int] | None):
    assert run_ranks(api_jobs.operations, 3, backends, members) == [[]] * 3


def test_messages_of_every_type_arrive_over_three_backends_at_once():
    assert run_ranks(api_jobs.messages, 2, ["cma", "shm", "gloo"]) == [[], []]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["shm", "cma"])
def test_rank_that_was_killed_ends_the_waits_of_the_others_and_leaves_no_file(backend: str):
    before = {*Path("/dev/shm").glob("hires-*")}
    told, _ = run_ranks(shm_jobs.killed, 2, [backend])
    received, sent, first, later = told
    # Long before the limit of these waits, which is that of the test.
    assert "message of rank 1 with tag 0 (4 bytes): rank 1 has ended" in received
    assert "send to rank 1" in sent
    for text in (sent, first, later):
        assert "rank 1 has ended" in text
    assert {*Path("/dev/shm").glob("hires-*")} <= before
