"""Lists the images of a folder and their classes, by name; no pixel is read.

The folder has one sub-folder per class; images may lie in sub-folders of these. Without classes
images may lie anywhere below the folder. Names are sorted character by character, so every rank and
every machine numbers the images alike.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from hires.core.errors import ConfigError

log = logging.getLogger(__name__)

PILLOW_SUFFIXES = (".png", ".jpg", ".jpeg")
TIFF_SUFFIXES = (".tif", ".tiff")
SUFFIXES = PILLOW_SUFFIXES + TIFF_SUFFIXES
_IMAGE_FILES = f"images are files named {', '.join('*' + suffix for suffix in SUFFIXES)}"

MANIFEST = ".hires-data.json"
"""Lies in a folder that ``hires data make`` has finished."""
UNFINISHED = ".hires-data.unfinished.json"
"""Lies in a folder while ``hires data make`` fills it."""


@dataclass(frozen=True)
class FolderIndex:
    """The images of a folder."""

    class_names: tuple[str, ...]
    """Sub-folders in the order of their names; the place is the label."""
    paths: tuple[str, ...]
    """All images, class by class; plain strings, because there may be millions."""
    labels: tuple[int, ...]
    """Their labels."""
    num_ignored: int
    """Files that are no images."""


def scan(path: str | None) -> FolderIndex:
    """Returns the images of the folder ``data.path``.

    Raises:
        ConfigError: the folder is missing, unfinished, or has no classes or no images.
    """
    try:
        root = _root(path, "folder", "one sub-folder per class")
        names = sorted(e.name for e in root.iterdir() if e.is_dir() and _visible(e.name))
        listed = [_images(root / name) for name in names]
    except OSError as error:
        raise _unlisted(path, error) from error
    _check_classes(root, names, listed)
    num_ignored = sum(ignored for _, ignored in listed)
    if num_ignored:
        log.info("%s: %d files that are no images are ignored", root, num_ignored)
    return FolderIndex(
        tuple(names),
        tuple(image for images, _ in listed for image in images),
        tuple(label for label, (images, _) in enumerate(listed) for _ in images),
        num_ignored,
    )


def scan_images(path: str | None) -> FolderIndex:
    """Returns all images below the folder ``data.path``, as one class.

    Raises:
        ConfigError: the folder is missing, unfinished, or has no images.
    """
    root = _root(path, "pairs", "images")
    try:
        images, num_ignored = _images(root)
    except OSError as error:
        raise _unlisted(path, error) from error
    if not images:
        raise ConfigError(f"data.path={root} holds no images; {_IMAGE_FILES}")
    return FolderIndex(("images",), tuple(images), (0,) * len(images), num_ignored)


def _root(path: str | None, data: str, wanted: str) -> Path:
    """Returns the folder ``data.path``, which must hold images as ``data`` does."""
    if not path:
        raise ConfigError(f"data={data} needs data.path=FOLDER, a folder with {wanted}")
    root = Path(path).expanduser()
    if not root.exists():
        raise ConfigError(
            f"data.path={path} does not exist; give a folder with {wanted}, or write one with "
            f"`hires data make {path}`"
        )
    if not root.is_dir():
        raise ConfigError(f"data.path={path} is a file; give the folder that holds {wanted}")
    if (root / UNFINISHED).exists():
        raise ConfigError(
            f"data.path={path} was not finished; repeat the `hires data make` that writes it, "
            f"which goes on where it stopped"
        )
    return root


def _images(folder: Path) -> tuple[list[str], int]:
    """Returns the images below a folder in order of name, and the number of other files."""
    images, num_ignored = [], 0
    for parent, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = sorted(filter(_visible, folders))  # the order in which os.walk goes on
        for name in sorted(filter(_visible, files)):
            if name.lower().endswith(SUFFIXES):
                images.append(f"{parent}/{name}")
            else:
                num_ignored += 1
    return images, num_ignored


def _check_classes(root: Path, names: list[str], listed: list[tuple[list[str], int]]) -> None:
    if not names:
        loose = any(e.name.lower().endswith(SUFFIXES) for e in root.iterdir())
        raise ConfigError(
            f"data.path={root} holds "
            + ("images but no sub-folders" if loose else "no sub-folders")
            + "; put the images of each class into a sub-folder named after the class"
        )
    empty = [name for name, (images, _) in zip(names, listed, strict=True) if not images]
    if len(empty) == len(names):
        raise ConfigError(
            f"data.path={root} holds no images below its {len(names)} sub-folders; {_IMAGE_FILES}"
        )
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise ConfigError(
            f"data.path={root}: the class {empty[0]!r}{more} has no images; add some "
            f"({', '.join('*' + suffix for suffix in SUFFIXES)}) or remove the sub-folder"
        )


def _unlisted(path: str | None, error: OSError) -> ConfigError:
    """Returns the error of a folder that cannot be listed."""
    return ConfigError(
        f"data.path={path}: {error.filename or path} cannot be listed ({error.strerror}); "
        f"make it readable"
    )


def _visible(name: str) -> bool:
    """Whether a name is not hidden; systems leave hidden files behind."""
    return not name.startswith(".")


def _raise(error: OSError) -> None:
    """Raises what os.walk would ignore."""
    raise error
