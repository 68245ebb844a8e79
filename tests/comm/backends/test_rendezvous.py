"""Stores keep what another rank may still need, and no more."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import pytest
import torch

from hires.comm.backends import rendezvous
from hires.core.ranks.world import World
from tests.helpers.thread_ranks import run_threads


def test_texts_leave_only_the_last_answer_in_the_store():
    store = torch._C._distributed_c10d.HashStore()

    def job(rank: int) -> list[list[str]]:
        exchange = rendezvous.texts(rendezvous.part(store, "one"), 3, rank)
        return [exchange(f"{rank} {number}") for number in range(4)]

    expected = [[f"{rank} {number}" for rank in range(3)] for number in range(4)]
    assert run_threads(job, 3) == [expected] * 3
    assert store.num_keys() == 1


def test_worlds_one_after_the_other_leave_one_server(monkeypatch: pytest.MonkeyPatch):
    made = []

    def serve(*_: object, **__: object) -> object:
        made.append(object())
        return made[-1]

    library = SimpleNamespace(TCPStore=serve, PrefixStore=lambda name, whole: (name, whole))
    monkeypatch.setattr(rendezvous, "_library", library)
    for name, empty in (("_stores", {}), ("_served", []), ("_meetings", collections.Counter())):
        monkeypatch.setattr(rendezvous, name, empty)
    for port in (1024, 1025, 1026):
        rendezvous.store(World(0, 2, 0, 2, "127.0.0.1", port, 0), 1.0, "gloo")
        rendezvous.leave()
    assert rendezvous._served == made[-1:]
