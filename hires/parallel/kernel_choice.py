"""Chooses the fastest of the kernels that compute the same bits: by a short measurement, kept.

    node, shape of its input      candidates          turns                   kept
    1x1, stride 2, 64 x 64    ->  the whole map       2.9  2.9  2.8 ms
                                  picked pixels       2.4  2.3  2.3 ms   -->  {"...": "picked"}

The first candidate is the one that is taken without a measurement: for little work, in a rehearsal
of memory, where torch compiles. Another one is taken only if it is faster in most turns and has the
same bits on random numbers, for a part of the map where that is large. So ranks, and runs, may
choose differently.

Choices are kept for each processor, number of threads and version of torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from hires.core.errors import HiresError
from hires.core.store.cache import mark_of
from hires.core.store.files import append_line, cache_dir, make_folder
from hires.core.store.provenance import processor_kind
from hires.core.store.reading import Note, read_lines

LEAST_WORK = 5_000_000
"""Multiplications below which the first candidate is taken: a call's own time is most of it."""
MOST_NUMBERS = 2**22
"""Numbers of a map that kernels are measured on; larger maps are as fast by pixel."""
TURNS = 5
GAIN = 0.97
"""Share of the first candidate's time that another one may take at most."""

log = logging.getLogger(__name__)


def fastest(
    what: Mapping[str, Any],
    work: int,
    names: Sequence[str],
    build: Callable[[str], Callable[[], Tensor]],
) -> str:
    """Returns the name of the kernel to take for ``what``, which are plain values.

    ``build`` makes what computes one of the kernels, always on the same inputs, with ``work``
    multiplications.
    """
    if len(names) == 1 or work < LEAST_WORK or _computes_shapes():
        return names[0]
    path, key = _path(torch.get_num_threads()), json.dumps(what, sort_keys=True)
    kept = _kept(path)
    if kept.get(key) in names:
        return kept[key]
    kept[key] = _measured(names, build)
    try:
        make_folder(path.parent)
        line = {"what": what, "kernel": kept[key], "sha256": mark_of(what, kept[key])}
        append_line(path, line, locked=True)
    except HiresError as error:
        log.debug("the choice of a kernel is not kept: %s", error)
    return kept[key]


def sample_shape(shape: Sequence[int], channels: int) -> list[int]:
    """Returns the part of a map (n, C, H, W) that kernels are measured on: fewer images and rows.

    ``channels`` are those of the result.
    """
    n, _, height, width = shape
    most = max(shape[1], channels)
    n = max(1, min(n, MOST_NUMBERS // (most * height * width)))
    height = max(min(height, 64), min(height, MOST_NUMBERS // (n * most * width)))
    return [n, shape[1], height, width]


def random_numbers(shape: Sequence[int]) -> Tensor:
    """Returns numbers of 0 to 255 in channels-last order, always the same."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(256, tuple(shape), generator=generator, dtype=torch.uint8)
    return numbers.contiguous(memory_format=torch.channels_last)


def _computes_shapes() -> bool:
    # In a rehearsal of memory, and where torch compiles.
    return torch.compiler.is_compiling() or detect_fake_mode() is not None


def _path(threads: int) -> Path:
    facts = processor_kind(), torch.__version__, threads
    return (
        cache_dir() / "kernels" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.jsonl"
    )


@functools.cache
def _kept(path: Path) -> dict[str, str]:
    # Of equal keys the first: all ranks that start later take the same one.
    notes: list[Note] = []
    kept: dict[str, str] = {}
    for line in read_lines(path, notes):
        if line.get("sha256") == mark_of(line.get("what"), line.get("kernel")):
            kept.setdefault(json.dumps(line.get("what"), sort_keys=True), line["kernel"])
        else:
            log.warning("the choice of a kernel is made again: a line of %s has changed", path)
    for one in notes:
        log.debug("%s: %s", one.where, one.text)
    return kept


def _measured(names: Sequence[str], build: Callable[[str], Callable[[], Tensor]]) -> str:
    kernels = {name: build(name) for name in names}
    first, expected = names[0], kernels[names[0]]()
    # The first one stands, also where it makes NaN, which equals nothing.
    same = [first, *(name for name in names[1:] if torch.equal(kernels[name](), expected))]
    turns = [{name: _seconds(kernels[name]) for name in same} for _ in range(TURNS)]
    best = min(same, key=lambda name: sorted(turn[name] for turn in turns)[TURNS // 2])
    wins = sum(turn[best] < GAIN * turn[first] for turn in turns)
    return best if 2 * wins > TURNS else first


def _seconds(compute: Callable[[], Tensor]) -> float:
    begin = time.perf_counter()
    compute()
    return time.perf_counter() - begin
