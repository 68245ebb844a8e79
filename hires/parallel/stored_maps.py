"""Stores maps between two walks over an image: in memory, or row by row in temporary files.

The folder of the files is that of ``TMPDIR``, else ``/tmp``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hires.core.errors import RunError
from hires.core.units import size
from hires.parallel.halo import new_map
from hires.parallel.nameless_file import NamelessFile
from hires.plan.tiling import Interval


class StoredMap:
    """One map (n, C, H, W), in the order of its rows; ``like`` has its type and device.

    RunError: the disk is full.
    """

    def __init__(self, like: Tensor, shape: tuple[int, ...], on_disk: bool) -> None:
        self.shape, self._like = shape, like.new_empty(0)
        self._whole = None if on_disk else new_map(like, shape)
        self._file: NamelessFile | None = None
        if on_disk and not isinstance(like, FakeTensor):  # of which only sizes count
            samples, channels, rows, cols = shape
            self._row = channels * cols * like.element_size()
            folder, num_bytes = Path(tempfile.gettempdir()), samples * rows * self._row
            try:
                self._file = NamelessFile(folder)
                self._file.reserve(num_bytes)
            except OSError as error:
                raise RunError(
                    f"cannot store a map of {size(num_bytes)} in {folder}: {error.strerror}; set "
                    f"TMPDIR to a folder that has room"
                ) from None

    def write(self, rows: Interval, values: Tensor) -> None:
        """Stores some rows, (n, C, rows, W)."""
        if self._whole is not None:
            self._whole[:, :, rows[0] : rows[1]] = values
        elif self._file is not None:
            for sample, pixels in enumerate(values.permute(0, 2, 3, 1).contiguous().cpu()):
                self._file.write(pixels, self._place(sample, rows))

    def read(self, rows: Interval) -> Tensor:
        """Returns some rows, channels-last."""
        if self._whole is not None:
            return self._whole[:, :, rows[0] : rows[1]]
        samples, channels, _, cols = self.shape
        pixels = torch.empty(samples, rows[1] - rows[0], cols, channels, dtype=self._like.dtype)
        for sample in range(samples):
            if self._file is not None:
                self._file.read(pixels[sample], self._place(sample, rows))
        return pixels.to(self._like.device).permute(0, 3, 1, 2)

    def _place(self, sample: int, rows: Interval) -> int:
        return (sample * self.shape[2] + rows[0]) * self._row
