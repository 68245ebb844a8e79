"""Digests the images of a folder, so that a run of other images is another run.

    files of 16 GiB in all or less    name, content        a touched file changes nothing
    more                              name, size, time     bounds the time before step 1

A content is read once: a file with the size, the times and the inode that it had has the content
that it had. What changed while it was read, or shortly before, is read again next time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.core.store import reading
from hires.core.store.frozen import DataContent
from hires.data.folder import CONTENTS, scan
from hires.data.masks import mask_pairs
from hires.data.slides import label_files, root_of, slide_files
from hires.data.splits import cifar10_files, file_of_split, part_of

MOST_BYTES = 16 * 2**30
"""Size of the images whose contents are read; of more images the times of change count."""
_SETTLED_NS = 2 * 10**9
"""Two changes of a file within the clock's ticks may have one time (git: racy index entries)."""
HAS_FILES = (*CONTENTS, "cifar10", "masks", "slide")
"""``data.name`` of images that lie below ``data.path``."""
_THREADS = 4
_CHUNK = 2**20

Marks = list[int]
"""Size, times of change of content and of entry, and inode of a file."""


@dataclass
class KnownFiles:
    """What was read of a folder: name of a file -> its marks, then the digest of its content."""

    files: dict[str, tuple[Marks, str]] = field(default_factory=dict)
    num_read: int = 0
    """Files that were read since."""


def content_of(
    data: DataConfig, known: KnownFiles, on_read: Callable[[int, int], None] = lambda n, of: None
) -> tuple[DataContent, dict[str, str]]:
    """Returns what a folder of images holds, with the digest of each file by its name.

    ``known`` is brought up to date. ``on_read`` is called with the number of files that were read,
    of how many. Errors are those of :func:`hires.data.folder.scan`, and a ConfigError names a file
    that cannot be read.
    """
    root = str(root_of(data))
    paths = _paths(data)
    began_ns = time.time_ns()
    marks = {path.removeprefix(root).lstrip("/"): _marks(path) for path in paths}
    num_bytes = sum(one[0] for one in marks.values())
    times = {name: f"{one[0]} {one[1]}" for name, one in marks.items()}
    digests = times
    if num_bytes <= MOST_BYTES:
        before, known.files = known.files, {}
        same = {n: before[n][1] for n, one in marks.items() if n in before and before[n][0] == one}
        missing = [name for name in marks if name not in same]
        read = dict(zip(missing, _read_all(root, missing, on_read), strict=True))
        known.num_read = len(missing)
        digests = {name: same.get(name) or read[name] for name in marks}
        for name, one in marks.items():
            if max(one[1], one[2]) < began_ns - _SETTLED_NS:
                known.files[name] = one, digests[name]
    return DataContent(_digest(digests), len(marks), num_bytes, _entries(marks)), digests


def is_unchanged(data: DataConfig, content: DataContent) -> bool:
    """Whether a folder still holds what it held; ConfigError: it cannot be read."""
    if data.name not in HAS_FILES:
        return True
    root = str(root_of(data))
    paths = _paths(data)
    marks = {path.removeprefix(root).lstrip("/"): _marks(path) for path in paths}
    if _entries(marks) == content.stat:
        return True
    return content_of(data, KnownFiles())[0].digest == content.digest


def data_changes(old: Mapping[str, str] | None, new: Mapping[str, str] | None) -> str:
    """Returns in words how the files of two contents differ; None: they are not known."""
    if old is None or new is None:
        return "the images have changed"
    parts = []
    for verb, names in (
        ("added", [name for name in new if name not in old]),
        ("removed", [name for name in old if name not in new]),
        ("replaced", [name for name in new if name in old and old[name] != new[name]]),
    ):
        if names:
            images = "1 image was" if len(names) == 1 else f"{len(names)} images were"
            parts.append(f"{images} {verb} ({names[0]}{', ...' if len(names) > 1 else ''})")
    return " and ".join(parts) or "the images have changed"


def _paths(data: DataConfig) -> Sequence[str]:
    paths = [*_image_paths(data)]
    split = file_of_split(data)
    return paths if split is None else [*paths, str(split)]


def _image_paths(data: DataConfig) -> Sequence[str]:
    if data.name == "cifar10":
        return [*map(str, cifar10_files(data))]
    if data.name == "masks":
        index, masks = mask_pairs(data, part_of(data))
        return (*index.paths, *masks)
    if data.name == "slide":
        return [*slide_files(data, part_of(data)), *label_files(data)]
    return scan(part_of(data), data.name).paths


def _marks(path: str) -> Marks:
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise ConfigError(f"the image {path} cannot be read: {error.strerror}") from None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _entries(marks: Mapping[str, Marks]) -> str:
    return _digest({name: " ".join(map(str, one)) for name, one in marks.items()})


def _read_all(root: str, names: list[str], on_read: Callable[[int, int], None]) -> list[str]:
    digests = []
    with ThreadPoolExecutor(_THREADS) as pool:  # hashing lets go of the interpreter
        for digest in pool.map(lambda name: _content(f"{root}/{name}"), names):
            digests.append(digest)
            if len(digests) % 100 == 0:
                on_read(len(digests), len(names))
    return digests


def _content(path: str) -> str:
    whole = hashlib.sha256()
    try:
        with reading.open_regular(path) as file:
            while chunk := file.read(_CHUNK):
                whole.update(chunk)
    except OSError as error:
        raise ConfigError(f"the image {path} cannot be read: {error.strerror}") from None
    return whole.hexdigest()[:16]


def _digest(values: Mapping[str, str]) -> str:
    lines = (f"{name}\0{value}\n" for name, value in sorted(values.items()))
    whole = hashlib.sha256()
    for line in lines:
        whole.update(line.encode("utf-8", "surrogateescape"))
    return whole.hexdigest()
