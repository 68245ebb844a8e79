"""Writes the map, or image, of each sample into a file: every rank the part that it computed.

    rank 0  creates ID.tif |  rows   0 to 149        No rank holds the whole map. Whichever comes
    rank 1  finds it       |  rows 150 to 299        first makes the file under another name and
                                                     links it to its own: it is there once, whole.

A map of ``predict.format=zarr`` is a folder, made and taken in the same way.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
import unicodedata
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hires.core.config.predict_config import TIFF
from hires.core.store.file_names import StrPath
from hires.core.store.files import cannot_write, make_folder
from hires.engine.map_formats import MapKind, map_format

_MOST_BYTES = 180  # of a name; file systems take 255
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""A file system has no hard links."""
_PATIENCE_S, _POLL_S = 60.0, 0.01


class PredictionMaps:
    """The files of a data set in one folder."""

    def __init__(self, folder: Path, names: Iterable[str], kind: MapKind, form: str = TIFF) -> None:
        """Makes the folder; RunError: it cannot be made, or there is no tifffile.

        ``names`` are those of all samples, and ``form`` is one of ``predict.format``.
        """
        self.kind, self._form = kind, map_format(form, kind)
        self.folder, self.names = folder, safe_names(names, self._form.suffix)
        make_folder(folder)

    def write(self, sample: int, part: NDArray[Any], place: tuple[Any, ...]) -> None:
        """Writes the part of a sample's map at a place, as numpy indexes it.

        RunError: the file cannot be written.
        """
        path = self.folder / self.names[sample]
        try:
            if not path.exists():
                self._make(path)
            self._form.write(path, part, place)
        except (OSError, ValueError) as error:
            raise cannot_write(path, error) from error

    def adopt(self, sample: int, folder: Path) -> None:
        """Takes the file of a sample from another folder, which keeps it; RunError: it cannot."""
        path, other = self.folder / self.names[sample], folder / self.names[sample]
        if path.exists():
            return
        try:
            if not other.is_dir():
                _link(other, path)
                return
            with _hidden(path) as hidden:
                shutil.copytree(other, hidden, copy_function=_link)
                _publish(hidden, path)
        except OSError as error:
            raise cannot_write(path, error) from error

    def _make(self, path: Path) -> None:
        # Other attempts of the run make the same file, so that what is left to do ends the same.
        run_name = self.folder.absolute().parent.parent.name
        with _hidden(path) as hidden:
            self._form.make(hidden, f"{run_name}/{path.name}")
            _publish(hidden, path)


@contextlib.contextmanager
def _hidden(path: Path) -> Iterator[Path]:
    """Returns another name for what shall be a path; afterwards nothing has it."""
    hidden = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield hidden
    finally:
        if hidden.is_dir():
            shutil.rmtree(hidden)
        hidden.unlink(missing_ok=True)


def _link(file: StrPath, path: StrPath) -> None:
    """Gives a file another name, or copies it where there are no links; OSError: it cannot."""
    try:
        os.link(file, path)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(file, path)


def _publish(hidden: Path, path: Path) -> None:
    """Gives a file or folder its name, unless another rank was faster; OSError: it cannot."""
    try:
        with contextlib.suppress(FileExistsError):
            if hidden.is_dir():
                _rename_folder(hidden, path)
            else:
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


def _rename_folder(hidden: Path, path: Path) -> None:
    # A folder never replaces one that holds something.
    try:
        hidden.rename(path)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def safe_names(ids: Iterable[str], suffix: str) -> list[str]:
    """Returns the file name of each sample, all different, without folders.

    All characters but letters, digits and ``_.+-`` are replaced by ``_``. Where this makes names
    equal, the later ones get their number appended. Leading dots and hyphens are removed, so that
    no file is hidden or read as an option of a command. The ending of a TIFF file, as slides have,
    is replaced by ``suffix``.
    """
    names, taken = [], set[str]()
    for number, own in enumerate(ids):
        stem = re.sub(r"(.)(\.ome)?\.tiff?$", r"\1", own, flags=re.IGNORECASE)
        stem = re.sub(r"[^\w.+-]+", "_", stem).lstrip(".-") or "_"
        stem = stem.encode()[:_MOST_BYTES].decode(errors="ignore")
        name, tries = stem, number
        while (key := unicodedata.normalize("NFKC", name).casefold()) in taken:
            name, tries = f"{stem}-{tries}", tries + 1
        taken.add(key)
        names.append(f"{name}{suffix}")
    return names
