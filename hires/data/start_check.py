"""Checks the images of a run before its first step, so that none of them ends it hours later.

schedule of the run   [3 0 4 1 2 | 1 4 0 2 ...    distinct files in the order of their first use
rank 0 of 2            3   4   2                  each rank checks its share
rank 1 of 2              0   1
                       decoded | only opened      as many as are decoded in a second or two, and
                                                  as are opened in ten
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path

from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.units import listed
from hires.data.image_format import ImageFile, Size, open_image
from hires.data.opening import open_source
from hires.data.order import step_images
from hires.data.source import SOURCES, PartSource, Source, looked_at
from hires.data.sources.folder import CONTENTS, naming, to_channels
from hires.data.sources.slide import SlideSource, label_files, slide_files

DECODED_BYTES = 2**27
"""Images of so many bytes, as floats, are decoded by each rank; the others are opened."""
SECONDS = 10.0
"""After so long a rank checks no other file: on a file server each may take milliseconds."""
LOOKED_PIXELS = 2**22
"""Of the images that a plan opens it reads so many whole, and the middle of one of each kind."""
FIRST_USED = 32
"""Of the images that steps read a plan looks at so many, beside those at equal distances."""
FAR = 2.0
"""An image that is shrunk more than this many times loses what the plan should say."""
DARK = 1 / 8
"""Part of the range up to white in which all values lie, below which an image is nearly black."""

log = logging.getLogger(__name__)


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
            # Steps of two epochs may read fewer different files than this.
            most = min(len(source), len(steps) * config.batch)
            share = f"the first {num_checked} of {len(range(rank, most, world))}"
            log.info("checked %s image files in %.0f s, no others before step 1", share, SECONDS)
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


def data_findings(config: RunConfig, has_maps: bool = False) -> list[tuple[str, str, str]]:
    """Returns severity, key and text of what stands out in the data of a run.

    ``has_maps``: whether it predicts maps, which have the size of their image.
    """
    if config.data.name == "slide":
        files = [*slide_files(config.data, config.data.path), *label_files(config.data)]
        marks = [(path, Path(path).stat().st_mtime_ns) for path in files]
        facts = json.dumps([vars(config.data), marks], sort_keys=True)
        findings, sizes = _slide_findings(facts, config.fitted_size, config.model.channels)
        return [*findings, *_other_sizes(config, sizes, has_maps)]
    return image_findings(config, has_maps)


@lru_cache(maxsize=8)  # plans that are compared have one data set
def _slide_findings(
    facts: str, size: Size, channels: int
) -> tuple[list[tuple[str, str, str]], list[Size]]:
    source = open_source(DataConfig(**json.loads(facts)[0]), size, channels, 0)
    sizes = [found[0] for i in looked_at(source) if (found := source.stored(i))]  # it cuts slides
    source = source.whole if isinstance(source, PartSource) else source
    assert isinstance(source, SlideSource)
    return [
        (finding.severity, "data.labels", f"{finding.text}: {listed(finding.files)}")
        for finding in source.findings()
    ], sizes


def image_findings(config: RunConfig, has_maps: bool = False) -> list[tuple[str, str, str]]:
    """Returns severity, key and text of what some images of a folder show.

    It is how they are stored, and what ``data.fit`` does to images that are much larger; a
    file that cannot be read is an error if a step of the run reads it, else a warning. Those that
    the first steps read come first, and the very first is read as far as its rank will check it.
    """
    data, sizes, faults = config.data, list[Size](), dict[int, str]()
    if data.name not in (*CONTENTS, "masks"):
        return []
    kinds: dict[tuple[str, str, int, bool], str] = {}
    found: list[tuple[str, str, str]] = []
    source = open_source(data, config.fitted_size, config.model.channels, 0)
    used = itertools.islice(_first_used(config, source, range(config.steps)), FIRST_USED)
    most, left, num_whole = DECODED_BYTES, 4 * config.model.channels * LOOKED_PIXELS, 0
    for index in dict.fromkeys([*used, *looked_at(source)]):
        path = Path(source.path(index))
        try:
            with naming(path, data), closing(open_image(path, data.max_pixels)) as image:
                sizes.append(image.size)
                facts = image.facts
                kind = facts.format, facts.colours, facts.bits, facts.is_float
                if kind not in kinds:
                    values = _values_of(image, config)
                    kinds[kind] = _words_of(image, values)
                    found += _unseen(data, path, image, values)
            num_bytes = source.check(index, most)  # its label map, too
            left, num_whole = left - num_bytes, num_whole + (num_bytes > 0)
        except RunError as error:
            faults[index], left = str(error), 0  # one fault ends a run: the others are only opened
        most = left
    read = (i for i in _first_used(config, source, range(config.steps)) if i in faults)
    if faults:
        first = next(read, None)
        severity, index = ("warning", min(faults)) if first is None else ("error", first)
        found.insert(0, (severity, "data.path", faults[index]))
    found += _shrunk(config, sizes)
    found += _other_sizes(config, sizes, has_maps)
    while isinstance(source, PartSource):
        source = source.whole
    learns = data.targets == "numbers" and config.task.name == "train"
    stds = source.rows.std(0) if learns and source.rows is not None else ()
    for name, std in zip(source.class_names, stds, strict=False):
        if not 0.1 <= std <= 10:
            text = (
                f"{name} has a deviation of {std:g}, and a training learns numbers best whose "
                f"deviation is near 1; write them in another unit into data.labels"
            )
            found.append(("warning", "data.labels", text))
    if kinds:
        opened = f"{len(sizes)} of {len(source)} images were opened, {num_whole} read whole"
        text = f"{opened}: {'; '.join(kinds.values())}"
        found.append(("note", "data.path", text))
    return found


def _values_of(image: ImageFile, config: RunConfig) -> tuple[float, float] | None:
    """Returns the least and the largest value in the middle of an image; None: it is large."""
    (height, width), band = image.size, image.facts.band
    num_rows = min(height, max(band, LOOKED_PIXELS // width))
    if num_rows * width > 4 * LOOKED_PIXELS:  # which are decoded at once
        return None
    top = (height - num_rows) // 2
    pixels = image.read((top, top + num_rows), (0, width))
    pixels = to_channels(pixels, image.colours, config.model.channels, config.data.bands)
    return float(pixels.min()), float(pixels.max())


def _words_of(image: ImageFile, values: tuple[float, float] | None) -> str:
    facts = image.facts
    bits = f"{facts.bits} bit{'s' * (facts.bits > 1)}{' (float)' * facts.is_float}"
    text = f"{facts.format}, {facts.colours}, {bits}"
    if values is None:
        return text
    return f"{text}, values {values[0]:g} to {values[1]:g} of {image.peak:g}"


def _unseen(
    data: DataConfig, path: Path, image: ImageFile, values: tuple[float, float] | None
) -> Iterator[tuple[str, str, str]]:
    # What a network does not see of an image.
    if others := image.facts.unread_pages:
        text = (
            f"{path.name} has {others} more pages of one size, which no run reads; write each to a "
            f"file of its own, or name the axis of channels (OME-TIFF)"
        )
        yield "warning", "data.path", text
    largest = image.peak if values is None else values[1]
    is_dark = 0 < largest < DARK * image.peak
    if is_dark and data.normalize == "white" and data.mean is None:
        text = (
            f"{path.name} has no value above {largest:g} of {image.peak:g}, so a network sees it "
            f"nearly black; data.normalize=dataset uses the mean and deviation of the images"
        )
        yield "warning", "data.normalize", text


def _other_sizes(
    config: RunConfig, sizes: Sequence[Size], has_maps: bool
) -> Iterator[tuple[str, str, str]]:
    height, width = config.fitted_size
    others = [size for size in sizes if size != (height, width)]
    if has_maps and others and config.data.fit != "error":
        times = "" if config.target_size is None or config.has_pairs else ", times model.scale"
        how = f"they are resized, and their maps have the size of the image{times}"
        if config.data.crops:
            how = "the middle is predicted, and what lies around it is marked in their maps"
        text = (
            f"{len(others)} of {len(sizes)} images that were looked at are not {height} x {width} "
            f"pixels, as {others[0][0]} x {others[0][1]}: {how} (data.fit={config.data.fit})"
        )
        yield "note", "data.fit", text


def _shrunk(config: RunConfig, sizes: Sequence[Size]) -> Iterator[tuple[str, str, str]]:
    height, width = config.fitted_size
    shrunk = [size for size in sizes if max(size[0] / height, size[1] / width) > FAR]
    if config.data.fit == "resize" and shrunk:
        which = "all" if len(shrunk) == len(sizes) else f"{len(shrunk)} of the {len(sizes)}"
        text = (
            f"data.fit=resize shrinks {which} images that were looked at more than twice, as "
            f"{max(shrunk)[0]} x {max(shrunk)[1]} pixels to {height} x {width}: small things "
            f"vanish; a larger image= keeps them, data.fit=crop takes the middle instead"
        )
        yield "note", "data.fit", text
