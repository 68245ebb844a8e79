"""Training loops of a user's on ranks: a module on tiles beside the plain one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hires
from hires import comm
from hires.core.config.model_config import ModelConfig
from hires.core.errors import ConfigError
from hires.core.ranks.world import World
from hires.engine import sharding
from hires.engine.device import RankDevice
from hires.nets.build_network import build_model, materialise


class Whole(nn.Module):
    """Has an operator between its convolutions that tiles compute whole, and norms."""

    def __init__(self, of_batch: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6) if of_batch else nn.GroupNorm(3, 6)
        self.second, self.groups = nn.Conv2d(6, 4, 5, padding=2), nn.GroupNorm(2, 4)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cumsum(torch.relu(self.norm(self.first(x))), 2) / x.shape[2]
        return self.groups(self.second(y)) * self.scale


class Noted(Tensor):
    """A tensor of another library's, which has operators of its own."""

    def new_empty(self, *sizes: Any, **more: Any) -> Tensor:
        raise TypeError("an operator of another library's")


def network(name: str, seed: int = 1) -> nn.Module:
    """Returns a module of float64 that is the same on every rank."""
    torch.manual_seed(seed)
    if name in ("whole", "of samples"):
        return Whole(name == "whole").double()
    sizes: dict[str, Any] = {
        "unet": {"levels": 2, "width": 4},
        "resnet": {"depth": 18},
        "preact_resnet": {"depth": 11},
    }[name]
    model = build_model(ModelConfig(name=name, classes=5, **sizes), seed, (32, 32))
    materialise(model, [*model.state_dict()], seed)
    return model.double()


@contextlib.contextmanager
def torch_world(world: World) -> Iterator[None]:
    """Makes torch's default group, as torchrun's scripts do."""
    place = f"tcp://{world.address}:{world.port}"
    dist.init_process_group("gloo", init_method=place, rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        comm.shutdown()
        dist.destroy_process_group()


def train_beside_plain(world: World, case: dict[str, Any]) -> dict[str, float]:
    """Returns the largest differences from the plain module over some steps of AdamW.

    ``case``: ``net``, ``image``, ``mesh`` (sizes of replicas, then of the tiles), ``gather``,
    ``windows`` (whether ranks get their window only), ``autocast``, ``frozen`` (how many of the
    first parameters are), ``noted`` (images are of a subclass).
    """
    replicas, *grid = case["mesh"]
    names = ("dp", "rows", "cols")[: 1 + len(grid)]
    with torch_world(world):
        mesh = init_device_mesh("cpu", (replicas, *grid), mesh_dim_names=names)
        tiles = mesh[names[1:]] if len(grid) > 1 else mesh["rows"]
        plain = network(case["net"])
        low = case.get("autocast")
        dtype = torch.float64 if low is None else torch.float32
        plain = plain.to(dtype)
        for parameter in [*plain.parameters()][: case.get("frozen", 0)]:
            parameter.requires_grad_(False)
        model: nn.Module = copy.deepcopy(plain)
        example = torch.empty(2, 3, *case["image"], dtype=dtype)
        sharded = hires.shard(model, tiles, example=example, gather=case.get("gather", "full"))
        model = sharded
        if replicas > 1:
            model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        # A bias before a norm has a gradient of 0, which rounding makes 1e-17, and Adam divides by
        # the size of gradients: with the usual eps it would step by the rounding alone.
        ours, theirs = (
            torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-3) for m in (model, plain)
        )
        found = {"output": 0.0, "gradient": 0.0, "parameter": 0.0, "norm": 0.0}
        own = world.rank // tiles.size()
        generator = torch.Generator().manual_seed(7)
        for _ in range(3):
            for optimizer in (ours, theirs):
                optimizer.zero_grad()
            images = torch.randn(2 * replicas, 3, *case["image"], generator=generator).to(dtype)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low is not None):
                wanted = _of_replicas(plain, images, replicas)
                given = images[2 * own : 2 * own + 2]
                if case.get("windows"):
                    given = given[(..., *hires.window(images.shape, tiles))]
                made = model(given.as_subclass(Noted) if case.get("noted") else given)
                assert type(made) is Tensor
                target = torch.randn(wanted.shape, generator=generator).to(wanted.dtype)
                functional.mse_loss(wanted.double(), target.double()).backward()
                mine = _loss(made, target[2 * own : 2 * own + 2], wanted, sharded, tiles)
            mine.backward()
            part = wanted[2 * own : 2 * own + 2]
            part = part[_rect(part, made, tiles)]
            found["output"] = max(found["output"], _largest(made - part))
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None) == (not a.requires_grad)
                if a.grad is not None and b.grad is not None:
                    found["gradient"] = max(found["gradient"], _largest(a.grad - b.grad))
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, plain)]
            found["norm"] = max(found["norm"], abs(float(norms[0] - norms[1])))
            for optimizer in (ours, theirs):
                optimizer.step()
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                found["parameter"] = max(found["parameter"], _largest(a - b))
        states = [sharded.state_dict(), plain.state_dict()]
        assert [*states[0]] == [*states[1]]
        if own == 0:  # DDP takes those of the first replica at each call
            pairs = zip(states[0].values(), states[1].values(), strict=True)
            found["state"] = max(_largest(a.double() - b.double()) for a, b in pairs)
        sharded.eval(), plain.eval()
        found["evaluated"] = 0.0
        if own == 0 and low is None:
            with torch.no_grad():
                bigger = torch.randn(1, 3, 40, 37, generator=generator).to(dtype)
                wanted, made = plain(bigger), sharded(bigger)
                wanted = wanted[_rect(wanted, made, tiles)]
                found["evaluated"] = _largest(made - wanted)
    return found


