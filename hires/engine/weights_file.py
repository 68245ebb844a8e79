"""Reads the network's own weights from what ``weights=PATH`` names, tensor by tensor.

    rank 0        finds the file and compares its digest with the planned one -> path to all ranks
    each reader   tensors of its stages -> | piece | piece | ...   of at most PIECE_BYTES
                                               |       |
    others                                     v       v           tiles, replicas, direction up

Layers are found by their names, so any layout reads what any other, or plain torch, has written.

Every stage has one reader, the rank that also writes its checkpoints: replica 0, direction down,
tile 0. Ranks that hold two stages (GEMS) come to both in the order of the stages. So no file is
read twice, and a file that differs between nodes cannot make the holders differ. This is no message
of a step: the plan has no route of it, and the default backend carries it.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError, RunError
from hires.core.store import frozen
from hires.core.store.network_weights import COUNTER, WeightsPlace, find_weights, tensors_digest
from hires.engine.tensorfile import ContentsReader, TensorFile, pieces
from hires.parallel.context import Context
from hires.parallel.gradients import flat
from hires.plan.groups import gradient_group
from hires.plan.message_routes import group_route
from hires.plan.plan import Plan

PIECE_BYTES = 2**22
"""Tensors travel in pieces of this size: all memory that sharing adds."""
_NESTED = ("state_dict", "model")
"""Keys under which training scripts keep a state dict."""
_UNSAFE = re.compile("weights.only", re.IGNORECASE)
"""In every text in which torch says how to read a file by running its code."""
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class WeightsFile:
    """Tensors by name that lie in one pickle, or in safetensors files."""

    def __init__(self, place: WeightsPlace) -> None:
        self.place = place
        self._tensors = _unpickled(place) if place.is_pickle else {}
        checkpoint, self._parts = place.checkpoint, place.parts()
        self._reader = None if checkpoint is None else ContentsReader(checkpoint)
        self._file = None if place.is_pickle or self._reader else TensorFile(place.path)
        self._verified = {path.name for path in place.files if place.verified}
        in_file = set[str]() if self._file is None else self._file.names
        self._names = {*self._tensors, *self._parts, *in_file}

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shapes of all tensors."""
        if self.place.is_pickle:
            return {name: list(tensor.shape) for name, tensor in self._tensors.items()}
        return self.place.shapes()

    @property
    def dtypes(self) -> dict[str, str]:
        """The types of the tensors of a pickle, as torch names them."""
        return {n: str(t.dtype).removeprefix("torch.") for n, t in self._tensors.items()}

    def digest(self) -> str:
        """Returns 16 digits of the tensors, the same in whatever file they lie."""
        if not self.place.is_pickle:
            return self.place.digest()
        types = self.dtypes
        return tensors_digest(
            (name, types[name], list(one.shape), pieces(one)) for name, one in self._tensors.items()
        )

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor as it was written; RunError: its file is damaged."""
        if self._reader is None:
            return self._tensors[name] if self._file is None else self._file.tensor(name)
        made = []
        for part in self._parts[name]:
            if self.place.checkpoint is not None and part.file not in self._verified:
                self.place.checkpoint.verify([part.file])
                self._verified.add(part.file)
            made.append(self._reader.tensor(part))
        return made[0] if len(made) == 1 else torch.cat(made)

    @torch.no_grad()
    def fill_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills tensors of a network by their names, whatever their types; counters may be missing.

        RunError: one is missing, damaged, of another shape, or holds no fractions where the network
        has some.
        """
        for name, tensor in tensors.items():
            if name not in self._names and name.rpartition(".")[2] == COUNTER:
                continue
            if name not in self._names:
                raise RunError(f"{self.place.key} has no {name}; it has changed since the plan")
            held, dtype = self.tensor(name), tensor.dtype
            other = held.is_floating_point() != tensor.is_floating_point()
            # Wider numbers would overflow.
            other = other or (dtype in (torch.int8, torch.uint8) and held.dtype != dtype)
            if held.shape != tensor.shape or other:
                raise RunError(
                    f"{name} of {self.place.key} is {held.dtype} {list(held.shape)} and the "
                    f"network's {dtype} {list(tensor.shape)}; name the weights of this network"
                )
            tensor.copy_(held)


