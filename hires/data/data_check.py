"""Checks data before a run: decodes all of it as a run would, and reports what stands out.

folder, pairs, images   every file, in bands, of which facts and a digest of its pixels are kept
masks                   each image and its label map: the same size, classes in range
slide                   each slide with its patches, as a run would cut them
cifar10                 whole records, labels from 0 to 9

A finding is an error if it would end a run, a warning if a run would learn something else than its
user thinks, and otherwise a note.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.data.image_fit import BAND_PIXELS
from hires.data.image_format import open_image
from hires.data.source import ERROR, NOTE, WARNING, DataFinding
from hires.data.sources.arrays import CIFAR10_CLASSES, records_in
from hires.data.sources.folder import check_classes, listing, reason_of, to_channels
from hires.data.sources.images import ImageSource
from hires.data.sources.masks import MaskSource, labels_of, mask_size
from hires.data.sources.slide import SlideSource, slide_files
from hires.data.splits import cifar10_files, own_parts, part_of, require_same_classes
from hires.data.start_check import CheckedImage, stored_findings

THREADS = 2
"""Files that are decoded at the same time: each may take as much memory as ``data.max_pixels``."""
_AT_ONCE = 512  # files that wait for a thread
_ALL = 2**62
"""Bytes of an image that is decoded: any."""
Progress = Callable[[int, int], None]


@dataclass
class DataReport:
    """All that was found in a folder."""

    path: str
    data: str
    """The value of ``data.name``."""
    classes: dict[str, int] = field(default_factory=dict)
    """Images of each class; of ``masks`` those in which it occurs, of ``slide`` patches."""
    images: list[CheckedImage] = field(default_factory=list)
    """Their paths are relative to the folder."""
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
                groups[image.facts.format, image.facts.colours, image.facts.bits].append(image.size)
        rows = sorted(groups.items(), key=lambda item: -len(item[1]))
        return [
            dict(zip(("format", "colours", "bits"), kind, strict=True))
            | {"images": len(sizes), "sizes": len(set(sizes))}
            | {"smallest": min(sizes, key=np.prod), "largest": max(sizes, key=np.prod)}
            for kind, sizes in rows
        ]

    def add(self, severity: str, text: str, files: Iterable[str]) -> None:
        """Adds a finding about some files, if there are any."""
        if files := [*files]:
            self.findings.append(DataFinding(severity, text, files))

    def within(self, file: str) -> str:
        """Returns a path relative to the folder, if it lies there."""
        path, root = Path(file), Path(self.path).expanduser()
        return str(path.relative_to(root)) if path.is_relative_to(root) else file


def check_data(
    path: str,
    config: RunConfig,
    data: str | None = None,
    sized: bool = False,
    progress: Progress = lambda done, total: None,
) -> DataReport:
    """Returns what is in a folder of data; ConfigError: it is missing, or cannot be listed.

    Args:
        path: of the folder.
        config: of the run, which decides how images are read.
        data: the value of ``data.name``; None: a folder with images in sub-folders has classes, and
            one with ``train`` and ``val`` these parts.
        sized: whether the run's ``image`` is known, so that sizes are compared with it.
        progress: called with how many files of how many are decoded.
    """
    report = DataReport(path, data or _kind_of(path))
    config = replace(config, data=replace(config.data, name=report.data, path=path))
    check = {"masks": _check_masks, "slide": _check_slides, "cifar10": _check_cifar10}
    if report.data in check:
        check[report.data](report, config, progress)
    else:
        _check_files(report, config, data is None, progress)
    files = [f"{image.path}: {image.reason}" for image in report.images if image.reason]
    text = "unreadable, which would end a run; replace them, or take them out of the folder"
    report.add(ERROR, text, files)
    found = stored_findings(report.images, config, sized)
    report.findings += [one for one in found if sized or one.key != "data.fit"]
    _add_uncounted(report, config)
    order = (ERROR, WARNING, NOTE)
    report.findings.sort(key=lambda one: order.index(one.severity))
    return report


def _kind_of(path: str) -> str:
    try:
        has_classes = any(listing(path, "folder")[0].values())
    except ConfigError:
        return "folder"
    return "folder" if has_classes else "images"


def _check_files(report: DataReport, config: RunConfig, guessed: bool, progress: Progress) -> None:
    parts = own_parts(report.path) if guessed or config.data.split != "all" else {}
    parts = parts if report.data == "folder" else {}
    label: dict[str, str] = {}
    for folder in parts.values() or [Path(report.path).expanduser()]:
        classes, others = listing(str(folder), report.data)
        _add_error(report, check_classes, folder, report.data, classes)
        report.add(NOTE, "ignored, because they are no images", map(report.within, others))
        for name, files in classes.items():
            report.classes[f"{folder.name}/{name}" if parts else name] = len(files)
            label |= dict.fromkeys(files, name)
    _add_error(report, require_same_classes, *parts.values())
    if config.data.labels is not None:
        _add_error(report, _check_table, report, config, label)
    _decode(report, config, label, progress)
    first: dict[bytes, str] = {}
    again: dict[bool, list[str]] = {True: [], False: []}
    for file, image in zip(label, report.images, strict=True):
        other = first.setdefault(image.digest, file) if image.digest else file
        if other != file:  # files of one class, or not
            again[label[other] == label[file]].append(f"{image.path}: {report.within(other)}")
    report.add(WARNING, "with the pixels of an image of another class", again[False])
    report.add(WARNING, "with the pixels of another image, which counts twice", again[True])


def _check_table(report: DataReport, config: RunConfig, files: Iterable[str]) -> None:
    source = ImageSource.open(config.data, (config.height, config.width), config.model.channels, 0)
    listed = {source.path(i) for i in range(len(source))}
    others = [report.within(file) for file in files if file not in listed]
    report.add(WARNING, f"not in data.labels={config.data.labels}, which no run uses", others)
    names = source.class_names
    if source.rows is None:
        counts = collections.Counter(names[source.label(i)] for i in range(len(source)))
        report.classes = {name: counts[name] for name in names}
    elif config.data.targets == "classes":
        report.classes = dict(zip(names, map(int, source.rows.sum(0)), strict=True))
        none = [source.name(i) for i in np.flatnonzero(~source.rows.any(1)).tolist()]
        report.add(NOTE, "of none of the classes", none)
    else:
        text = "numbers: mean, deviation, least and largest"
        ends = (source.rows.mean(0), source.rows.std(0), source.rows.min(0), source.rows.max(0))
        rows = zip(names, *ends, strict=True)
        words = [f"{name}: {', '.join(f'{x:g}' for x in row)}" for name, *row in rows]
        report.add(NOTE, text, words)


def _add_error(report: DataReport, check: Callable[..., object], *args: Any) -> None:
    try:
        check(*args)
    except ConfigError as error:
        report.findings.append(DataFinding(ERROR, str(error)))


def _decode(
    report: DataReport, config: RunConfig, files: Iterable[str], progress: Progress
) -> None:
    """Adds every file, in order, after it was decoded."""
    files = [*files]
    left = iter(files)
    with warnings.catch_warnings(), ThreadPoolExecutor(THREADS) as pool:
        warnings.simplefilter("ignore")  # of decoders, about broken metadata
        while part := list(itertools.islice(left, _AT_ONCE)):
            for image in pool.map(lambda file: decoded(file, config), part):
                report.images.append(replace(image, path=report.within(image.path)))
                progress(len(report.images), len(files))


def decoded(file: str, config: RunConfig) -> CheckedImage:
    """Returns one file after all of it was decoded, in bands, as a run reads it."""
    pixels_seen, largest = hashlib.blake2b(digest_size=16), 0.0
    try:
        with closing(open_image(Path(file), config.data.max_pixels)) as image:
            (height, width), facts = image.size, image.facts
            step = facts.band * max(1, BAND_PIXELS // max(1, facts.band * width))
            pixels_seen.update(repr(image.size).encode())
            for top in range(0, height, step):
                stored = image.read((top, min(top + step, height)), (0, width))
                channels, bands = config.model.channels, config.data.bands
                pixels = to_channels(stored, image.colours, channels, bands)
                pixels_seen.update(np.ascontiguousarray(pixels).data)
                largest = max(largest, float(pixels.max()))
            brightest = largest / image.peak
            return CheckedImage(file, image.size, facts, pixels_seen.digest(), brightest)
    except Exception as error:  # decoders raise nearly anything
        return CheckedImage(file, reason=reason_of(error))


def _check_masks(report: DataReport, config: RunConfig, progress: Progress) -> None:
    data, faults, unlabelled = config.data, list[str](), list[str]()
    if data.fit == "error":  # sizes are judged with those of other images
        data = replace(data, fit="resize")
    parts = own_parts(report.path) if data.split == "all" else {}  # of which a run reads one
    folders = [*map(str, parts.values())] or [part_of(data) or ""]
    size = config.height, config.width
    sources = [MaskSource(data, folder, size, config.model.channels) for folder in folders]
    pairs = [(source, i) for source in sources for i in range(len(source))]
    occurs: collections.Counter[int] = collections.Counter()
    ignored = {data.ignore, *config.objective.ignored}
    _decode(report, config, [source.path(i) for source, i in pairs], progress)
    for (source, i), image in zip(pairs, report.images, strict=True):
        mask = source.mask(i)
        try:
            if not image.reason:
                source.check(i, 0)
            labels = labels_of(mask, mask_size(mask, data.max_pixels), data)
            held = {*np.unique(labels).tolist()}
            occurs.update(held)
            unlabelled += [report.within(mask)] if held <= ignored else []
        except Exception as error:  # decoders raise nearly anything
            faults.append(f"{report.within(mask)}: {_short(error)}")
    report.classes = {str(label): occurs[label] for label in range(data.num_classes)}
    text = "label maps that would end a run; correct them, data.classes or data.ignore"
    report.add(ERROR, text, faults)
    text = "label maps without a label that counts (data.ignore, loss.ignore_index and weights): a "
    report.add(WARNING, f"{text}training learns nothing from their images", unlabelled)
    absent = [name for name, count in report.classes.items() if not count and not faults]
    report.add(NOTE, "classes of no pixel (data.classes)", absent)


def _short(error: Exception) -> str:
    return reason_of(error).partition(" (`hires data check")[0]


def _check_slides(report: DataReport, config: RunConfig, progress: Progress) -> None:
    faults, empty = list[str](), list[str]()
    slide_files(config.data, report.path)
    size = config.height, config.width
    try:
        source = SlideSource(config.data, report.path, size, config.model.channels)
    except ConfigError as error:  # of its labels
        report.findings.append(DataFinding(ERROR, str(error)))
        return
    counted: collections.Counter[str] = collections.Counter()
    for number in range(source.num_slides):
        name = source.slide_name(number)
        source.keep([number])
        try:
            if source.patches_of(number):
                for i in range(len(source)):
                    source.check(i, _ALL)
                counted += source.classes()
            else:
                empty.append(name)
        except (ConfigError, RunError) as error:
            faults.append(f"{name}: {_short(error)}")
        report.images.append(CheckedImage(name, config.fitted_size))
        progress(len(report.images), source.num_slides)
    report.classes = {name: counted[name] for name in source.class_names}
    text = "slides that would end a run; replace them, take them out, or change the keys"
    report.add(ERROR, text, faults)
    severity = ERROR if len(empty) == source.num_slides else NOTE
    if source.num_slides > len(empty) > source.num_slides / 2:
        severity = WARNING
    text = "without a patch to learn from (data.tissue, data.outside, or a smaller image=)"
    report.add(severity, text, empty)
    report.findings += source.findings()


def _check_cifar10(report: DataReport, config: RunConfig, progress: Progress) -> None:
    files, faults = cifar10_files(replace(config.data, split="all")), list[str]()
    counted = np.zeros(len(CIFAR10_CLASSES), np.int64)
    for number, file in enumerate(files, start=1):
        try:
            counted += np.bincount(records_in(file)[:, 0], minlength=len(counted))
        except ConfigError as error:
            faults.append(str(error))
        report.images.append(CheckedImage(file.name, config.fitted_size))
        progress(number, len(files))
    report.classes = dict(zip(CIFAR10_CLASSES, counted.tolist(), strict=True))
    report.add(ERROR, "files that would end a run", faults)


def _add_uncounted(report: DataReport, config: RunConfig) -> None:
    # Classes of images, not of pixels, whose label the loss ignores.
    if report.data not in ("folder", "slide", "cifar10"):
        return
    of_parts = [name.rpartition("/")[2] for name in report.classes]  # train/cat
    names = config.data.order or [*dict.fromkeys(of_parts)]
    text = "classes whose label does not count (loss.ignore_index, loss.weights): a training learns"
    found = [names[label] for label in sorted(config.loss.ignored) if label in range(len(names))]
    report.add(WARNING, f"{text} nothing from their images", found)
