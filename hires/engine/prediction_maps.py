"""Writes the map, or image, of each sample into a TIFF: every rank the part that it computed.

    rank 0  creates ID.tif |  rows   0 to 149        No rank holds the whole map. Whichever comes
    rank 1  finds it       |  rows 150 to 299        first makes the file under another name and
                                                     links it to its own: it is there once, whole.

The pixels lie uncompressed in one piece, so a part of them is written through a mapping of the
file. Its blocks are allocated at once: on a full disk a mapping would end the process by SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
import unicodedata
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.core.errors import RunError
from hires.core.store.files import cannot_write, make_folder

BIG_BYTES = 2**32 - 2**25
"""Size from which a file is a BigTIFF, with offsets of 64 bits."""
_MOST_BYTES = 180  # of a name; file systems take 255
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""A file system has none."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""A file system has no hard links."""
_PATIENCE_S, _POLL_S = 60.0, 0.01
_SUFFIX = ".tif"


class PredictionMaps:
    """The TIFFs of a data set in one folder."""

    def __init__(
        self, folder: Path, names: Iterable[str], shape: Sequence[int], dtype: Any, **layout: Any
    ) -> None:
        """Makes the folder; RunError: it cannot be made, or there is no tifffile.

        ``names`` are those of all samples, ``shape`` and ``dtype`` those of each map, and
        ``layout`` is what tifffile calls ``photometric`` and ``planarconfig``.
        """
        try:
            import tifffile
        except ImportError:
            text = "task=predict writes maps with tifffile, which is not installed: pip install it"
            raise RunError(text) from None
        self._tifffile = tifffile
        self.folder, self.names = folder, safe_names(names)
        self._shape, self._dtype, self._layout = tuple(shape), np.dtype(dtype), layout
        make_folder(folder)

    def write(self, sample: int, part: NDArray[Any], place: tuple[Any, ...]) -> None:
        """Writes the part of a sample's map at a place, as numpy indexes it.

        RunError: the file cannot be written.
        """
        path = self.folder / self.names[sample]
        try:
            if not path.exists():
                self._make(path)
            with path.open("r+b") as file:  # NFS locks only what is open for writing
                # Two nodes that write into one page of a network file system would each send the
                # page as they see it.
                try:
                    fcntl.flock(file, fcntl.LOCK_EX)
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                mapped = self._tifffile.memmap(path, mode="r+")
                mapped.reshape(self._shape)[place] = part
                mapped.flush()
        except (OSError, ValueError) as error:
            raise cannot_write(path, error) from error

    def adopt(self, sample: int, folder: Path) -> None:
        """Takes the file of a sample from another folder, which keeps it; RunError: it cannot."""
        name = self.names[sample]
        if (self.folder / name).exists():
            return
        try:
            try:
                os.link(folder / name, self.folder / name)
            except FileNotFoundError:
                raise
            except OSError:  # the file system has no links
                shutil.copyfile(folder / name, self.folder / name)
        except OSError as error:
            raise cannot_write(self.folder / name, error) from error

    def _make(self, path: Path) -> None:
        hidden = path.with_name(f".{uuid.uuid4().hex}.tmp")
        num_bytes = int(np.prod(self._shape)) * self._dtype.itemsize
        kind = {"bigtiff": num_bytes > BIG_BYTES, "metadata": None, **self._layout}
        try:
            self._tifffile.memmap(hidden, shape=self._shape, dtype=self._dtype, **kind)
            with hidden.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, hidden.stat().st_size)
            _publish(hidden, path)
        finally:
            hidden.unlink(missing_ok=True)


def _publish(hidden: Path, path: Path) -> None:
    """Gives a file its name, unless another rank was faster; OSError: it cannot."""
    try:
        with contextlib.suppress(FileExistsError):
            os.link(hidden, path)
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    # A rename would replace what the other rank has written into its file by now, so one rank at a
    # time may rename: the one that could make the claim.
    claim, until_s = path.with_name(f".{path.name}.claim"), time.monotonic() + _PATIENCE_S
    while not path.exists():
        try:
            claim.open("xb").close()
        except FileExistsError:
            if time.monotonic() > until_s:
                raise OSError(errno.ETIMEDOUT, f"{claim} stays; remove it") from None
            time.sleep(_POLL_S)
            continue
        try:
            if not path.exists():
                hidden.rename(path)
        finally:
            claim.unlink()


def safe_names(ids: Iterable[str]) -> list[str]:
    """Returns the file name of each sample, all different, without folders.

    What is no letter, digit or one of ``_.+-`` becomes ``_``; of names that are alike then, the
    later ones end in their number. None begins as hidden files or options of commands do.
    """
    names, taken = [], set[str]()
    for number, own in enumerate(ids):
        stem = re.sub(r"[^\w.+-]+", "_", own).lstrip(".-") or "_"
        stem = stem.encode()[:_MOST_BYTES].decode(errors="ignore")
        name, tries = stem, number
        while (key := unicodedata.normalize("NFKC", name).casefold()) in taken:
            name, tries = f"{stem}-{tries}", tries + 1
        taken.add(key)
        names.append(f"{name}{_SUFFIX}")
    return names
