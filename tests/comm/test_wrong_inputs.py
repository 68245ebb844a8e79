"""Wrong arguments fail at once, where torch.distributed refuses them, with the value and why."""

from __future__ import annotations

import functools

import pytest
import torch

from hires import comm
from hires.core.errors import CommError
from tests.helpers.ranks import run_ranks
from tests.helpers.wrong_calls import CALLS, wrong_calls

pytestmark = pytest.mark.dist

TEXTS = {
    "root is no rank": "rank 7 is not among ranks [0, 1, 2]",
    "root is not in the group": "rank 2 is not among ranks [0, 1]",
    "target is no rank": "rank 9 is not among ranks [0, 1, 2]; name one of these",
    "sender is not named": "rank None is no rank; name one of [0, 1, 2]",
    "no tensor": "[1] is no tensor; give a torch.Tensor",
    "no list": "is no list; give a list of one tensor for each rank",
    "no group": "[0, 1] is no group; make one with hires.comm.new_group",
    "target is this rank": "rank 1 is this rank; copy the tensor",
    "negative tag": "tag -1 is not among those of users, 0 to 2147482623",
    "too few outputs": "1 tensors for the 3 ranks [0, 1, 2]",
    "outputs of another type": "tensors of torch.int32 and torch.float32",
    "output too small": "a tensor of 20 bytes in the place of 72",
    "output of another type": "tensors of torch.float64 and torch.float32",
    "input too small": "a tensor of 24 bytes in the place of 60",
    "too few inputs": "1 tensors for the 3 ranks",
    "nothing to scatter": "0 tensors for the 3 ranks",
    "another rank scatters": "rank 1 gives 3 tensors, and only rank 2 may",
    "nowhere to gather": "0 tensors for the 3 ranks",
    "another rank gathers": "rank 1 gives 3 tensors, and only rank 2 may",
    "too few to exchange": "1 tensors for the 3 ranks",
    "rows do not divide": "4 rows cannot be divided among 3 ranks",
    "sizes do not add up": "split sizes [1, 1, 1] do not divide 4 rows",
    "output smaller than input": "a tensor of 12 bytes in the place of 24",
    "rows of other widths": "rows of 1 numbers and of 2; give rows of one size",
    "unknown reduction": "unknown reduction 'sum'; choose one of SUM, PRODUCT",
    "bits of floats": "BAND of torch.float32 is not defined",
    "no memory": "a tensor on meta has no memory",
    "rank twice": "ranks [0, 0]",
    "rank beyond": "ranks [0, 5]",
}
TAKEN_BY_TORCH = ("no memory", "target is no rank", "sender is not named")


@functools.cache
def raised() -> dict[str, tuple[str, str]]:
    """Returns what the second of three ranks got; one world makes all calls."""
    return run_ranks(wrong_calls, 3)[1]


@pytest.mark.parametrize("tag", [-1, 2**31 - 1024, 2**31 - 1, None])
def test_tags_of_messages_of_hires_itself_are_refused(tag: int | None):
    one, post = torch.zeros(1), comm.P2POp(comm.isend, torch.zeros(1), 1, tag=tag)
    for call in (
        lambda: comm.send(one, 1, tag=tag),
        lambda: comm.irecv(one, 1, tag=tag),
        lambda: comm.batch_isend_irecv([post]),
    ):
        with pytest.raises(CommError, match=r"under 2147482624 to 2147483647|no whole number"):
            call()


def test_rank_that_has_not_begun_does_not_go_on_alone():
    total = torch.ones(3)
    for call in (
        lambda: comm.all_reduce(total),
        lambda: comm.all_reduce(total, async_op=True),
        lambda: comm.broadcast(total, 0),
        comm.barrier,
        lambda: comm.all_gather([total], total),
        lambda: comm.send(total, 1),
        lambda: comm.max_all(1),
        comm.new_group,
    ):
        with pytest.raises(comm.CommError, match=r"call hires\.comm\.init first"):
            call()
    [alone] = comm.make_groups([[0]]).values()  # a plan's, of one process
    comm.all_reduce(total, group=alone)
    assert repr(alone) == "Group(ranks [0], position 0, no backend)"


@pytest.mark.parametrize("name", CALLS)
def test_wrong_argument_is_named(name: str):
    ours, theirs = raised()[name]
    assert ours.startswith("CommError: ")
    assert TEXTS[name] in ours
    assert theirs or name in TAKEN_BY_TORCH
