"""What no tensor takes of a GPU: NCCL's buffers follow from the plan's communicators."""

from __future__ import annotations

from hires.plan.gpu_memory import CONNECTION_BYTES, LOOPS, MESSAGE_LOOPS, nccl_bytes
from tests.helpers.small_plans import plan_of


def test_buffers_of_nccl_follow_from_the_communicators_of_a_rank():
    plan = plan_of(tiles=[2, 1], stages=2, spatial_stages=1)
    assert nccl_bytes(plan, 0) == 0  # gloo
    plan.backend = "nccl"
    # Rank 0: the sums of its tiles and of its stage's gradients with rank 1; halos from rank 1 and
    # gradients from rank 2.
    sums, messages = 2 * LOOPS, 2 * MESSAGE_LOOPS
    assert nccl_bytes(plan, 0) == (sums + messages) * CONNECTION_BYTES
    # Rank 2 alone holds stage 1, and gets values from rank 0.
    assert nccl_bytes(plan, 2) == MESSAGE_LOOPS * CONNECTION_BYTES