def two_default_groups(world: World, folder: str) -> list[float]:
    """Returns the largest differences from the plain module in two default groups of torch.

    In the second one the ranks have each other's numbers.
    """
    found, model = [], network("unet").eval()
    for turn, rank in enumerate((world.rank, world.size - 1 - world.rank)):
        place = f"file://{folder}/{turn}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world.size)
        images = torch.randn(1, 3, 20, 24, dtype=torch.float64)
        mesh = init_device_mesh("cpu", (world.size,))
        with torch.no_grad():
            made = hires.shard(copy.deepcopy(model), mesh, example=images)(images)
            found.append(_largest(made - model(images)))
        dist.destroy_process_group()
    comm.shutdown()
    return found


def _of_replicas(plain: nn.Module, images: Tensor, replicas: int) -> Tensor:
    """Returns the outputs of all replicas; norms are of a replica, and keep the first one's values.

    As under DDP, where each replica begins a call with the buffers of the first.
    """
    before = [buffer.clone() for buffer in plain.buffers()]
    parts = []
    for part in reversed(images.chunk(replicas)):
        for buffer, value in zip(plain.buffers(), before, strict=True):
            buffer.data.copy_(value)  # no change that autograd sees
        parts.append(plain(part))
    return torch.cat(parts[::-1])


def _loss(made: Tensor, target: Tensor, wanted: Tensor, model: Any, tiles: Any) -> Tensor:
    # The mean over all, or this rank's share of it.
    part = target[_rect(target, made, tiles)]
    error = functional.mse_loss(made.double(), part.double(), reduction="sum")
    return error / target.numel()


def _rect(whole: Tensor, made: Tensor, tiles: Any) -> Any:
    # Rows and columns of a whole map that an output holds.
    if made.shape[2:] == whole.shape[2:]:
        return (...,)
    return (..., *hires.window(whole.shape, tiles))


def _largest(difference: Tensor) -> float:
    return float(difference.detach().abs().max()) if difference.numel() else 0.0


