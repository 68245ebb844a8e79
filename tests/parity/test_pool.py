"""Ranks of the pool serve many jobs; one that failed or left something behind serves no other."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from tests.helpers import pool_jobs
from tests.helpers.pool import Pool


@pytest.fixture
def pool():
    made = Pool(kept=2)
    yield made
    made.close()


def test_ranks_serve_many_jobs_and_end_with_the_pool(pool):
    first = pool.run(pool_jobs.process_id, 2)
    assert len(set(first)) == 2
    assert pool.run(pool_jobs.process_id, 2) == first
    assert pool.run(pool_jobs.process_id, 1) == first[:1]
    more = pool.run(pool_jobs.process_id, 3)
    assert more[:2] == first
    assert not is_alive(more[2])  # beyond those that are kept
    pool.close()
    assert not any(map(is_alive, first))


@pytest.mark.parametrize(
    ("how", "timeout_s", "error"),
    [
        ("raises", 60.0, r"(?s)rank 1 failed:.*an error of rank 1"),
        ("dies", 60.0, "rank 1 failed:\nit died without an answer"),
        ("sleeps", 1.0, r"ranks \[0, 1\] gave no answer in time"),
    ],
)
def test_failed_job_ends_its_ranks_and_the_next_has_new_ones(pool, how, timeout_s, error):
    first, began = pool.run(pool_jobs.process_id, 2), time.monotonic()
    with pytest.raises(AssertionError, match=error):
        pool.run(pool_jobs.fails, 2, how, timeout_s=timeout_s)
    assert time.monotonic() - began < 50.0
    assert not any(map(is_alive, first))
    assert not set(pool.run(pool_jobs.process_id, 2)) & set(first)


def test_rank_whose_job_left_something_behind_serves_no_other(pool):
    first = pool.run(pool_jobs.changes_environment, 1)
    assert pool.run(pool_jobs.process_id, 1) != first


def is_alive(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False
