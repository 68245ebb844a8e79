"""What no tensor takes of a GPU: NCCL's buffers follow from the plan's communicators."""

from __future__ import annotations

from hires.core.config.run_config import from_dict
from hires.plan.gpu_memory import (
    CONNECTION_BYTES,
    CUBLAS_BYTES,
    LOOPS,
    MESSAGE_LOOPS,
    cublas_workspaces,
    nccl_bytes,
)
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


def test_hopper_keeps_more_for_products_and_a_variable_decides():
    def kept(**cluster):
        config = {"cluster": {"gpus": 1, **cluster}}
        [each] = cublas_workspaces(from_dict({"task": {"name": "infer"}, **config}))
        assert cublas_workspaces(from_dict(config)) == [each, each]  # and for the backward pass
        return each

    assert kept() == kept(gpu_capability=8.9) == CUBLAS_BYTES
    assert kept(gpu_capability=9.0) == kept(gpu_capability=12.0) == 32 * 2**20
    variable = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}
    assert kept(gpu_capability=9.0, environment=variable) == CUBLAS_BYTES
    assert kept(environment={"CUBLAS_WORKSPACE_CONFIG": ":16:8"}) == 128 * 2**10
