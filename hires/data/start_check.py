"""Looks at images before the first step of a run, so that none of them ends it hours later.

schedule of the run   [3 0 4 1 2 | 1 4 0 2 ...    distinct files in the order of their first use
rank 0 of 2            3   4   2                  each rank checks its share
rank 1 of 2              0   1
                       decoded | only opened      as many as are decoded in a second or two, and
                                                  as are opened in ten

A plan looks at some of them in one process, and predicts the memory that reading them takes.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.data.image_fit import BAND_PIXELS
from hires.data.image_format import ImageFacts, ImageFile, Size, open_image
from hires.data.opening import open_source
from hires.data.order import step_images
from hires.data.source import (
    ERROR,
    NOTE,
    SOURCES,
    WARNING,
    DataFinding,
    PartSource,
    Source,
    looked_at,
)
from hires.data.sources.folder import CONTENTS, FolderSource, naming, to_channels
from hires.data.sources.slide import SlideSource, label_files, slide_files

DECODED_BYTES = 2**27
"""Images of so many bytes, as floats, are decoded by each rank and a plan; others are opened."""
SECONDS = 10.0
"""After so long a rank checks no other file: on a file server each may take milliseconds."""
FIRST_USED = 32
"""Of the images that steps read a plan looks at so many, beside those at equal distances."""
_FAR = 2.0
"""An image that is shrunk more than this many times loses small things."""
_DARK = 1 / 8
"""Part of the range up to white in which all values lie, below which an image is nearly black."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckedImage:
    """One file that was opened."""

    path: str
    size: Size = (0, 0)
    facts: ImageFacts | None = None
    digest: bytes = b""
    """Of its pixels, as a run sees them, if all were decoded."""
    brightest: float = 1.0
    """Share of white, if it was decoded."""
    reason: str = ""
    """Why it cannot be read."""


def require_readable(
    config: RunConfig, source: Source, steps: range, rank: int, world: int
) -> None:
    """Checks this rank's share of the files that some steps read, for ``SECONDS``.

    RunError: one is unreadable.
    """
    if not SOURCES[config.data.name].reads_files:
        return
    began_s, left, num_checked = time.monotonic(), DECODED_BYTES, 0
    for index in itertools.islice(_first_used(config, source, steps), rank, None, world):
        if time.monotonic() - began_s > SECONDS:
            log.info("checked %d image files in %.0f s, no others", num_checked, SECONDS)
            return
        left -= source.check(index, left)
        num_checked += 1
    log.info("checked all %d image files of this rank", num_checked)


def _first_used(config: RunConfig, source: Source, steps: range) -> Iterator[int]:
    """Yields the images of some steps, each once, in the order of their first use."""
    seen: set[int] = set()
    for step in steps:
        if len(seen) == len(source):
            break
        for index in step_images(config, source, step):
            if index not in seen:
                seen.add(index)
                yield index


def data_findings(config: RunConfig, has_maps: bool = False) -> list[DataFinding]:
    """Returns what stands out in the data of a run.

    ``has_maps``: whether it predicts maps, which have the size of their image.
    """
    if config.data.name != "slide":
        return image_findings(config, has_maps)
    files = [*slide_files(config.data, config.data.path), *label_files(config.data)]
    marks = [(path, Path(path).stat().st_mtime_ns) for path in files]
    facts = json.dumps([vars(config.data), marks], sort_keys=True)
    findings, images = _slide_findings(facts, config.fitted_size, config.model.channels)
    return [*findings, *stored_findings(images, config, has_maps)]


@lru_cache(maxsize=8)  # plans that are compared have one data set
def _slide_findings(
    facts: str, size: Size, channels: int
) -> tuple[list[DataFinding], list[CheckedImage]]:
    source = open_source(DataConfig(**json.loads(facts)[0]), size, channels, 0)
    images = [
        CheckedImage(source.name(i), found[0])
        for i in looked_at(source)
        if (found := source.stored(i))  # it cuts slides
    ]
    source = source.whole if isinstance(source, PartSource) else source
    assert isinstance(source, SlideSource)
    return source.findings(), images


