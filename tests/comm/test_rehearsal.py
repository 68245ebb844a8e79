"""Does a rehearsal give tensors of the shapes that real ranks would get, and leave nothing on?"""

from __future__ import annotations

import pytest
import torch

from hires import comm
from hires.comm import membership, runtime


def test_collectives_and_messages_have_the_shapes_of_a_real_world():
    received = []
    with comm.rehearsal(1, shared_memory=False) as silent:
        silent.on_receive = lambda tensor: received.append(tuple(tensor.shape))
        made = comm.make_groups([[0, 1, 2], [0, 2], [1]])
        assert sorted(made) == [0, 2]
        assert made[0].index == 1
        assert comm.all_gather(torch.zeros(2, 5), made[0]).shape == (3, 2, 5)
        large = torch.zeros(runtime.DIRECT_BYTES)
        assert comm.all_gather(large, made[0]).shape == (3, *large.shape)
        comm.all_reduce(large, made[0])
        buffer = torch.zeros(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
        comm.irecv(buffer, 0, tag=1).wait()
        comm.isend(buffer, 2, tag=1).wait()
        comm.barrier()
    assert received == [(10,), (10,), (1, 3, 4, 2)]  # a small gather goes point to point


def test_shared_memory_is_counted_by_what_is_touched():
    with comm.rehearsal(0, shared_memory=True) as silent:
        group = comm.make_groups([[0, 1]], 1)[0]
        if group.shared is None:
            pytest.skip("this machine has no shared memory for messages")
        for rows in (4, 16, 8):
            comm.all_gather(torch.zeros(rows), group)
        comm.isend(torch.zeros(10), 1, 0, group)
        comm.irecv(torch.zeros(10), 1, 0, group).wait()
    # Everything has two places; of a gather both ranks' are read.
    assert silent.shared_bytes() == 2 * (2 * 16 * 4) + 2 * 40 + 2 * 40


def test_backend_is_the_real_one_afterwards_even_after_an_error():
    with pytest.raises(ValueError, match="boom"), comm.rehearsal(0, shared_memory=False):
        raise ValueError("boom")
    assert membership.transport.backend is torch.distributed
