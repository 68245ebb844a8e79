"""What loops do with a module of their own: on ranks that share its images beside plain torch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parameters_to_vector
from torch.utils import checkpoint

import hires
from hires.core.ranks.world import World
from tests.helpers.shard_jobs import answers, torch_world

IMAGES = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Flattening(nn.Module):
    """A network of tutorials: a view of a map behind a convolution, and a state of its own."""

    def __init__(self, image: tuple[int, int] = (8, 6), classes: int = 4) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head, self.note = nn.Linear(4 * image[0] * image[1], classes), 5
        self.views = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(x.view(x.size(0), -1) if self.views else x.flatten(1))

    def get_extra_state(self) -> int:
        return self.note

    def set_extra_state(self, state: int) -> None:
        self.note = state


def biased(classes: int = 10) -> nn.Module:
    """Returns a network with a bias before a norm, whose gradient is zero but for rounding."""
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), *head)


def network(**changes: Any) -> Flattening:
    """Returns a module of float64, the same on every rank."""
    torch.manual_seed(0)
    net = Flattening().double()
    net.conv.requires_grad_("frozen" not in changes)
    if "format" in changes:
        net, net.views = net.to(memory_format=changes["format"]), False
    if "turned" in changes:  # dense, but in an order of its own
        turned = net.conv.weight.detach().permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        net.conv.weight = nn.Parameter(turned)
    return net


def _lbfgs(net: nn.Module) -> Tensor:
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = net(IMAGES).square().mean()
        value.backward()
        return value

    optimizer.step(loss)
    return parameters_to_vector(net.parameters()).detach()


def _strides(net: nn.Module) -> list[Any]:
    net(IMAGES).sum().backward()
    return [(p.stride(), p.grad.stride() if p.grad is not None else ()) for p in net.parameters()]


def _state(net: nn.Module) -> Any:
    net.load_state_dict({**net.state_dict(), "_extra_state": 7})
    outer = nn.Sequential(net)
    outer.load_state_dict({**outer.state_dict(), "0._extra_state": outer[0].note + 2})
    return [*outer.state_dict()], outer[0].note


def _stored(net: nn.Module) -> Tensor:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    again: Tensor = torch.load(file, weights_only=False)(IMAGES)
    return again


def _compiled_loop(net: nn.Module) -> Tensor:
    made: Tensor = torch.compile(lambda x: (net(x) * 2).sum(), backend="eager")(IMAGES)
    return made


def _own_hooks(net: nn.Module) -> list[Any]:
    seen: list[Any] = []
    net.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape))
    net.register_forward_hook(lambda module, given, made: seen.append(made.shape))
    net.register_full_backward_hook(lambda module, inner, outer: seen.append(outer[0].shape))
    net(IMAGES).sum().backward()
    return seen


def _modes(net: Any) -> Tensor:
    # Between two steps one layer begins to learn, and the statistics of a norm stay.
    net(IMAGES).sum().backward()
    net.conv.requires_grad_(True)
    net(IMAGES).square().mean().backward()
    net.norm.eval()
    net(IMAGES).square().mean().backward()
    return torch.cat([*(p.grad.flatten() for p in net.parameters()), net.norm.running_mean])


UNCHANGED: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any]]] = {
    "strides, channels-last": (_strides, {"format": torch.channels_last}),
    "strides of an own order": (_strides, {"turned": True}),
    "LBFGS": (_lbfgs, {}),
    "state": (_state, {}),
    "a stored module": (_stored, {}),
    "torch.compile of the loop": (_compiled_loop, {}),
    "hooks of the whole module": (_own_hooks, {}),
    "layers that change their mode": (_modes, {"frozen": True}),
}
"""What a loop does with a module, and how the module is made."""


def unchanged(world: World) -> dict[str, tuple[Any, Any]]:
    """Returns what each use of a module on tiles, and of the plain one, comes to."""
    answers = {}
    with torch_world(world):
        mesh = init_device_mesh("cpu", (world.size,))
        for name, (use, changes) in UNCHANGED.items():
            plain = network(**changes)
            ours = hires.shard(copy.deepcopy(plain), mesh, example=IMAGES)
            answers[name] = _value(use(ours)), _value(use(plain))
    return answers


def _value(made: Any) -> Any:
    return made.detach().numpy() if isinstance(made, Tensor) else made


def _hook(net: Any, kind: str = "forward_hook") -> Any:
    getattr(net.conv, f"register_{kind}")(lambda *values: None)
    return net


def refused(world: World) -> list[tuple[str, str]]:
    """Returns the answers to uses that tiles cannot serve; after them a call still works."""
    with torch_world(world):
        mesh = init_device_mesh("cpu", (world.size,))

        def shard(net: nn.Module | None = None) -> Any:
            return hires.shard(network() if net is None else net, mesh, example=IMAGES)

        def hooked_later(kind: str) -> Any:
            net = network()
            ours = shard(net)
            ours(IMAGES)
            _hook(net, kind)
            return ours(IMAGES)

        def hooked_everywhere() -> Any:
            ours = shard()
            handle = nn.modules.module.register_module_forward_hook(lambda *values: None)
            try:
                return ours(IMAGES)
            finally:
                handle.remove()

        def second_derivative() -> Any:
            ours = shard()
            return torch.autograd.grad(ours(IMAGES).sum(), ours.conv.weight, create_graph=True)

        def functional() -> Any:
            ours = shard()
            values = {name: 2 * one for name, one in ours.named_parameters()}
            return torch.func.functional_call(ours, values, (IMAGES,))

        def two_types() -> Any:
            net = network()
            net.head.float()
            return shard(net)

        config = {"image": [8, 6], "batch": 2, "parallel": {"tiles": [2, 1]}}
        texts = answers({
            "conv has a hook (register_forward_hook)": lambda: hooked_later("forward_hook"),
            "conv has a hook (register_backward_hook)": lambda: hooked_later("full_backward_hook"),
            "register_module_forward_hook": hooked_everywhere,
            "conv has a hook": lambda: hires.Engine(_hook(network()), config),
            "torch.jit.trace": lambda: torch.jit.trace(shard(), IMAGES),
            "torch.func": lambda: torch.vmap(shard())(IMAGES[None]),
            "functional_call": functional,
            "create_graph": second_derivative,
            "torch.utils.checkpoint": lambda: (
                checkpoint.checkpoint(shard(), IMAGES, use_reentrant=False).sum().backward()
            ),
            "head": two_types,
            "module.plain": lambda: shard(shard()),
        })  # fmt: skip
        shard()(IMAGES).sum().backward()
    return texts