def several_calls(world: World, order: str, freezes: bool) -> float:
    """Returns the largest difference of gradients and states after two calls before any backward.

    ``order`` of the backward passes: ``joint``, ``same`` or ``reverse``.
    """
    with torch_world(world):
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tiles",))
        plain = network("whole")
        plain.first.requires_grad_(not freezes)
        ours, generator = copy.deepcopy(plain), torch.Generator().manual_seed(3)
        first, second = (torch.randn(2, 3, 17, 12, generator=generator).double() for _ in range(2))
        for net in (hires.shard(ours, mesh, example=first), plain):
            made = [net(first), net(second)]
            if order == "joint":
                (made[0] * made[1]).mean().backward()
            for one in made[:: -1 if order == "reverse" else 1] if order != "joint" else ():
                one.square().mean().backward()
        pairs = [*zip(ours.parameters(), plain.parameters(), strict=True)]
        assert all((a.grad is None) == (b.grad is None) for a, b in pairs)
        grads = [a.grad - b.grad for a, b in pairs if a.grad is not None and b.grad is not None]
        states = zip(ours.state_dict().values(), plain.state_dict().values(), strict=True)
        return max(map(_largest, [*grads, *(a.double() - b.double() for a, b in states)]))


def several_meshes(world: World) -> list[float]:
    """Returns the largest differences of modules on tiles of three meshes, under way at once.

    They are of gradients; the last one is of the losses of an engine in the same process.
    """
    with torch_world(world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))
        images = torch.randn(2, 3, 17, 12, generator=torch.Generator().manual_seed(3)).double()
        plain = [network("whole", seed) for seed in (1, 2, 3)]
        parts = mesh["rows"], mesh["cols"], mesh
        ours = [
            hires.shard(copy.deepcopy(net), part, example=images)
            for net, part in zip(plain, parts, strict=True)
        ]
        for nets in (ours, plain):
            made = [net(images) for net in nets]
            for output in reversed(made):
                output.square().mean().backward()
        config = {"image": [18, 16], "batch": 4, "parallel": {"tiles": [2, 2]}}
        engine = hires.Engine(network("of samples"), {**config, "optimizer": {"lr": 0.1}})
        losses = [engine.step(*batch) for batch in batches()]
        wanted, _ = plain_steps()
        found = [_largest(ours[0](images) - plain[0](images))]
        for one, other in zip(ours, plain, strict=True):
            pairs = zip(one.parameters(), other.parameters(), strict=True)
            found += [_largest(a.grad - b.grad) for a, b in pairs]  # type: ignore[operator]
        made = [{**one.num_groups} for _, one in sharding._worlds.values()]
        with patch.object(sharding, "MOST_PLANS", 1):  # images of many sizes fill no memory
            for sized in (images[:, :, :11], images):
                found.append(_largest(ours[0](sized) - plain[0](sized)))
                assert len(ours[0]._calls) == 1
        assert made == [{**one.num_groups} for _, one in sharding._worlds.values()]
        return [*found, max(abs(a - b) for a, b in zip(losses, wanted, strict=True))]


def answers(calls: dict[str, Callable[[], object]]) -> list[tuple[str, str]]:
    """Returns beside the words that the errors of wrong calls should have what they say."""
    texts = []
    for words, call in calls.items():
        try:
            texts.append((words, f"nothing: {call()!r:.80}"))
        except ConfigError as error:
            texts.append((words, str(error)))
    return texts