def open_weights(source: str) -> WeightsFile:
    """Returns what the path holds; ConfigError: no weights; RunError: a file is damaged."""
    return WeightsFile(find_weights(source))


def agreed_weights(config: RunConfig, run_dir: Path) -> WeightsFile | None:
    """Returns the weights of a run on all ranks, or None; all ranks call it together.

    RunError: they are not those with which the run was planned.
    """
    if config.weights is None:
        return None
    path, failure = "", None
    if comm.get_rank() == 0:
        try:
            place, planned = find_weights(config.weights), frozen.read(run_dir)
            if planned and planned.inputs.weights not in ("", WeightsFile(place).digest()):
                raise RunError(
                    f"{place.key} holds other numbers than when the run was planned; name a "
                    f"checkpoint or a file that stays, or start the run anew"
                )
            path = str(place.path)
        except HiresError as error:  # the other ranks wait for an answer in this case too
            failure = error
    path, problem = json.loads(comm.broadcast_text(json.dumps([path, failure and str(failure)])))
    if problem is not None:
        raise failure or RunError(problem)
    return WeightsFile(find_weights(path, verify=False))  # a rank compares the files that it reads


def reader_of(plan: Plan, stage: int) -> int:
    """Returns the rank of the world, a process, that reads and writes the files of a stage."""
    return plan.rank_of(0, 0, stage, 0) // plan.resident


def share_weights(context: Context, by_stage: Mapping[int, Sequence[Tensor]]) -> None:
    """Fills the tensors of the stages that this rank holds with those of each stage's reader.

    All ranks call it together, for all their stages, with tensors of equal shapes, types and
    strides in one order.
    """
    plan = context.plan
    for stage in sorted(by_stage):
        tensors = [tensor.detach() for tensor in by_stage[stage]]
        number = gradient_group(plan, stage)
        group = context.cursor.groups[number]
        for tensor in filter(torch.numel, tensors if group.size > 1 else ()):
            for piece in torch.split(flat(tensor).view(torch.uint8), PIECE_BYTES):
                route = group_route(plan, "broadcast", number, "uint8", len(piece))
                comm.broadcast(piece, reader_of(plan, stage), group, backend=route)


def _unpickled(place: WeightsPlace) -> dict[str, Tensor]:
    # Only torch's restricted unpickler sees the file, and tensors are mapped, not read: what the
    # file claims costs no memory before its shapes are compared with the network's.
    advice = "save the state dict alone, with safetensors or torch.save(model.state_dict(), ...)"
    if not zipfile.is_zipfile(place.path):
        raise ConfigError(f"{place.key} is no file of torch.save, or is truncated; {advice}")
    try:
        held: Any = torch.load(place.path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a hostile file makes the unpickler raise nearly anything
        raise ConfigError(
            f"{place.key} cannot be read without running code from it ({_why(error)}); {advice}"
        ) from None
    for key in _NESTED:
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
    named = isinstance(held, Mapping) and held
    if not named or not all(isinstance(n, str) and _is_plain(t) for n, t in held.items()):
        raise ConfigError(f"{place.key} holds something else than tensors by name; {advice}")
    return dict(held)


def _why(error: Exception) -> str:
    # Never torch's own advice, which is to trust the file and run its code.
    if not _UNSAFE.search(str(error)):
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    names = _GLOBAL.search(str(error))
    return f"it holds {names[1] if names else 'more than tensors'}"


def _is_plain(tensor: Any) -> bool:
    dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return dense and not tensor.is_quantized and tensor.device.type == "cpu"