def image_findings(config: RunConfig, has_maps: bool = False) -> list[DataFinding]:
    """Returns what some images of a folder show.

    It is how they are stored, and what ``data.fit`` does to images that are much larger; a
    file that cannot be read is an error if a step of the run reads it, else a warning. Those that
    the first steps read come first, and the very first is read as far as its rank will check it.
    """
    data, images, faults = config.data, list[CheckedImage](), dict[int, str]()
    if data.name not in (*CONTENTS, "masks"):
        return []
    kinds: dict[tuple[str, str, str], str] = {}
    source = open_source(data, config.fitted_size, config.model.channels, 0)
    used = itertools.islice(_first_used(config, source, range(config.steps)), FIRST_USED)
    left, num_whole = DECODED_BYTES, 0
    for index in dict.fromkeys([*used, *looked_at(source)]):
        path = Path(source.path(index))
        try:
            with naming(path, data), closing(open_image(path, data.max_pixels)) as image:
                facts, brightest = image.facts, 1.0
                bits = f"{facts.bits} bit{'s' * (facts.bits > 1)}{' (float)' * facts.is_float}"
                kind = facts.format, facts.colours, bits
                if kind not in kinds:
                    values = _values_of(image, config)
                    kinds[kind] = ""
                    if values is not None:
                        kinds[kind] = ", values {:g} to {:g} of {:g}".format(*values, image.peak)
                        brightest = values[1] / image.peak
                images.append(CheckedImage(path.name, image.size, facts, brightest=brightest))
            num_bytes = source.check(index, left)  # its label map, too
            left, num_whole = left - num_bytes, num_whole + (num_bytes > 0)
        except RunError as error:
            faults[index], left = str(error), 0  # one fault ends a run: the others are only opened
    findings = []
    if faults:
        read = (i for i in _first_used(config, source, range(config.steps)) if i in faults)
        first = next(read, None)
        severity, index = (WARNING, min(faults)) if first is None else (ERROR, first)
        findings.append(DataFinding(severity, faults[index]))
    findings += [*stored_findings(images, config, has_maps), *_far_numbers(config, source)]
    if kinds:
        text = f"{len(images)} of {len(source)} images were opened, {num_whole} read whole"
        each = "; ".join(", ".join(kind) + values for kind, values in kinds.items())
        findings.append(DataFinding(NOTE, f"{text}: {each}"))
    return findings


