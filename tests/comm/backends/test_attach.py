"""Sums by reading other ranks' memory refuse sizes that differ."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from hires.comm.backends import attach, rounds, shared
from hires.comm.backends.attach import MAX_TENSORS, PeerMemory
from hires.comm.backends.rounds import Rounds
from hires.comm.backends.shared import SharedMemory
from hires.core.errors import PeerError
from hires.core.ranks.mailbox_limits import GATHER_BYTES
from tests.helpers.thread_ranks import run_threads


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (([4, 6], [4, 5]), "rank 7 reduces 20 bytes where rank 3 reduces 24: tensor 2 of 2"),
        (([4], [4]), ""),
    ],
)
def test_ranks_with_tensors_of_other_sizes_are_named(shapes, text):
    memory = memoryview(mmap.mmap(-1, rounds.num_bytes(2)))
    ranks = [Rounds(memory, [3, 7], rank, 60.0, 0) for rank in range(2)]

    def job(rank):
        def gather(tensor):
            gathered = tensor.new_empty((2, *tensor.shape))
            ranks[rank].share(tensor, [*gathered.unbind(0)])
            return gathered

        peers = PeerMemory(gather, rank, [3, 7])
        if not peers.works:
            return "forbidden"
        tensors = [torch.full((size,), rank + 1.0) for size in shapes[rank]]
        try:
            peers.reduce(tensors)
        except PeerError as error:
            return str(error)
        assert all((tensor == 3.0).all() for tensor in tensors)
        return ""

    answers = run_threads(job, 2)
    assert answers == [text] * 2 or answers == ["forbidden"] * 2


def errors_of(*calls):
    """Returns what each of two ranks raises in its call."""
    memory = memoryview(mmap.mmap(-1, shared.num_bytes(2, 64)))
    ranks = [SharedMemory(memory, [3, 7], rank, 60.0, 64, 0) for rank in range(2)]

    def job(rank):
        peers = ranks[rank].peers()
        if peers is None:
            return "forbidden"
        try:
            calls[rank](peers)
        except PeerError as error:
            return str(error)
        return ""

    return run_threads(job, 2)


def test_ranks_in_different_operations_are_named():
    tensors = [torch.ones(4), torch.ones(4)]
    errors = errors_of(
        lambda peers: peers.reduce_parts([[one] for one in tensors]),
        lambda peers: peers.read_parts([[one] for one in tensors]),
    )
    assert errors in (
        ["rank 7 reads parts of 2 tensors where rank 3 reduces parts of 2 tensors"] * 2,
        ["forbidden"] * 2,
    )


@pytest.mark.parametrize("share", ["sum", "parts"])
def test_numbers_of_tensors_are_compared_whole(share):
    tensors = [torch.ones(1)] * (MAX_TENSORS + 5)

    def call(count):
        if share == "sum":
            return lambda peers: peers.sum(tensors[:count])
        return lambda peers: peers.reduce_parts([[], tensors[:count]])

    verb = "reduces" if share == "sum" else "reduces parts of"
    text = f"rank 7 {verb} {MAX_TENSORS} tensors where rank 3 {verb} {MAX_TENSORS + 5} tensors"
    errors = errors_of(call(MAX_TENSORS + 5), call(MAX_TENSORS))
    assert errors in ([text] * 2, ["forbidden"] * 2)


def test_addresses_and_sizes_of_the_most_tensors_fit_a_gather():
    assert 8 * (2 + 2 * MAX_TENSORS) <= GATHER_BYTES


@pytest.mark.parametrize(
    ("reader", "scope", "user", "allowed"),
    [
        (lambda *_: 8, "1", 1000, True),
        (lambda *_: 8, "2", 1000, False),
        (lambda *_: 8, "2", 0, True),
        (lambda *_: -1, "0", 0, False),  # as in a container
        (None, "0", 0, False),
    ],
)
def test_memory_that_the_system_forbids_is_counted_on_by_no_plan(
    reader, scope, user, allowed, monkeypatch, tmp_path
):
    (tmp_path / "scope").write_text(scope)
    monkeypatch.setattr(attach, "YAMA", tmp_path / "scope")
    monkeypatch.setattr(attach, "_reader", lambda: reader)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert attach.is_allowed() is allowed
