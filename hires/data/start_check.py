"""Checks the images of a run before its first step, so that none of them ends it hours later.

schedule of the run   [3 0 4 1 2 | 1 4 0 2 ...    distinct files in the order of their first use
rank 0 of 2            3   4   2                  each rank checks its share
rank 1 of 2              0   1
                       decoded | only opened      as many as are decoded in a second or two
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.data.folder import CONTENTS, naming, scan
from hires.data.image_format import open_image
from hires.data.source import PairSource, Source, step_indices

DECODED_BYTES = 2**27
"""Images of so many bytes, as floats, are decoded by each rank; the others are opened."""
OPENED = 20_000
"""Files that each rank opens at most: ten seconds where a file takes half a millisecond."""
LOOKED_AT = 64
"""Headers from which the plan judges the sizes of all images."""
FAR = 2.0
"""An image that is shrunk more than this many times loses what the plan should say."""

log = logging.getLogger(__name__)


def require_readable(
    config: RunConfig, source: Source | PairSource, steps: Iterable[int], rank: int, world: int
) -> None:
    """Checks this rank's share of the files that some steps read; RunError: one is unreadable."""
    if config.data.name not in CONTENTS:
        return
    left, own = DECODED_BYTES, _first_used(config, len(source), steps, OPENED * world)[rank::world]
    for index in own:
        left -= source.check(index, left)
    log.debug("%d image files can be read", len(own))


def _first_used(config: RunConfig, length: int, steps: Iterable[int], most: int) -> list[int]:
    """Returns the images of some steps, each once, in the order of their first use."""
    seen: dict[int, None] = {}
    for step in steps:
        if len(seen) >= min(length, most):
            break
        shuffle = config.data.shuffle
        seen |= dict.fromkeys(step_indices(step, config.batch, length, config.seed, shuffle))
    return list(itertools.islice(seen, most))


def size_finding(config: RunConfig) -> tuple[str, str, str] | None:
    """Returns severity, key and text of what some headers say of the images; None: nothing.

    It is what ``data.fit=resize`` does to images that are much larger, or a file that cannot be
    opened.
    """
    data, sizes = config.data, []
    if data.name not in CONTENTS:
        return None
    try:
        paths, root = scan(data.path, data.name).paths, data.path or ""
        for path in map(Path, paths[:: -(-len(paths) // LOOKED_AT)]):
            with naming(path, root), closing(open_image(path, data.max_pixels)) as image:
                image.check_complete()
                sizes.append(image.size)
    except RunError as error:
        return "warning", "data.path", str(error)
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
