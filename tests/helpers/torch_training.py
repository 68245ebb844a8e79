"""What scripts train with torch.distributed: DDP, FSDP2, DTensor, functional collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.ranks import error_of
from tests.helpers.torch_comparison import numbers, ranks, same, script, state


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.Flatten(),
        nn.Linear(8 * 9, 4),
    ).to(dtype)


def train(model: nn.Module, steps: int = 3, sync_every: int = 1) -> dict[str, Tensor]:
    """Returns the parameters and buffers after some steps on the images of this rank."""
    rank, _ = ranks()
    images = torch.Generator().manual_seed(50 + rank)
    dtype = next(model.parameters()).dtype
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        batch = torch.randn(4, 3, 8, 8, generator=images, dtype=torch.float64).to(dtype)
        if (step + 1) % sync_every:
            with model.no_sync():
                model(batch).pow(2).mean().backward()
            continue
        model(batch).pow(2).mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def ddp(group: Any, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(network(), process_group=group, bucket_cap_mb=1e-3, **options)


@script
def ddp_buckets(gloo: Any) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        same(train(ddp(None, **options)), train(ddp(gloo, **options)))


@script
def ddp_accumulation(gloo: Any) -> None:
    same(train(ddp(None), 4, 2), train(ddp(gloo), 4, 2))


@script
def ddp_codes(gloo: Any) -> None:
    from hires import comm

    exact = train(ddp(gloo))
    for codec, most in {"bf16": 1e-3, "int8": 1e-2, "topk": 1.0}.items():
        model = ddp(None)
        comm.compress(model, codec)
        found = train(model)
        moved = [abs(found[name] - exact[name]).max() for name in exact if "running" not in name]
        assert 0 < float(max(moved)) < most, codec
        for name, value in model.named_parameters():  # the copies stay equal
            others = [torch.empty_like(value.data) for _ in range(ranks()[1])]
            dist.all_gather(others, value.data)
            assert all(torch.equal(other, value.data) for other in others), name
    text = error_of(lambda: comm.compress(ddp(gloo), "bf16"))
    assert "send through hires, not gloo" in text


@script
def sharded_optimiser(gloo: Any) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def run(group: Any) -> dict[str, Tensor]:
        model = ddp(group)
        optimiser = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=group or dist.group.WORLD, lr=0.01
        )
        torch.manual_seed(9 + ranks()[0])
        for _ in range(2):
            model(torch.randn(4, 3, 8, 8, dtype=torch.float64)).sum().backward()
            optimiser.step()
            optimiser.zero_grad()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    same(run(None), run(gloo))


def mesh_of(group: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group or dist.group.WORLD, "cpu")


@script
def fsdp(gloo: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def run(group: Any, policy: Any) -> list[Tensor]:
        model = network(torch.float32)
        model[1] = nn.Identity()  # buffers of its own on each rank
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh_of(group), mp_policy=policy)
        fully_shard(model, mesh=mesh_of(group), mp_policy=policy)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        torch.manual_seed(7 + ranks()[0])
        for _ in range(2):
            model(torch.randn(4, 3, 8, 8)).float().pow(2).mean().backward()
            optimiser.step()
            optimiser.zero_grad()
        return [parameter.full_tensor().detach() for parameter in model.parameters()]

    halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy in (MixedPrecisionPolicy(), halves):
        if state.exact or policy is not halves:
            same(run(None, policy), run(gloo, policy))
        else:
            run(None, policy)


@script
def dtensor(gloo: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch.manual_seed(2)
    a, b = numbers(6, 5), numbers(5, 7)

    def run(group: Any) -> list[Tensor]:
        mesh = mesh_of(group)
        rows = distribute_tensor(a, mesh, [Shard(0)])
        columns = distribute_tensor(b, mesh, [Shard(1)])
        inner = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
        results = [
            (rows @ distribute_tensor(b, mesh, [Replicate()])).full_tensor(),
            (distribute_tensor(a, mesh, [Replicate()]) @ columns).full_tensor(),
            inner.redistribute(mesh, [Replicate()]).to_local(),
            inner.redistribute(mesh, [Shard(1)]).to_local(),
            rows.redistribute(mesh, [Shard(1)]).to_local(),
        ]
        x = DTensor.from_local(a.clone().requires_grad_(), mesh, [Replicate()])
        (x.redistribute(mesh, [Shard(0)]) @ b_of(mesh)).sum().backward()
        return results

    def b_of(mesh: Any) -> Any:
        return distribute_tensor(b, mesh, [Replicate()])

    ours, theirs = run(None), run(gloo)
    same(ours, theirs)
    torch.testing.assert_close(ours[0], a @ b)
    torch.testing.assert_close(ours[2], a @ b)


@script
def functional_collectives(gloo: Any) -> None:
    import torch.distributed._functional_collectives as functional

    _, size = ranks()
    x = numbers(2 * size, 3)

    def run(group: Any) -> list[Tensor]:
        among = group or dist.group.WORLD
        return [
            functional.all_reduce(x, "sum", among),
            functional.all_gather_tensor(x, 0, among),
            functional.reduce_scatter_tensor(x, "sum", 0, among),
            functional.broadcast(x, 0, among),
            functional.all_to_all_single(x, None, None, among),
            *functional.all_reduce_coalesced([x, x + 1], "sum", among),
            *functional.all_gather_into_tensor_coalesced([x, x + 1], among),
            *functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], among),
        ]

    same([one + 0 for one in run(None)], [one + 0 for one in run(gloo)])
    from torch.distributed.nn.functional import all_reduce

    leaf = x.clone().requires_grad_()
    all_reduce(leaf).sum().backward()
    same(leaf.grad, torch.full_like(x, size))