class Values(nn.Module):
    """A network whose control flow depends on the values of tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.mean() > 0 else -x


def refusals(world: World) -> list[tuple[str, str]]:
    images = torch.zeros(2, 3, 16, 16, dtype=torch.float64)
    with torch_world(world):
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tiles",))
        deep = init_device_mesh("cpu", (world.size, 1, 1))
        net = network("whole")
        model = hires.shard(net, mesh, example=images)

        def shard(module: nn.Module, mesh: Any = mesh, **keys: Any) -> Any:
            return hires.shard(module, mesh, **{"example": images, **keys})

        return answers({
            "gather='all' is unknown; choose one of full, local": lambda: shard(net, gather="all"),
            "are not the 2 ranks of the mesh": lambda: shard(net, tiles=[2, 2]),
            "slice it, as mesh['tiles']": lambda: shard(net, deep),
            "the mesh is None, no device mesh": lambda: shard(net, None),
            "use (n, C, H, W)": lambda: shard(net, example=images[0]),
            "its control flow depends on the values": lambda: shard(Values()),
            "use at most 1, or a larger image": lambda: shard(net, example=images[:, :, :1]),
            "use images.detach()": lambda: model(images.clone().requires_grad_()),
            "nor this rank's window, 8x16": lambda: model(images[:, :, :5], size=(16, 16)),
            "use float32": lambda: model(images.long()),
            "images of type DTensor": lambda: model(DTensor.from_local(images, mesh)),
        })  # fmt: skip


def batches() -> list[tuple[Tensor, Tensor]]:
    images = torch.randn(3, 4, 3, 18, 16, generator=torch.Generator().manual_seed(5)).double()
    labels = torch.randint(0, 4, (3, 4, 18, 16), generator=torch.Generator().manual_seed(6))
    return [*zip(images, labels, strict=True)]


def steps_of_an_engine(world: World, parallel: dict[str, Any]) -> Any:
    """Returns the losses of three steps in a layout, and the parameters of this rank after them."""
    config = {"image": [18, 16], "batch": 4, "parallel": parallel, "optimizer": {"lr": 0.1}}
    with torch_world(world):
        engine = hires.Engine(network("of samples"), config)
        losses = [engine.step(images.as_subclass(Noted), labels) for images, labels in batches()]
        own = {name: one.detach().numpy().copy() for name, one in engine.parameters.items()}
    return losses, own


def plain_steps() -> Any:
    """Returns the same of plain torch, with momentum and weight decay as hires has by default."""
    model = network("of samples")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    losses = []
    for images, labels in batches():
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: one.detach().numpy() for name, one in model.named_parameters()}


def wrong_engines(world: World) -> list[tuple[str, str]]:
    """Returns what wrong calls of an engine are answered with."""
    good = {"image": [18, 16], "batch": 4, "parallel": {"stages": 2}}
    images = torch.zeros(4, 3, 18, 16, dtype=torch.float64)
    labels = torch.zeros(4, 18, 16, dtype=torch.int64)
    far, negative = labels.clone(), labels.clone()
    far[2, 3, 4], negative[1] = 5, -1

    def engine(**keys: Any) -> Any:
        return hires.Engine(network("of samples"), {**good, **keys})

    with torch_world(world):
        made, dice = engine(), engine(loss={"name": "dice"})
        return answers({
            "this layout has 3 ranks, and the world has 2": lambda: engine(
                parallel={"replicas": 3}, batch=6
            ),
            "needs the keys image and batch": lambda: hires.Engine(network("of samples"), {}),
            "hires.Engine takes no key imagee; use image, batch": lambda: engine(imagee=3),
            "it takes channels and trusted": lambda: engine(model={"name": "unet"}),
            "loss=l1 compares images of 3": lambda: engine(loss={"name": "l1"}),
            "a batch of [2, 3, 18, 16] with 2 targets": lambda: made.step(images[:2], labels[:2]),
            "targets are a list; give a tensor": lambda: made.step(images, [0, 1, 2, 3]),
            # Dice and bce counted a label out of range as of no class.
            "label 5 of sample 2, row 3, column 4, is out of range": lambda: dice.step(images, far),
            "label -1 of sample 1": lambda: dice.step(images, negative),
            "a target of [4, 9, 16]": lambda: dice.step(images, labels[:, :9]),
            "give target.long()": lambda: dice.step(images, labels.double()),
            "nothing": lambda: engine(loss={"name": "dice", "ignore_index": 5}).step(images, far),
            "soft labels": lambda: dice.step(images, torch.zeros(4, 4, 18, 16).double()),
        })  # fmt: skip


def steps_on_images(world: World) -> Any:
    """Returns losses of a module that makes images of its input's size, beside those of torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)).double()
    plain = copy.deepcopy(model)
    images, target = torch.randn(2, 2, 3, 8, 6, dtype=torch.float64)
    keys = {"image": [8, 6], "batch": 2, "parallel": {"tiles": [2, 1]}, "loss": {"name": "l1"}}

    def set_arithmetic(device: RankDevice) -> None:  # as of a GPU, for all of the user's process
        torch.backends.cudnn.deterministic = True

    with torch_world(world), patch.object(RankDevice, "set_arithmetic", set_arithmetic):
        loss = hires.Engine(model, keys).step(images, target)
        assert not torch.backends.cudnn.deterministic
    return loss, float(functional.l1_loss(plain(images), target).detach())
