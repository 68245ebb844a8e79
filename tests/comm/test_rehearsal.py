"""Does a rehearsal give tensors of the shapes that real ranks would get, and leave nothing on?"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hires import comm
from hires.comm import calls, staging
from hires.comm import transport as transport_module
from hires.comm.operation_routes import DIRECT_BYTES
from hires.comm.transport import Group, transport
from hires.core.ranks import call_records
from hires.plan.routes import Route


def test_collectives_and_messages_have_the_shapes_of_a_real_world():
    received = []
    with comm.rehearsal(1, shared_memory=False) as silent:
        silent.on_receive = lambda tensor: received.append(tuple(tensor.shape))
        made = comm.make_groups([[0, 1, 2], [0, 2], [1]])
        assert sorted(made) == [0, 2]
        assert made[0].index == 1
        assert comm.all_gather_stacked(torch.zeros(2, 5), made[0]).shape == (3, 2, 5)
        large = torch.zeros(DIRECT_BYTES)
        assert comm.all_gather_stacked(large, made[0]).shape == (3, *large.shape)
        comm.all_reduce(large, group=made[0])
        buffer = torch.zeros(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
        comm.post("recv", buffer, 0, 1).wait()
        comm.post("send", buffer, 2, 1).wait()
        comm.barrier()
    assert received == [(10,), (10,), (1, 3, 4, 2)]  # a small gather goes point to point


def test_shared_memory_is_counted_by_what_is_touched():
    with comm.rehearsal(0, shared_memory=True) as silent:
        group = comm.make_groups([[0, 1]], 1)[0]
        if group.shared is None:
            pytest.skip("this machine has no shared memory for messages")
        for rows in (4, 16, 8):
            comm.all_gather_stacked(torch.zeros(rows), group)
        mail = Route("shm", "mailbox")
        comm.post("send", torch.zeros(10), 1, 0, group, backend=mail)
        comm.post("recv", torch.zeros(10), 1, 0, group, backend=mail).wait()
    # Everything has two places; of a gather both ranks' are read.
    assert silent.shared_bytes() == 2 * (2 * 16 * 4) + 2 * 40 + 2 * 40


def test_ranks_that_may_not_read_each_other_sum_through_a_backend(monkeypatch):
    """Their pieces of the others' tensors were counted, and not the copy that they send."""
    sent = []
    for reads in (True, False):
        with comm.rehearsal(0, shared_memory=True, reads_peers=reads) as silent:
            monkeypatch.setattr(silent, "all_reduce", lambda *a, **k: sent.append(a[0].numel()))
            group = comm.make_groups([[0, 1]])[0]
            if group.shared is None:
                pytest.skip("this machine has no shared memory for messages")
            assert (group.peers is not None) == reads
            comm.all_reduce_coalesced([torch.zeros(4), torch.zeros(3)], group)
    assert sent == [7]


def test_backend_is_the_real_one_afterwards_even_after_an_error():
    with pytest.raises(ValueError, match="boom"), comm.rehearsal(0, shared_memory=False):
        raise ValueError("boom")
    assert not transport.backends


def test_sizes_and_tags_without_end_take_bounded_memory_and_keep_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
):
    """A program whose sizes vary for ever kept an entry of each; so did one whose tags do."""
    for module in (calls, transport_module):
        monkeypatch.setattr(module, "MOST_CALLS", 8)
    monkeypatch.setattr(call_records, "MOST_CHANNELS", 20)
    with comm.rehearsal(0, shared_memory=False):
        world = transport.world = Group([0, 1], 0, {"null": None})
        ring = call_records.CallRing(())
        transport.check = SimpleNamespace(ring=ring, note=ring.note)
        for size in range(1, 50):
            comm.all_reduce(torch.zeros(size))
            assert len(world.calls) <= 8
        for tag in [*range(100), 3]:
            comm.send(torch.zeros(1), 1, tag=tag)
        [sends] = [call for call in world.calls.values() if call.peer == 1]
        assert len(sends.channels) <= 8
        record = ring.record(0)
    assert record.channels["all ranks over null"] == [49, [0, 1]]
    # Tag 3 goes on where it was; further tags than are counted are no calls of the record.
    assert record.channels["messages 0 to 1, tag 3, in all ranks over null"] == [2, [0, 1]]
    assert len([name for name in record.channels if name.startswith("messages")]) == 20


def test_buffers_of_the_host_are_kept_for_some_sizes_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staging, "MOST_SIZES", 3)
    waited = []
    kept = staging.Staging(("cpu",))
    for size in range(1, 10):
        event = SimpleNamespace(synchronize=lambda size=size: waited.append(size))
        kept.give_back(kept.take(torch.float32, size), event)
    assert len(kept._free) == 3
    assert waited == [1, 2, 3, 4, 5, 6]  # the device may still read what goes
