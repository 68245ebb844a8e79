"""Maps a rank's output to the samples and the image region that it owns.

    step 0        step 1        step 2       batch = 4, 10 samples: the images after the last one
    [0 1 2 3]     [4 5 6 7]     [8 9 0 1]    fill the batch and count nowhere
                                     ^ ^
Of outputs that are whole on all tiles the first one counts, so over all ranks each sample, and each
pixel of its map, is there once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hires.core.config.run_config import RunConfig
from hires.core.evaluation_summary import CLASSES, ROW_KINDS, Numbers, num_classes
from hires.core.losses import LABELS
from hires.data.source import Source
from hires.parallel.context import Context
from hires.plan.graph import Rect
from hires.plan.rules import SHARDED, TILED, WHOLE


class OwnedOutput(NamedTuple):
    """The output of a microbatch, as far as this rank's count."""

    samples: range
    """Their numbers in the data set."""
    values: Tensor
    """(n, classes), or (n, C, h, w) of the part of the map; float32 or float64."""
    rect: Rect | None
    """This part; None: there are no rows and columns."""


class Tally:
    """What ranks counted: rows by sample, and pixels by (sample, class, predicted class).

    A row has the number of the sample, then what ``evaluation_summary.ROWS`` names, or what is
    predicted. The predicted class of a pixel is -1 where the output is not finite.
    """

    def __init__(self, lines: Iterable[dict[str, Any]] = ()) -> None:
        """``lines`` are what :meth:`to_dict` returned elsewhere."""
        self.rows: list[Numbers] = []
        self.pixels = Counter[tuple[int, int, int]]()
        for line in lines:
            self.rows += line["rows"]
            for *key, number in line["pixels"]:
                self.pixels[tuple(key)] += number

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return {"rows": self.rows, "pixels": [[*key, n] for key, n in self.pixels.items()]}


class Observer:
    """What looks at the outputs of a pass, microbatch after microbatch, and counts samples."""

    line: ClassVar[str]
    """Kind of the lines of ``metrics.jsonl`` that hold what it found in a step."""

    def __init__(self) -> None:
        self.counted = Tally()

    def prepare(self, step: int) -> None:
        """Makes what all ranks write into during a step, before its barrier."""

    def see(self, context: Context, output: Tensor) -> None:
        """Takes the output of the microbatch that a slot of the last stage has just computed."""
        raise NotImplementedError

    def take_rows(self) -> Tally:
        """Returns what was counted since the last call; all ranks call it after each step."""
        counted, self.counted = self.counted, Tally()
        return counted

    def close(self) -> None:
        """Stops the threads that read for it."""


def names_of_classes(source: Source, shape: Sequence[int], kind: str = CLASSES) -> list[str]:
    """Returns the names of the classes, or numbers, of an output of a shape; none of images."""
    count = shape[1] if kind in ROW_KINDS else num_classes(shape)
    return [*source.class_names, *map(str, range(source.num_classes, count))]


def owned_output(
    context: Context, config: RunConfig, num_samples: int, output: Tensor
) -> OwnedOutput | None:
    """Returns what counts of a slot's output, of a data set of some samples; None: nothing."""
    graph = context.plan.graph
    layout, shape = context.stage.layout[graph.output], graph.shape(graph.output)
    if layout == WHOLE and context.tile:
        return None  # tile 0 has the same
    first, end = context.samples if layout == SHARDED else (0, len(output))
    start = context.step * config.batch + context.first_sample + first
    samples = range(start, min(start + end - first, num_samples))
    if not samples:
        return None
    output = output[: len(samples)].detach()
    output = output if output.dtype == torch.float64 else output.float()
    rect = context.band or ((0, shape[2], 0, shape[3]) if len(shape) == 4 else None)
    if layout == TILED:
        rect = context.own_of(graph.output)
    return OwnedOutput(samples, output, rect)


def row_values(kind: str, output: Tensor) -> list[list[float]]:
    """Returns the probabilities of labels, or the numbers, of each sample; NaN: not all finite."""
    values = output.double().sigmoid() if kind == LABELS else output.double()
    return values.masked_fill(~output.isfinite().all(1, True), math.nan).tolist()


def broken_pixels(output: Tensor) -> Tensor:
    """Returns where the numbers of a map, (C, h, w), are not all finite, (h, w)."""
    return ~output.isfinite().all(0)
