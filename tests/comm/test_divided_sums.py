"""Sums and gathers of parts: the same bits in the ranks' memory and in buffers, whatever parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hires import comm
from hires.comm.staging import Staging
from hires.comm.transport import Group, transport
from hires.core.errors import CommError, PeerError
from tests.helpers import comm_jobs
from tests.helpers.ranks import run_ranks


@pytest.mark.dist
def test_parts_are_summed_and_gathered_in_memory_and_in_buffers():
    for differences, error, memory in run_ranks(comm_jobs.divided_parts, 2):
        assert differences == []
        if memory:
            assert "rank 0 calls reduce_scatter_coalesced of 64 B float64 over cma" in error
            assert "rank 1 calls all_gather_coalesced of 32 B float64 over cma" in error


@pytest.mark.parametrize("fails", [False, True])
def test_buffer_of_the_host_is_free_after_the_operation(fails, monkeypatch: pytest.MonkeyPatch):
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    device = SimpleNamespace(Event=lambda: event)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    staging = Staging(())  # not even the host is reached
    monkeypatch.setitem(transport.stagings, "cma", staging)

    def double(parts: list[list[torch.Tensor]]) -> None:
        parts[0][0].mul_(2)
        if fails:
            raise PeerError("rank 1 has ended")

    group = Group([0, 1], 0, {}, peers=SimpleNamespace(reduce_parts=double))
    own = torch.ones(3)
    parts = [[own], [torch.ones(2)]]
    if fails:
        with pytest.raises(CommError, match="rank 1 has ended"):
            comm.reduce_scatter_coalesced(parts, group)
    else:
        comm.reduce_scatter_coalesced(parts, group)
    assert own.tolist() == [1.0 if fails else 2.0] * 3
    assert [len(pairs) for pairs in staging._free.values()] == [1]
