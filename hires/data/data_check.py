"""Checks images before a run: decodes every file as a run would, and reports what stands out.

A finding is an error if it would end a run, a warning if a run would learn something else than its
user thinks, and otherwise a note. Images are decoded in bands and forgotten; of each only its facts
and a digest of its pixels are kept.
"""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.data.checked_image import ERROR, NOTE, WARNING, CheckedImage, DataFinding, decoded
from hires.data.image_findings import (
    colour_findings,
    same_pixels,
    size_findings,
    unreadable,
)
from hires.data.image_format import Size, suffix_of
from hires.data.sources.folder import check_classes, listing, reason_of
from hires.data.splits import own_parts, require_same_classes

THREADS = 2
"""Files that are decoded at the same time: each may take as much memory as ``data.max_pixels``."""
_AT_ONCE = 512  # files that wait for a thread
_UNEVEN = 10  # times as many images in the largest class as in the smallest


@dataclass
class DataReport:
    """All that was found in a folder or list."""

    path: str
    data: str
    """``list`` (PATH is a list of files), or the value of ``data.name``: ``folder``, ``images``,
    ``pairs``, ``masks``, ``slide`` or ``cifar10``."""
    classes: dict[str, int]
    """Images of each class; of ``masks`` those in which it occurs, of ``slide`` patches."""
    images: list[CheckedImage] = field(default_factory=list)
    """Their paths are relative to the folder, where they lie in it."""
    findings: list[DataFinding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether a run can read all of it."""
        return all(finding.severity != ERROR for finding in self.findings)

    def kinds(self) -> list[dict[str, Any]]:
        """Returns a row for each format, colours and bit depth, the most frequent first."""
        groups = collections.defaultdict(list)
        for image in self.images:
            if image.facts is not None:
                facts = image.facts
                groups[facts.format, facts.colours, facts.bits].append(image.size)
        rows = sorted(groups.items(), key=lambda item: -len(item[1]))
        return [
            dict(zip(("format", "colours", "bits"), kind, strict=True))
            | {"images": len(sizes), "sizes": len(set(sizes))}
            | {"smallest": min(sizes, key=_area), "largest": max(sizes, key=_area)}
            for kind, sizes in rows
        ]


def check_data(
    path: str,
    config: RunConfig,
    data: str | None = None,
    sized: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DataReport:
    """Returns what is in a folder of images, or in a list of files, one a line.

    Args:
        path: of the folder or list; ConfigError: it is missing, or cannot be listed.
        config: its channels, ``data.fit`` and ``data.max_pixels`` are those of the run.
        data: ``folder``, ``images`` or ``pairs`` (``label_check.CHECKS`` has a function for each
            other kind); None: a folder with images in sub-folders has classes, and one with
            ``train`` and ``val`` these parts.
        sized: whether the run's ``image`` is known, so that sizes are compared with it.
        progress: called with how many files of how many are decoded.
    """
    root, kind = Path(path).expanduser(), data
    findings: list[DataFinding] = []
    others: list[str] = []
    if root.is_file():
        data, classes = "list", {"list": listed_files(root)}
        root = root.parent
    else:
        data, parts = data or _kind_of(path), own_parts(path)
        if data == "folder" and parts and (kind is None or config.data.split != "all"):
            classes, others = _listed_parts(parts, findings)
        else:
            classes, others = listing(path, data)
            findings += _class_findings(root, data, classes)
            if kind is None and {*classes} == {"images", "masks"}:
                text = "images and masks are checked as classes; data=masks checks them as pairs"
                findings.append(DataFinding(WARNING, text))
            if data == "folder" and parts:
                names = ", ".join(part.name for part in parts.values())
                text = f"{names} are read as classes; data.split=train reads them as parts"
                findings.append(DataFinding(WARNING, text))
    within = partial(inside, root)
    report = DataReport(path, data, {name: len(files) for name, files in classes.items()})
    files = [*itertools.chain.from_iterable(classes.values())]
    for image in checked_images(files, config):
        report.images.append(replace(image, path=within(image.path)))
        progress(len(report.images), len(files))
    label = {within(file): name.rpartition("/")[2] for name, own in classes.items() for file in own}
    findings += [
        *unreadable(report.images),
        *(size_findings(report.images, config) if sized else ()),
        *colour_findings(report.images),
        *same_pixels(report.images, label),
    ]
    if others:
        kinds = collections.Counter(suffix_of(file) or "no suffix" for file in others)
        text = f"ignored, because they are no images: {_counted(kinds)}"
        findings.append(DataFinding(NOTE, text, [*map(within, others)]))
    report.findings = sorted_findings(findings)
    return report


def sorted_findings(findings: Iterable[DataFinding]) -> list[DataFinding]:
    """Returns findings with those first that would end a run."""
    order = (ERROR, WARNING, NOTE)
    return sorted(findings, key=lambda one: order.index(one.severity))


def _listed_parts(
    parts: dict[str, Path], findings: list[DataFinding]
) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the images of the classes of every part, as ``train/cat``, and all other files."""
    classes: dict[str, list[str]] = {}
    others: list[str] = []
    for folder in parts.values():
        own, more = listing(str(folder), "folder")
        findings += _class_findings(folder, "folder", own)
        classes |= {f"{folder.name}/{name}": files for name, files in own.items()}
        others += more
    try:
        require_same_classes(*parts.values())
    except ConfigError as error:
        findings.append(DataFinding(ERROR, str(error)))
    return classes, others


def listed_files(path: Path) -> list[str]:
    """Returns the files that a list names, one a line, relative to it; ``#`` begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no list of images ({reason_of(error)}); give a folder, or a text file with "
            f"one path a line"
        ) from error
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return [str(path.parent / Path(name).expanduser()) for name in names]


def _kind_of(path: str) -> str:
    try:
        return "folder" if any(listing(path, "folder")[0].values()) else "pairs"
    except ConfigError:
        return "folder"


def _class_findings(root: Path, data: str, classes: dict[str, list[str]]) -> Iterator[DataFinding]:
    empty = [name for name, files in classes.items() if not files]
    if empty and len(empty) < len(classes):
        text = "classes without images, which would end a run; add some or remove the sub-folders"
        yield DataFinding(ERROR, text, empty)
    else:
        try:
            check_classes(root, data, classes)
        except ConfigError as error:
            yield DataFinding(ERROR, str(error))
    sizes = {name: len(files) for name, files in classes.items() if files}
    if len(sizes) > 1 and max(sizes.values()) >= _UNEVEN * min(sizes.values()):
        most, least = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
        text = f"the class {most} has {sizes[most]} images, {least} has {sizes[least]}"
        yield DataFinding(NOTE, f"{text}: a network may learn to ignore the small ones")


def checked_images(files: Iterable[str], config: RunConfig) -> Iterator[CheckedImage]:
    """Yields every file as it is decoded, in order."""
    channels, most, left = config.model.channels, config.data.max_pixels, iter(files)
    with warnings.catch_warnings(), ThreadPoolExecutor(THREADS) as pool:
        warnings.simplefilter("ignore")  # of decoders, about broken metadata
        while part := list(itertools.islice(left, _AT_ONCE)):
            yield from pool.map(lambda file: decoded(file, channels, most), part)


def inside(root: Path, file: str) -> str:
    """Returns a path relative to a folder, if it lies there."""
    path = Path(file)
    return str(path.relative_to(root)) if path.is_relative_to(root) else file


def _counted(kinds: collections.Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in kinds.most_common(6))


def _area(size: Size) -> int:
    return size[0] * size[1]
