"""Checks data whose labels lie beside the pixels: label maps, slides, the files of CIFAR-10.

masks     each image and its label map: the same size, classes in range
slide     each slide with its patches, as a run would cut them
cifar10   whole records, labels from 0 to 9
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.data.checked_image import ERROR, NOTE, WARNING, CheckedImage, DataFinding
from hires.data.data_check import DataReport, checked_images, inside, sorted_findings
from hires.data.image_findings import colour_findings, size_findings, unreadable
from hires.data.sources.arrays import CIFAR10_CLASSES, records_in
from hires.data.sources.folder import reason_of
from hires.data.sources.masks import (
    mask_pairs,
    mask_size,
    require_cover,
    require_labels,
    stored_labels,
)
from hires.data.sources.slide import SlideSource, slide_files
from hires.data.splits import cifar10_files

Progress = Callable[[int, int], None]
_ALL = 2**62
"""Bytes of an image that is decoded: any."""


def check_masks(path: str, config: RunConfig, sized: bool, progress: Progress) -> DataReport:
    """Returns what is wrong with images and their label maps; ConfigError: one has no partner."""
    root, data = Path(path).expanduser(), replace(config.data, path=path)
    index, masks = mask_pairs(data, path)
    report, faults = DataReport(path, "masks", {}), list[str]()
    occurs: collections.Counter[int] = collections.Counter()
    ignored = {data.ignore, *config.objective.ignored}
    unlabelled = list[str]()
    for image, mask in zip(checked_images(index.paths, config), masks, strict=True):
        report.images.append(replace(image, path=inside(root, image.path)))
        progress(len(report.images), len(masks))
        try:
            size = mask_size(mask, data.max_pixels)
            if image.facts is not None and size != image.size:
                raise ValueError(
                    f"it has {size[0]} x {size[1]} pixels, its image {Path(image.path).name} "
                    f"{image.size[0]} x {image.size[1]}"
                )
            if sized:
                require_cover(size, (config.height, config.width), data)
            labels = stored_labels(mask, size, data.max_pixels)
            require_labels(labels, data)
            held = {*np.unique(labels).tolist()}
            occurs.update(held)
            if held <= ignored:
                unlabelled.append(inside(root, mask))
        except Exception as error:  # decoders raise nearly anything
            faults.append(f"{inside(root, mask)}: {reason_of(error)}")
    report.classes = {str(label): occurs[label] for label in range(data.classes)}
    findings = [*unreadable(report.images), *colour_findings(report.images)]
    findings += size_findings(report.images, config) if sized else ()
    if faults:
        text = "label maps that would end a run; correct them, data.classes or data.ignore"
        findings.append(DataFinding(ERROR, text, faults))
    if unlabelled:
        text = "label maps without a label that counts (data.ignore, loss.ignore_index and weights)"
        text += ": a training learns nothing from their images"
        findings.append(DataFinding(WARNING, text, unlabelled))
    absent = [name for name, count in report.classes.items() if not count]
    if absent and not faults:
        findings.append(DataFinding(NOTE, "classes of no pixel (data.classes)", absent))
    report.findings = sorted_findings(findings)
    return report


def check_slides(path: str, config: RunConfig, sized: bool, progress: Progress) -> DataReport:
    """Returns what is wrong with slides and their labels; every patch of a run is decoded."""
    del sized  # patches have the size of image, whatever it is
    data = replace(config.data, path=path)
    report, faults, empty = DataReport(path, "slide", {}), list[str](), list[str]()
    size, channels = (config.height, config.width), config.model.channels
    slide_files(data, path)
    try:
        source = SlideSource(data, path, size, channels)
    except ConfigError as error:  # of its labels
        report.findings.append(DataFinding(ERROR, str(error)))
        return report
    counted: collections.Counter[str] = collections.Counter()
    for number in range(source.num_slides):
        name, reason = source.slide_name(number), ""
        source.keep([number])
        try:
            if not source.patches_of(number):
                empty.append(name)
            else:
                for i in range(len(source)):
                    source.check(i, _ALL)
                counted += source.classes()
        except (ConfigError, RunError) as error:
            reason = reason_of(error).partition(" (`hires data check")[0]
            faults.append(f"{name}: {reason}")
        report.images.append(CheckedImage(name, reason=reason))
        progress(len(report.images), source.num_slides)
    report.classes = {name: counted[name] for name in source.class_names}
    if faults:
        text = "slides that would end a run; replace them, take them out, or change the keys"
        report.findings.append(DataFinding(ERROR, text, faults))
    if empty:
        text, severity = "without a patch to learn from (data.tissue, data.outside)", NOTE
        if len(empty) == source.num_slides:
            severity = ERROR
        elif 2 * len(empty) > source.num_slides:
            text = f"{text}: most of the slides; a smaller image= than {size[0]} cuts more"
            severity = WARNING
        report.findings.append(DataFinding(severity, text, empty))
    report.findings = sorted_findings([*report.findings, *source.findings()])
    return report


def check_cifar10(path: str, config: RunConfig, sized: bool, progress: Progress) -> DataReport:
    """Returns what is wrong with the files of CIFAR-10; ConfigError: one is missing."""
    del sized  # all images have one size, which data.fit changes
    files = cifar10_files(replace(config.data, path=path, split="all"))
    report, faults = DataReport(path, "cifar10", {}), list[str]()
    counted = np.zeros(len(CIFAR10_CLASSES), np.int64)
    for number, file in enumerate(files, start=1):
        reason = ""
        try:
            counted += np.bincount(records_in(file)[:, 0], minlength=len(counted))
        except ConfigError as error:
            reason = str(error)
            faults.append(reason)
        report.images.append(CheckedImage(file.name, reason=reason))
        progress(number, len(files))
    report.classes = dict(zip(CIFAR10_CLASSES, counted.tolist(), strict=True))
    if faults:
        report.findings.append(DataFinding(ERROR, "files that would end a run", faults))
    return report


def uncounted_classes(report: DataReport, config: RunConfig) -> Iterator[DataFinding]:
    """Yields the classes of images, not of pixels, whose label the loss ignores."""
    if report.data in ("folder", "slide", "cifar10"):
        names = config.data.order or [*dict.fromkeys(map(_class_of_part, report.classes))]
        found = [
            names[label] for label in sorted(config.loss.ignored) if label in range(len(names))
        ]
        if found:
            text = "classes whose label does not count (loss.ignore_index, loss.weights)"
            text += ": a training learns nothing from their images"
            yield DataFinding(WARNING, text, found)


def _class_of_part(name: str) -> str:
    return name.rpartition("/")[2]  # train/cat


CHECKS = {"masks": check_masks, "slide": check_slides, "cifar10": check_cifar10}
"""By the value of ``data``."""
