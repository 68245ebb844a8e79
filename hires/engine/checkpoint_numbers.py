"""Keeps in a checkpoint the few numbers that all ranks have alike.

    scale.safetensors      loss scale and its counters, of a training in fp16
    updates.safetensors    how many steps the optimiser has taken

Rank 0 writes and reads them.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from hires import comm
from hires.engine.build import RankEngine
from hires.engine.checkpoint_contents import Contents, ContentsReader

SCALE, UPDATES = "loss_scale", "updates"
_FILES = {SCALE: "scale.safetensors", UPDATES: "updates.safetensors"}
NAMES = frozenset(_FILES)


def files_of_numbers(engine: RankEngine) -> dict[str, dict[str, Tensor]]:
    """Returns what rank 0 writes: name of the file -> numbers by name."""
    numbers = {}
    if engine.executor.scale is not None:
        numbers[SCALE] = engine.executor.scale.state()
    if engine.optimizer is not None:
        numbers[UPDATES] = torch.tensor(engine.optimizer.updates, dtype=torch.float64)
    return {_FILES[name]: {name: state} for name, state in numbers.items()}


def numbers_in(contents: Contents, rank: int, name: str) -> Tensor | None:
    """Returns numbers of a checkpoint in float64, on all ranks together; None: it has none."""
    held = contents.files.get(_FILES[name], {}).get(name)
    if held is None:
        return None
    numbers = ContentsReader(contents).tensor(held).tolist() if rank == 0 else []
    return torch.tensor(json.loads(comm.broadcast_text(json.dumps(numbers))), dtype=torch.float64)
