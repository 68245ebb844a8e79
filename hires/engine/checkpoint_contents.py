"""Reads checkpoints: rank 0 says what one holds, and the reader of each stage reads its tensors.

    rank 0       manifest and headers: tensors by name, their shapes and check sums -> all ranks
    each reader  compares its files with that, and the tensors of its stages with their sums

So all ranks mean the same files, whatever another node sees under their path.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hires.core.errors import RunError
from hires.core.store.checkpoints import Checkpoint, DamagedError, part_of_key
from hires.engine.tensorfile import TensorFile


class Held(NamedTuple):
    """A tensor of a checkpoint, or some rows of one."""

    file: str
    key: str
    """Its name there: of rows ``conv1.weight[16:32]``."""
    check_sum: str
    shape: list[int]

    @property
    def name(self) -> str:
        """The tensor's name in the network."""
        return part_of_key(self.key)[0]

    @property
    def first(self) -> int:
        """Its first row, along the first dim."""
        return part_of_key(self.key)[1]


@dataclass(frozen=True)
class Contents:
    """A checkpoint and its tensors: kind (``stage``, ``momentum``) -> name -> where it is."""

    checkpoint: Checkpoint
    files: dict[str, dict[str, Held]]
    """File -> tensors by name, of all files but those of single ranks."""

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Contents:
        """Reads the headers of the files; DamagedError: one is not whole."""
        names = [name for name in checkpoint.files if not name.startswith("rank")]
        files = {name: TensorFile(checkpoint.path / name) for name in names}
        held = {
            name: {key: Held(name, key, file.check_sum(key), file.shape(key)) for key in file.names}
            for name, file in files.items()
        }
        return cls(checkpoint, held)

    def to_json(self) -> str:
        """Returns the tensors as text; :meth:`from_json` reads it."""
        return json.dumps(self.files)

    @classmethod
    def from_json(cls, checkpoint: Checkpoint, text: str) -> Contents:
        """Returns the contents of a checkpoint as another rank read them."""
        files = json.loads(text)
        held = {file: {n: Held(*row) for n, row in rows.items()} for file, rows in files.items()}
        return cls(checkpoint, held)

    def of_kind(self, kind: str) -> dict[str, list[Held]]:
        """Returns the tensors of one kind by name, each as its parts in the order of their rows."""
        # By exact names: one kind may begin with another's name, as exp_avg_sq with exp_avg.
        name = re.compile(rf"{re.escape(kind)}\d{{2,}}(\.\d+)?\.safetensors")
        parts: dict[str, list[Held]] = {}
        for rows in (rows for file, rows in self.files.items() if name.fullmatch(file)):
            for held in rows.values():
                parts.setdefault(held.name, []).append(held)
        return {name: sorted(some, key=lambda one: one.first) for name, some in parts.items()}

    def check(self, stage: set[str], kept: set[str]) -> None:
        """Compares tensors with their sums; DamagedError: one has changed.

        Those of the network are named by ``stage``, all others by ``kept``.
        """
        for file, rows in self.files.items():
            names = stage if file.startswith("stage") else kept
            if wanted := sorted(key for key, held in rows.items() if held.name in names):
                opened = TensorFile(self.checkpoint.path / file)
                for key in wanted:
                    if key not in opened.names or opened.check_sum(key) != rows[key].check_sum:
                        raise DamagedError(f"{opened.path} is damaged: rank 0 reads another {key}")
                opened.check(wanted)

    def require(self, kind: str, shapes: dict[str, list[int]]) -> None:
        """RunError: a tensor is missing, or has another shape."""
        held, path = self.of_kind(kind), self.checkpoint.path
        advice = "the checkpoint is of another network: use the model and model.classes of its run"
        for name, shape in shapes.items():
            if name not in held:
                raise RunError(f"{path} has no {name}; {advice}")
            parts = held[name]
            found = parts[0].shape
            if len(parts) > 1:
                found = [sum(part.shape[0] for part in parts), *found[1:]]
            if found != shape:
                raise RunError(f"{name} of {path} has the shape {found}, not {shape}; {advice}")


class ContentsReader:
    """Reads tensors of a checkpoint; each file is opened once."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._opened: dict[str, TensorFile] = {}

    def fill(self, tensor: Tensor, parts: list[Held], first: int = 0) -> None:
        """Fills a tensor, or its rows from ``first`` on; DamagedError: a part cannot be read."""
        if not tensor.dim():
            tensor.copy_(self.tensor(parts[0]))
            return
        last = first + len(tensor)
        for held in parts:
            begin, end = max(first, held.first), min(last, held.first + held.shape[0])
            if begin < end:
                rows = self.tensor(held)[begin - held.first : end - held.first]
                tensor[begin - first : end - first].copy_(rows)

    def tensor(self, held: Held) -> Tensor:
        """Returns a tensor or rows; DamagedError: they cannot be read."""
        if held.file not in self._opened:
            self._opened[held.file] = TensorFile(self._contents.checkpoint.path / held.file)
        return self._opened[held.file].tensor(held.key)


def rank_file(rank: int) -> str:
    """Returns the name of the file of one rank's random numbers."""
    return f"rank{rank:04d}.safetensors"


def stage_file(kind: str, stage: int, part: int | None = None) -> str:
    """Returns the name of the file of one kind of tensors of a stage, or of one holder's rows."""
    return f"{kind}{stage:02d}{'' if part is None else f'.{part:03d}'}.safetensors"
