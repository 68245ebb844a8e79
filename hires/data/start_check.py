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
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from pathlib import Path

from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.units import listed
from hires.data.image_format import Size, open_image
from hires.data.opening import open_source
from hires.data.order import step_images
from hires.data.source import SOURCES, PartSource, Source
from hires.data.sources.folder import CONTENTS, naming
from hires.data.sources.slide import SlideSource, label_files, slide_files

DECODED_BYTES = 2**27
"""Images of so many bytes, as floats, are decoded by each rank; the others are opened."""
SECONDS = 10.0
"""After so long a rank checks no other file: on a file server each may take milliseconds."""
LOOKED_AT = 64
"""Headers from which the plan judges the sizes of all images."""
FAR = 2.0
"""An image that is shrunk more than this many times loses what the plan should say."""

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


def data_findings(config: RunConfig) -> list[tuple[str, str, str]]:
    """Returns severity, key and text of what stands out in the data of a run."""
    if config.data.name == "slide":
        files = [*slide_files(config.data, config.data.path), *label_files(config.data)]
        marks = [(path, Path(path).stat().st_mtime_ns) for path in files]
        facts = json.dumps([vars(config.data), marks], sort_keys=True)
        size = config.target_size or (config.height, config.width)
        return _slide_findings(facts, size, config.model.channels)
    about = size_finding(config)
    return [] if about is None else [about]


@lru_cache(maxsize=8)  # plans that are compared have one data set
def _slide_findings(facts: str, size: Size, channels: int) -> list[tuple[str, str, str]]:
    source = open_source(DataConfig(**json.loads(facts)[0]), size, channels, 0)
    assert len(source)  # which cuts the slides
    source = source.whole if isinstance(source, PartSource) else source
    assert isinstance(source, SlideSource)
    found = []
    for one in source.findings():
        found.append((one.severity, "data.labels", f"{one.text}: {listed(one.files)}"))
    return found


def size_finding(config: RunConfig) -> tuple[str, str, str] | None:
    """Returns severity, key and text of what some headers say of the images; None: nothing.

    It is a file that cannot be opened, an error if a step of the run reads it, or what
    ``data.fit=resize`` does to images that are much larger.
    """
    data, sizes = config.data, []
    if data.name not in CONTENTS:
        return None
    faults: dict[int, str] = {}
    source = open_source(data, config.image, config.model.channels, 0)
    for index in range(0, len(source), -(-len(source) // LOOKED_AT)):
        path = Path(source.path(index))
        try:
            with naming(path, data), closing(open_image(path, data.max_pixels)) as image:
                image.check_complete()
                sizes.append(image.size)
        except RunError as error:
            faults[index] = str(error)
    if faults:
        read = (i for i in _first_used(config, source, range(config.steps)) if i in faults)
        first = next(read, None)
        if first is not None:
            return "error", "data.path", faults[first]
        return "warning", "data.path", next(iter(faults.values()))
    height, width = config.target_size or (config.height, config.width)
    shrunk = [size for size in sizes if max(size[0] / height, size[1] / width) > FAR]
    if data.fit != "resize" or not shrunk:
        return None
    which = "all" if len(shrunk) == len(sizes) else f"{len(shrunk)} of the {len(sizes)}"
    text = (
        f"data.fit=resize shrinks {which} images that were looked at more than twice, as "
        f"{max(shrunk)[0]} x {max(shrunk)[1]} pixels to {height} x {width}: small things vanish; a "
        f"larger image= keeps them, data.fit=crop takes the middle instead"
    )
    return "note", "data.fit", text
