"""Writes the map, or image, of each sample into a file: every rank the part that it computed.

    rank 0          makes ID.tif |                  before the barrier of the step
    rank 0, rank 1  write        |  rows 0 to 149, rows 150 to 299: no rank holds the whole map

A map of ``predict.format=zarr`` is a folder, made and written in the same way.
"""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hires.core.config.data_config import TIFF
from hires.core.store.file_names import StrPath
from hires.core.store.files import cannot_write, make_folder
from hires.engine.map_formats import MapKind, map_format

_MOST_BYTES = 180  # of a name; file systems take 255


class PredictionMaps:
    """The files of a data set in one folder."""

    def __init__(self, folder: Path, names: Iterable[str], kind: MapKind, form: str = TIFF) -> None:
        """Makes the folder; RunError: it cannot be made, or a package that it needs is missing.

        ``names`` are those of all samples, and ``form`` is one of ``predict.format``.
        """
        self.kind, self._form = kind, map_format(form, kind)
        self.folder, self.names = folder, safe_names(names, self._form.suffix)
        make_folder(folder)

    def make(self, sample: int) -> None:
        """Makes the file of a sample, of zeros, unless it is there; RunError: it cannot.

        One rank calls it, before any writes.
        """
        path = self.folder / self.names[sample]
        if path.exists():
            return
        # Other attempts of the run make the same file, so that what is left to do ends the same.
        run_name = self.folder.absolute().parent.parent.name
        try:
            self._form.make(path, f"{run_name}/{path.name}")
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
            raise cannot_write(path, error) from error

    def write(self, sample: int, part: NDArray[Any], place: tuple[Any, ...]) -> None:
        """Writes the part of a sample's map at a place, as numpy indexes it.

        RunError: the file cannot be written.
        """
        path = self.folder / self.names[sample]
        try:
            self._form.write(path, part, place)
        except (OSError, ValueError) as error:
            raise cannot_write(path, error) from error

    def adopt(self, sample: int, folder: Path) -> None:
        """Takes the file of a sample from another folder, which keeps it; RunError: it cannot."""
        path, other = self.folder / self.names[sample], folder / self.names[sample]
        if path.exists():
            return
        try:
            if other.is_dir():
                shutil.copytree(other, path, copy_function=_link)
            else:
                _link(other, path)
        except OSError as error:
            raise cannot_write(path, error) from error


def _link(file: StrPath, path: StrPath) -> None:
    """Gives a file another name, or copies it where there are no links; OSError: it cannot."""
    try:
        os.link(file, path)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(file, path)


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
