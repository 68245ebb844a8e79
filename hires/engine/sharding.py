r"""Runs a module of the user's on tiles of its images, in a training loop of the user's.

    mesh   tiles of one image ---->
           rank 0   rank 1             out = model(image)     halos and statistics travel
    dp     rank 2   rank 3             loss.backward()        gradients are summed over the tiles,
    |                                                         then (DDP) over the replicas
    v

The parameters stay those of the module: one autograd function takes them all, runs the plan of the
tiles, and returns their gradients when all tiles have theirs. So whatever hooks on parameters do
(DDP, clipping, a gradient scaler) sees gradients of whole images.

    forward    parameters ----\
               window of x ----> [ the plan's forward pass, with a graph of its own ] --> output
    backward   gradients <----- [ its backward pass, then one sum over the tiles ]  <-- gradient
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hires import comm
from hires.comm import CommWorld
from hires.comm.backends import rendezvous
from hires.comm.backends.rendezvous import WorldMeeting
from hires.comm.torch_world import meeting_at
from hires.core.config.precision_config import HALF, PRECISIONS
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError
from hires.engine.tiled_pass import TiledPass
from hires.nets.refusals import refuse_hooks
from hires.nets.trace import trace
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.routes import MEMORY
from hires.plan.tiling import own_rect
from hires.plan.traffic import backends_of_plan

GATHERS = ("full", "local")
MOST_PLANS = 32
"""Of one module, for the sizes and modes of its last calls."""
_NAMES = {getattr(torch, PRECISIONS[name]): name for name in ("fp64", "fp32", *HALF)}
"""Precisions of the types of tensors."""
_worlds: dict[tuple[int, ...], tuple[Any, CommWorld]] = {}
"""Ranks that share images -> torch's default group, whose ranks they are, and their own world."""


def window(
    shape: Sequence[int], mesh: Any, tiles: Sequence[int] | None = None
) -> tuple[slice, slice]:
    """Returns the rows and columns of an image that this rank should read.

    Args:
        shape: of the image; its last two numbers are rows and columns.
        mesh: the device mesh of the tiles, as for :func:`shard`.
        tiles: [rows, cols] of the grid, as for :func:`shard`.

    Raises:
        ConfigError: the mesh and the grid do not fit each other.
    """
    place = _Tiles(mesh, tiles)
    r0, r1, c0, c1 = own_rect([*shape[-2:]], place.grid, place.index)
    return slice(r0, r1), slice(c0, c1)


def shard(
    model: nn.Module,
    mesh: Any,
    *,
    example: Tensor,
    gather: str = "full",
    tiles: Sequence[int] | None = None,
) -> ShardedModule:
    """Returns a module that computes ``model`` on tiles of its images; all ranks call it together.

    It has the parameters, buffers and names of ``model``, and takes its place: in optimisers, DDP,
    checkpoints. Called with a whole image, (n, C, H, W), each rank computes on its window of it;
    called with a rank's own window (:func:`window`), no rank holds the image. Parameters must be
    equal on all ranks of the mesh, and stay so: gradients are.

    Args:
        model: takes images, (n, C, H, W), and returns one tensor.
        mesh: the ranks that share an image: a device mesh of one dim (bands of rows), or of two
            (rows and columns of a grid).
        example: images of the usual size, (n, C, H, W); only their shape and type count.
        gather: what a map of an image becomes: ``full`` (whole on each rank, for a loss of all of
            it) or ``local`` (the rank's own rows and columns, for a loss that is a sum over ranks).
            Outputs without rows and columns are whole on each rank.
        tiles: [rows, cols] of the grid, if it does not follow from the mesh.

    Raises:
        ConfigError: the module cannot run on these tiles; it names the operator and a remedy.
    """
    if gather not in GATHERS:
        raise ConfigError(f"gather={gather!r} is unknown; choose one of {', '.join(GATHERS)}")
    place = _Tiles(mesh, tiles)
    refuse_hooks(model)
    example = _images("example", example)
    made = ShardedModule(model, place, gather, (example.shape[2], example.shape[3]))
    made.prepare(example)
    return made


