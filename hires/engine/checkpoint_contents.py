"""Names the files of a checkpoint, and reads its tensors.

Rank 0 reads the manifest for all ranks, so all mean the same files, whatever another node sees
under their path: the reader of a file compares all of it with the manifest's digest.
"""

from __future__ import annotations

from torch import Tensor

from hires.core.store.checkpoints import Checkpoint, StoredTensor
from hires.engine.tensorfile import TensorFile


class ContentsReader:
    """Reads tensors of a checkpoint; each file is opened once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._opened: dict[str, TensorFile] = {}

    def fill(self, tensor: Tensor, parts: list[StoredTensor], first: int = 0) -> None:
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

    def tensor(self, held: StoredTensor) -> Tensor:
        """Returns a tensor or rows; DamagedError: they cannot be read."""
        if held.file not in self._opened:
            self._opened[held.file] = TensorFile(self._checkpoint.path / held.file)
        return self._opened[held.file].tensor(held.key)


def stage_file(kind: str, stage: int, part: int | None = None) -> str:
    """Returns the name of the file of one kind of tensors of a stage, or of one holder's rows."""
    return f"{kind}{stage:02d}{'' if part is None else f'.{part:03d}'}.safetensors"