def _values_of(image: ImageFile, config: RunConfig) -> tuple[float, float] | None:
    """Returns the least and the largest value in the middle of an image; None: it is large."""
    (height, width), band = image.size, image.facts.band
    num_rows = min(height, max(band, BAND_PIXELS // width))
    if num_rows * width > 4 * BAND_PIXELS:  # which are decoded at once
        return None
    top = (height - num_rows) // 2
    pixels = image.read((top, top + num_rows), (0, width))
    pixels = to_channels(pixels, image.colours, config.model.channels, config.data.bands)
    return float(pixels.min()), float(pixels.max())


def _far_numbers(config: RunConfig, source: Source) -> Iterator[DataFinding]:
    while isinstance(source, PartSource):
        source = source.whole
    if config.data.targets != "numbers" or config.task.name != "train" or source.rows is None:
        return
    for name, std in zip(source.class_names, source.rows.std(0), strict=True):
        if not 0.1 <= std <= 10:
            text = (
                f"{name} has a deviation of {std:g}, and a training learns numbers best whose "
                f"deviation is near 1; write them in another unit into data.labels"
            )
            yield DataFinding(WARNING, text, key="data.labels")


def stored_findings(
    images: Iterable[CheckedImage], config: RunConfig, sized: bool
) -> Iterator[DataFinding]:
    """Yields what a network does not see of images as they are stored, of other sizes if asked."""
    known = [one for one in images if not one.reason]
    for text, key, is_so in _LOOKS:
        if key != "data.normalize" or (config.data.normalize == "white" and not config.data.mean):
            files = [one.path for one in known if one.facts and is_so(one.facts, one.brightest)]
            if files:
                yield DataFinding(WARNING, text, files, key)
    (height, width), fit = config.fitted_size, config.data.fit
    far = [one for one in known if max(one.size[0] / height, one.size[1] / width) > _FAR]
    others = [one for one in known if one.size != (height, width)] if sized else []
    if others:
        how = f"{'cropped or padded' if config.data.crops else 'resized'} to {height} x {width}"
        maps = "marked around the crop" if config.data.crops else "of the size of the image"
        severity, text = NOTE, f"{how} pixels (data.fit={fit})"
        if config.task.name == "predict":
            text += f"; predicted maps are {maps}"
        if fit == "error":
            severity, text = ERROR, f"not of {height} x {width} pixels, as data.fit=error asks for"
        yield DataFinding(severity, text, _sizes(others), "data.fit")
    if fit == "resize" and far:
        text = (
            f"shrunk more than twice to {height} x {width} pixels: small things vanish; a larger "
            f"image= keeps them, data.fit=crop takes the middle instead"
        )
        yield DataFinding(WARNING, text, _sizes(far), "data.fit")


def _sizes(images: Sequence[CheckedImage]) -> list[str]:
    return [f"{one.path}: {one.size[0]} x {one.size[1]}" for one in images]


_LOOKS: tuple[tuple[str, str, Callable[[ImageFacts, float], bool]], ...] = (
    ("shown rotated or mirrored elsewhere (EXIF); a run reads the rows as they are stored",
     "data.path", lambda facts, brightest: facts.is_rotated),
    ("with more pages of one size, which no run reads; write each to a file of its own, or name "
     "the axis of channels (OME-TIFF)", "data.path",
     lambda facts, brightest: facts.unread_pages > 0),
    ("with 16 bits a colour, of which 8 are read; save them as TIFF to keep all", "data.path",
     lambda facts, brightest: facts.format == "PNG" and facts.bits > 8 and facts.colours != "grey"),
    ("nearly black: a network sees no value above an eighth of white; data.normalize=dataset uses "
     "the mean and deviation of the images", "data.normalize",
     lambda facts, brightest: facts.bits > 8 and 0 < brightest < _DARK),
)  # fmt: skip
"""What stands out in how images are stored: text, key, and of which images."""


def decoding_bytes(config: RunConfig) -> int:
    """Returns the memory that a rank takes to read one image of a file, beside its window.

    It is that of the decoder of the largest image (all of a PNG or JPEG, of a TIFF a strip or
    tile), of the last decoded ones that are kept, and of a band that is resized. Slides are read in
    small pieces; files of arrays may be there as a whole. Errors are those of :meth:`Source.open`.
    """
    reads_files = SOURCES[config.data.name].reads_files and config.data.path is not None
    if not reads_files or config.data.name == "slide":
        return 0
    size = config.fitted_size
    return _decoding_bytes(json.dumps(vars(config.data)), size, config.model.channels)


@lru_cache(maxsize=8)  # plans that are compared have one data set
def _decoding_bytes(facts: str, target: Size, channels: int) -> int:
    from hires.data.formats.pillow import CACHE_BYTES

    data = DataConfig(**json.loads(facts))
    source = SOURCES[data.name].open(data, target, channels, 0)
    most = kept = 0
    for index in looked_at(source) if isinstance(source, FolderSource) else ():
        path = Path(source.path(index))
        try:
            with naming(path, data), closing(open_image(path, data.max_pixels)) as image:
                decoding, keeps = image.facts.decoding_bytes, image.facts.kept_bytes
                resizing = _resizing_bytes(image.size, target) if data.fit == "resize" else 0
                # All of it is decoded before it is resized, or a part for each band.
                resizing = channels * resizing + (keeps or decoding)
                most, kept = max(most, decoding, resizing), max(kept, keeps)
        except RunError:
            continue  # the checks before a run name it
    return most + min(CACHE_BYTES, kept * (len(source) - 1)) + source.kept_bytes


def _resizing_bytes(source: Size, target: Size) -> int:
    # Of one sample a pixel.
    if source == target:
        return 0
    pixels = min(BAND_PIXELS, source[0] * source[1])  # of a band, copied
    shrunk = pixels / max(1.0, source[0] / target[0])  # as floats, for a tap, and once more
    return int(pixels + 12 * shrunk)
