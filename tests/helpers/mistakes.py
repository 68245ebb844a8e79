"""One rank of a world makes a mistake in a call: what all of them get, and whether they go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hires import comm
from hires.comm.backends import rendezvous
from hires.core.ranks.world import World
from tests.helpers.conformance import Lib, Spec
from tests.helpers.operations import Op
from tests.helpers.patience import PATIENCE_S


def _sum(backend: str | None = None, numel: int = 4, dtype: torch.dtype = torch.float32) -> None:
    comm.all_reduce(torch.ones(numel, dtype=dtype), backend=backend)


def _message(wrong: bool, numel: int = 4, tag: int = 3, dtype: torch.dtype = torch.float32) -> None:
    tensor = torch.ones(numel, dtype=dtype) if wrong else torch.ones(4)
    tag = tag if wrong else 3
    if comm.get_rank() == 1:
        comm.recv(tensor, 0, tag=tag)
    elif comm.get_rank() == 0:
        comm.send(tensor, 1, tag=tag)


def _two_orders(wrong: bool, backends: Sequence[str]) -> None:
    for name in backends[:: -1 if wrong else 1]:
        _sum(name)


MISTAKES: dict[str, Callable[[bool, Any], None]] = {
    "size": lambda wrong, _: _sum(numel=5 if wrong else 4),
    "large size": lambda wrong, _: _sum(numel=4000 if wrong else 4),
    "type": lambda wrong, _: _sum(dtype=torch.int32 if wrong else torch.float32),
    "operation": lambda wrong, _: comm.all_reduce(torch.ones(4), Op.MAX if wrong else Op.SUM),
    "refused": lambda wrong, _: _sum(dtype=torch.uint16 if wrong else torch.float32),
    "root": lambda wrong, _: comm.broadcast(torch.ones(4), int(wrong)),
    "message size": lambda wrong, _: _message(wrong, numel=2),
    "message type": lambda wrong, _: _message(wrong, dtype=torch.int32),
    "tag": lambda wrong, _: _message(wrong, tag=4),
    "order": _two_orders,
}
"""What rank 1 does otherwise than the others."""


def mistake(world: World, spec: Spec, name: str) -> list[str]:
    """Returns what a rank gets of a call with a mistake of rank 1, two later ones, and the end."""
    place = rendezvous.WorldMeeting(world)
    if "mpi" not in spec.backends:
        place.part("start", PATIENCE_S)  # the limit is that of the calls
    lib, answers = Lib(world, spec, place), list[str]()

    def answer(call: Callable[[], Any]) -> None:
        try:
            call()
            answers.append("done")
        except comm.CommError as error:
            answers.append(str(error))

    answer(lambda: MISTAKES[name](world.rank == 1, spec.backends))
    for _ in range(2):
        if name == "message type":  # it may not be paired with the one that was sent
            answer(lambda: _message(False))
            continue
        total = torch.ones(3)
        answer(lambda total=total: comm.all_reduce(total))
        if answers[-1] == "done" and total.tolist() != [world.size] * 3:
            answers[-1] = f"wrong {total}"
    try:
        lib.leave()
    except comm.CommError as error:
        answers.append(str(error))
    return answers
