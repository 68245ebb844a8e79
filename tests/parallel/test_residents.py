"""Residents of a process take turns, and a fault of one ends all of them with its own error."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from hires.core.errors import CommError, RunError
from hires.engine.build import build_rank
from hires.engine.rank_engine import RankEngine
from hires.parallel.residents import Turns
from tests.helpers.layouts import config_of
from tests.helpers.traces import plan_of


def test_one_runs_at_a_time_and_goes_on_when_it_can():
    turns, done = Turns([0, 1, 2], 5.0), list[str]()
    running = threading.Lock()

    def job(rank: int) -> None:
        for step in range(2):
            assert running.acquire(blocking=False)
            done.append(f"{rank}{step}")
            running.release()
            # Rank 0 waits for what rank 2 does last.
            turns.wait(rank, lambda: rank != 0 or "20" in done, "rank 2")
            assert rank or "20" in done

    turns.run({rank: (lambda rank=rank: job(rank)) for rank in range(3)})
    # A rank keeps its turn until it has to wait.
    assert done == ["00", "10", "11", "20", "21", "01"]


def test_a_fault_of_one_ends_all_with_its_error():
    turns, went_on = Turns([0, 1], 5.0), list[int]()

    def waits() -> None:
        turns.wait(0, lambda: False, "rank 1")
        went_on.append(0)

    def fails() -> None:
        raise RunError("no such image")

    with pytest.raises(RunError, match="no such image"):
        turns.run({0: waits, 1: fails})
    assert not went_on
    turns.run({0: lambda: None, 1: lambda: None})  # the next step is another one


def test_messages_that_never_come_are_named():
    turns = Turns([4, 5], 0.1)
    jobs = {
        rank: (lambda rank=rank: turns.wait(rank, lambda: False, f"the halo of conv{rank}"))
        for rank in (4, 5)
    }
    with pytest.raises(CommError, match=r"rank 4 of it: the halo of conv4; rank 5 of it: the halo"):
        turns.run(jobs)


def test_parameters_are_there_once_and_buffers_for_each():
    engine = engine_of()
    first, *others = engine.ranks
    for one in others:
        assert all(one.parameters[n] is p for n, p in first.parameters.items())
        buffers = {n: t for n, t in one.tensors.items() if not isinstance(t, nn.Parameter)}
        assert all(t.data_ptr() != first.tensors[n].data_ptr() for n, t in buffers.items())
    engine.executor.step(engine.loaders)
    assert all(torch.equal(t, first.tensors[n]) for o in others for n, t in o.tensors.items())
    for tensor in first.tensors.values():
        tensor.data.zero_()
    engine.spread_buffers()
    assert not any(tensor.any() for one in others for tensor in one.tensors.values())


def engine_of() -> RankEngine:
    config = config_of(parallel={"tiles": [3, 1], "resident": 3}, data={"prefetch": 0})
    return build_rank(config, plan_of(config), 0, 1)
