"""Lists the images of a folder and their classes, by name; no pixel is read.

``data=folder`` has one sub-folder per class; images may lie in sub-folders of these. The images of
``data=pairs`` may lie anywhere below the folder. Names are sorted character by character, so every
rank and every machine numbers the images alike.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from hires.core.errors import ConfigError
from hires.data.image_format import FORMATS, patterns, suffix_of

log = logging.getLogger(__name__)

MANIFEST = ".hires-data.json"
"""Lies in a folder that ``hires data make`` has finished."""
UNFINISHED = ".hires-data.unfinished.json"
"""Lies in a folder while ``hires data make`` fills it."""

CONTENTS = {"folder": "one sub-folder per class", "pairs": "images"}
"""``data.name`` -> what its folder holds."""


@dataclass(frozen=True)
class FolderIndex:
    """The images of a folder."""

    class_names: tuple[str, ...]
    """Sub-folders in the order of their names; the place is the label."""
    paths: tuple[str, ...]
    """All images, class by class; plain strings, because there may be millions."""
    labels: tuple[int, ...]
    num_ignored: int
    """Files that are no images."""


def scan(path: str | None, data: str = "folder") -> FolderIndex:
    """Returns the images of the folder ``data.path``; those of ``pairs`` are one class.

    Raises:
        ConfigError: the folder is missing, unfinished, or has no classes or no images.
    """
    root = _root(path, data)
    try:
        if data == "pairs":
            names, listed = ["images"], [_images(root)]
        else:
            names = sorted(e.name for e in root.iterdir() if e.is_dir() and _visible(e.name))
            listed = [_images(root / name) for name in names]
    except OSError as error:
        raise ConfigError(
            f"data.path={path}: {error.filename or path} cannot be listed ({error.strerror}); "
            f"make it readable"
        ) from error
    _check_classes(root, data, names, [images for images, _ in listed])
    num_ignored = sum(ignored for _, ignored in listed)
    if num_ignored:
        log.info("%s: %d files that are no images are ignored", root, num_ignored)
    return FolderIndex(
        tuple(names),
        tuple(image for images, _ in listed for image in images),
        tuple(label for label, (images, _) in enumerate(listed) for _ in images),
        num_ignored,
    )


def _root(path: str | None, data: str) -> Path:
    contents = CONTENTS[data]
    if not path:
        raise ConfigError(f"data={data} needs data.path=FOLDER, a folder with {contents}")
    root = Path(path).expanduser()
    if not root.exists():
        raise ConfigError(
            f"data.path={path} does not exist; give a folder with {contents}, or write one with "
            f"`hires data make {path}`"
        )
    if not root.is_dir():
        raise ConfigError(f"data.path={path} is a file; give the folder that holds {contents}")
    if (root / UNFINISHED).exists():
        raise ConfigError(
            f"data.path={path} was not finished; repeat the `hires data make` that writes it, "
            f"which goes on where it stopped"
        )
    return root


def _images(folder: Path) -> tuple[list[str], int]:
    """Returns the images below a folder in order of name, and the number of other files."""

    def refuse(error: OSError) -> None:  # os.walk would ignore it
        raise error

    images, num_ignored = [], 0
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(filter(_visible, folders))  # the order in which os.walk goes on
        for name in sorted(filter(_visible, files)):
            if suffix_of(name) in FORMATS:
                images.append(f"{parent}/{name}")
            else:
                num_ignored += 1
    return images, num_ignored


def _check_classes(root: Path, data: str, names: list[str], listed: list[list[str]]) -> None:
    if not names:
        loose = any(suffix_of(e.name) in FORMATS for e in root.iterdir())
        raise ConfigError(
            f"data.path={root} holds {'images but ' if loose else ''}no sub-folders; put the "
            f"images of each class into a sub-folder named after the class"
        )
    empty = [name for name, images in zip(names, listed, strict=True) if not images]
    if len(empty) == len(names):
        below = "" if data == "pairs" else f" below its {len(names)} sub-folders"
        raise ConfigError(
            f"data.path={root} holds no images{below}; images are files named {patterns()}"
        )
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise ConfigError(
            f"data.path={root}: the class {empty[0]!r}{more} has no images; add some "
            f"({patterns()}) or remove the sub-folder"
        )


def _visible(name: str) -> bool:
    """Whether a name is not hidden; systems leave hidden files behind."""
    return not name.startswith(".")