class _Tiles:
    """The ranks that share an image, and the place of this one."""

    def __init__(self, mesh: Any, tiles: Sequence[int] | None) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise ConfigError(
                f"the mesh is {mesh!r:.80}, no device mesh of torch, whose ranks share an image; "
                f'give one, as init_device_mesh("cpu", (4,)), in a script that torchrun starts'
            )
        sizes = [*mesh.mesh.shape]
        if len(sizes) > 2:
            raise ConfigError(
                f"a mesh of {len(sizes)} dims is no grid of tiles; slice it, as mesh['tiles']"
            )
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self.grid = [*map(int, tiles)] if tiles is not None else [sizes[0], *(sizes[1:] or [1])]
        if len(self.grid) != 2 or self.grid[0] * self.grid[1] != len(self.ranks):
            raise ConfigError(
                f"tiles={self.grid} are not the {len(self.ranks)} ranks of the mesh; use "
                f"tiles=[{len(self.ranks)},1], or another mesh"
            )
        own = dist.get_rank()
        if own not in self.ranks:
            raise ConfigError(f"rank {own} is none of the mesh's {self.ranks}; slice the mesh")
        self.index = self.ranks.index(own)
        self._meeting: WorldMeeting | None = None

    def share_memory(self) -> bool:
        """Whether plans may send through memory; all ranks call it together."""
        joined = self._joined()
        if joined is not None:
            return not {*MEMORY}.isdisjoint(joined.backends)
        if self._meeting is None:
            store: Any = dist.distributed_c10d._get_default_store()
            words, size = f"tiles {self.ranks}", len(self.ranks)
            own = rendezvous.part(store, f"hires {words}")
            self._meeting = meeting_at(own, self.index, size, words)
        return self._meeting.world.local_size == self._meeting.world.size

    def join(self, plan: Plan) -> CommWorld:
        """Returns the world of the tiles, in which ranks count as tiles do; joins it if need be."""
        if (joined := self._joined()) is not None:
            return joined
        assert self._meeting is not None
        world = comm.join_world(backends_of_plan(plan), self._meeting)
        self._meeting = None
        _worlds[tuple(self.ranks)] = dist.group.WORLD, world
        return world

    def _joined(self) -> CommWorld | None:
        # The default world, if it has exactly these ranks, or that of tiles on the same mesh.
        default, size = comm.default_world(), len(self.ranks)
        if default.is_joined and size == dist.get_world_size() == default.all_ranks.size:
            return default
        group, world = _worlds.get(tuple(self.ranks), (None, None))
        if world is None or not world.is_joined:
            return None
        if group is not dist.group.WORLD:  # the script has begun another one, of other numbers
            comm.leave_world(world)
            return None
        return world


class ShardedModule(nn.Module):
    """A module on tiles: the user's own parameters and names, and a plan for each kind of input."""

    def __init__(self, plain: nn.Module, tiles: _Tiles, gather: str, size: tuple[int, int]) -> None:
        super().__init__()
        # Not as a submodule: names stay those of the plain module.
        self.__dict__["plain"] = plain
        self.__dict__["_calls"] = {}
        self._tiles, self.gather, self._size = tiles, gather, size
        self.training = plain.training
        self._parameters, self._buffers = plain._parameters, plain._buffers
        self._modules = plain._modules
        self._non_persistent_buffers_set = plain._non_persistent_buffers_set

    def train(self, mode: bool = True) -> ShardedModule:
        """Sets the mode of the module, as that of the plain one."""
        self.plain.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "plain" not in self.__dict__:
                raise
            return getattr(self.plain, name)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has: all but plans, which it makes again."""
        return {**self.__dict__, "_calls": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        """Returns a module with copies of the parameters, on the same tiles."""
        made = ShardedModule(copy.deepcopy(self.plain, memo), self._tiles, self.gather, self._size)
        memo[id(self)] = made
        return made

    def prepare(self, images: Tensor, size: Sequence[int] | None = None) -> None:
        """Plans for images like these, so that the first call need not; ConfigError: it cannot."""
        images = _images("images", images)
        self._call(self._whole_shape(images, size), images)

    def state_dict(self, *args: Any, **named: Any) -> Any:
        """Returns that of the plain module."""
        return self.plain.state_dict(*args, **named)

    def load_state_dict(self, *args: Any, **named: Any) -> Any:
        """Loads a state into the plain module."""
        return self.plain.load_state_dict(*args, **named)

    def _load_from_state_dict(self, *args: Any) -> None:  # of a module that holds this one
        self.plain._load_from_state_dict(*args)

    @torch.compiler.disable(reason="tiles exchange messages; export module.plain")  # type: ignore[no-untyped-call, untyped-decorator]
    def forward(self, images: Tensor, size: Sequence[int] | None = None) -> Tensor:
        """Returns what the plain module computes of images, (n, C, H, W).

        ``images`` are whole, or this rank's window: of images of the example's size, or of images
        of a ``size`` that is given, (rows, columns).
        """
        _refuse_transforms(self.plain)
        refuse_hooks(self.plain)
        images = _images("images", images)
        shape = self._whole_shape(images, size)
        call = self._call(shape, images)
        rect = own_rect([*shape[2:]], self._tiles.grid, self._tiles.index)
        if tuple(images.shape[2:]) == shape[2:]:
            images = images[:, :, rect[0] : rect[1], rect[2] : rect[3]]
        return call.call(images, self.gather == "full")

    def _whole_shape(self, images: Tensor, size: Sequence[int] | None) -> tuple[int, int, int, int]:
        n, channels, *given = images.shape
        if images.requires_grad:
            raise ConfigError(
                "images that need a gradient: tiles return none for them; use images.detach(), or "
                "shard the whole network"
            )
        whole = self._size if size is None else (int(size[0]), int(size[1]))
        r0, r1, c0, c1 = own_rect(whole, self._tiles.grid, self._tiles.index)
        if [*given] in ([*whole], [r1 - r0, c1 - c0]):
            return n, channels, *whole
        if size is not None:
            raise ConfigError(
                f"images of {given[0]}x{given[1]} are neither whole images of size={[*whole]} nor "
                f"this rank's window, {r1 - r0}x{c1 - c0}; see hires.window"
            )
        return n, channels, given[0], given[1]  # whole images of another size

    def _call(self, shape: tuple[int, ...], images: Tensor) -> TiledPass:
        kind, plain = images.device.type, self.plain
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        modes = tuple(module.training for module in plain.modules())
        learns = tuple(parameter.requires_grad for parameter in plain.parameters())
        key = shape, images.dtype, kind, self._trains, low, modes, learns
        call: TiledPass | None = self._calls.pop(key, None)
        # .to() or a file may have put other tensors in the place of those that it reads.
        if call is None or not call.is_of(plain):
            call = self._planned(shape, images, low)
        self._calls[key] = call  # the last one is the one used last
        if len(self._calls) > MOST_PLANS:
            del self._calls[next(iter(self._calls))]
        return call

    @property
    def _trains(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.plain.parameters())

    def _planned(
        self, shape: tuple[int, ...], images: Tensor, low: torch.dtype | None
    ) -> TiledPass:
        tiles = self._tiles
        config = _config(shape, images, low, self._trains, tiles.grid, tiles.share_memory())
        plan = make_plan(config, trace(self.plain, [*shape], None, images.dtype))
        if not plan.ok:
            raise ConfigError(f"hires.shard: {plan.errors}")
        world = tiles.join(plan)
        return TiledPass(plan, self.plain, tiles.index, images.device, low, world)


def _config(
    shape: Sequence[int],
    images: Tensor,
    low: torch.dtype | None,
    trains: bool,
    grid: Sequence[int],
    shared_memory: bool,
) -> RunConfig:
    """Returns the config of a run that computes what a module computes on tiles."""
    if images.dtype not in _NAMES:
        raise ConfigError(f"images of {images.dtype} are no numbers of a network; use float32")
    own = _NAMES[images.dtype]
    if low is None and trains and own not in ("fp32", "fp64"):
        raise ConfigError(
            f"tiles do not train weights of {own}; keep them in float32, under torch.autocast"
        )
    precision = {"name": own if low is None else _NAMES[low]}
    if low is not None and not trains:
        precision["weights"] = "fp32"
    return from_dict(
        {
            "image": [*shape[2:]],
            "batch": shape[0],
            "device": images.device.type,
            "task": {"name": "train" if trains else "infer"},
            "model": {"name": "custom", "target": "a:module", "channels": shape[1]},
            "parallel": {"tiles": [*grid]},
            "precision": precision,
            "engine": {"fuse": "off"},
            "loss": {"name": "cross_entropy"},
            "comm": {"log": "off", "shared_memory": shared_memory},
        }
    )


def _refuse_transforms(plain: nn.Module) -> None:
    owned = all(isinstance(one, nn.Parameter) for one in plain.parameters())
    active = {
        "torch.func.functional_call with tensors that are no nn.Parameter": not owned,
        "torch.jit.trace": torch.jit.is_tracing(),  # type: ignore[attr-defined, no-untyped-call]
        "torch.export": torch.compiler.is_exporting(),
        "torch.func": torch._C._functorch.peek_interpreter_stack() is not None,
    }
    for name in (name for name, applies in active.items() if applies):
        raise ConfigError(
            f"{name} cannot record or change a module on tiles, whose ranks exchange messages; "
            f"apply it to the plain module, which shares its parameters (module.plain)"
        )


def _images(name: str, images: Tensor) -> Tensor:
    images = plain_tensor(name, images)
    if images.dim() != 4:
        raise ConfigError(f"{name} of shape {[*images.shape]} are no images; use (n, C, H, W)")
    return images


def plain_tensor(name: str, tensor: object) -> Tensor:
    """Returns a tensor, or the same numbers without the subclass that it is of.

    A subclass, as loaders of other libraries return, may replace any operator. ConfigError, which
    calls it ``name``: it is none, or holds no numbers of its own, as ``DTensor``.
    """
    kind: Any = type(tensor)
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} are a {kind.__name__}; give a tensor")
    if kind is Tensor:
        return tensor
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ConfigError(
            f"{name} of type {kind.__name__} hold no numbers of their own; give a plain tensor, of "
            f"a DTensor its to_local() or full_tensor()"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)
