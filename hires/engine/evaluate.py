"""Evaluates a network: one pass over a data set, each sample once, in any layout.

Each rank that has a part of the output counts its samples and pixels
(:mod:`hires.engine.owned_outputs`). The numbers of all ranks are those of one process
(:mod:`hires.core.evaluation_summary`). Targets are read ahead, as images are.

A metric of images may reach over the border of a tile, as SSIM does:

    own pixels of a tile       what it counts with: windows whose centres are its own
      +----------+               + - - - - - - - +
      |          |      -->      |  +----------+ |  ``reach`` pixels of its neighbours, where
      |          |                  |          |    the image continues
      +----------+               |  +----------+ |

Each window that lies inside of the image counts once, at the tile that owns its centre, so the sums
of all tiles are that of one process. Outputs of the border come from the tiles that have them,
between two steps, when no message of the plan is under way.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hires import comm
from hires.core import evaluation_summary
from hires.core.config.data_config import DataConfig
from hires.core.config.fields import keys_with
from hires.core.config.run_config import RunConfig
from hires.core.evaluation_summary import (
    CLASSES,
    IMAGES,
    PIXELS,
    ROW_KINDS,
    Evaluated,
    Numbers,
    finite,
    sample_metrics,
)
from hires.core.losses import LABELS, NUMBERS
from hires.core.store import file_names
from hires.core.store.attempts import Attempt
from hires.core.store.files import write_atomically
from hires.core.store.step_lines import EVALUATED_LINE, pass_lines
from hires.data.source import Source
from hires.engine.evaluation_intervals import mean_interval, number_intervals, overlap_intervals
from hires.engine.loader import Loader, Needs, slot_loader
from hires.engine.owned_outputs import (
    Observer,
    OwnedOutput,
    Tally,
    broken_pixels,
    names_of_classes,
    owned_output,
    row_values,
)
from hires.engine.rank_engine import RankEngine
from hires.losses.class_losses import class_scores
from hires.parallel.context import Context
from hires.parallel.halo import new_part, part, paste
from hires.parallel.loss import evaluation_loss, sample_losses
from hires.plan.graph import Graph, Rect
from hires.plan.planner import kind_of
from hires.plan.rules import TILED
from hires.plan.tiling import intersect, is_empty, own_rects

DATA_KEYS = ("name", "path", "split", *keys_with(DataConfig, "divides"))
"""Keys of the data that an evaluation, or prediction, names."""


class Evaluator(Observer):
    """Counts what this rank sees of the outputs of a step, microbatch after microbatch."""

    line = EVALUATED_LINE

    def __init__(self, config: RunConfig, source: Source, graph: Graph) -> None:
        super().__init__()
        self.kind = kind_of(config, graph)
        self._config, self._source = config, source
        self._output = graph.output
        self._size = graph.shape(graph.output)[2:]
        self._metrics = [*sample_metrics(self.kind, graph.shape(graph.output)).values()]
        self._reach = max((metric.reach for metric in self._metrics), default=0)
        self._targets: dict[int, Loader] = {}  # by direction
        self._tiles: list[tuple[Context, int, OwnedOutput, Tensor]] = []
        """Images in tiles, whose borders other ranks have: they count when the step is done."""

    def see(self, context: Context, output: Tensor) -> None:
        """Counts the output of the microbatch that a slot of the last stage has just computed."""
        seen = owned_output(context, self._config, len(self._source), output)
        if seen is None:
            return
        in_tiles = self.kind == IMAGES and context.stage.layout[self._output] == TILED
        if self.kind in ROW_KINDS:
            self.counted.rows += self._rows(seen)
            return
        target = self._next_target(context, seen, self._reach if in_tiles else 0)
        if in_tiles:
            self._tiles.append((context, context.place, seen, target))
        elif self.kind == CLASSES:
            rows = self._class_rows(seen.values, target.to(output.device))
            self.counted.rows += [[i, *row] for i, row in zip(seen.samples, rows, strict=True)]
        else:  # one by one, so that what is computed takes the memory of one sample
            for i, image, wanted in zip(seen.samples, seen.values, target, strict=True):
                self.counted.rows.append([i, *self._map_row(i, image, wanted)])

    def take_rows(self) -> Tally:
        """Returns what was counted since the last call; all ranks call it after each step."""
        # Two directions of a pipeline may share ranks, in another order on each.
        for context, _, seen, target in sorted(self._tiles, key=lambda tile: tile[1]):
            assert seen.rect is not None
            window = grown(seen.rect, self._size, self._reach)
            images = with_border(context, seen.values, self._size, self._reach)
            for i, image, wanted in zip(seen.samples, images, target.to(images), strict=True):
                self.counted.rows.append([i, *self._image_row(image, wanted, window, seen.rect)])
        self._tiles.clear()
        return super().take_rows()

    def close(self) -> None:
        """Stops the threads that read targets."""
        for loader in self._targets.values():
            loader.close()

    def _next_target(self, context: Context, seen: OwnedOutput, reach: int) -> Tensor:
        # What the samples of a microbatch are compared with: a thread reads it ahead.
        if context.direction not in self._targets:
            window = None
            if self.kind != CLASSES and seen.rect is not None:
                window = grown(seen.rect, self._size, reach)
            last = evaluation_summary.one_pass(len(self._source), self._config.batch)
            steps = range(context.step, last)
            needs = Needs(len(seen.samples), None, compares=True, target=window)
            loader = slot_loader(self._config, context, self._source, steps, needs=needs)
            self._targets[context.direction] = loader
        target = next(self._targets[context.direction]).target
        assert target is not None
        return target[: len(seen.samples)]

    def _rows(self, seen: OwnedOutput) -> Iterator[Numbers]:
        # Of labels and numbers, which stand in a table: no file is read for them.
        targets = [self._source.target(i, (0, 0), (0, 0)).tolist() for i in seen.samples]
        compared = seen.values.new_tensor(targets)
        losses = sample_losses(self._config.objective, seen.values, compared).double().tolist()
        outputs = row_values(self.kind, seen.values)
        for sample, loss, *pair in zip(seen.samples, losses, targets, outputs, strict=True):
            chosen = [[t, o > 0.5] for t, o in zip(*pair, strict=True) if math.isfinite(o)]
            exact = len(chosen) == len(pair[0]) and all(t == o for t, o in chosen)
            yield [sample, loss, *([int(exact)] * (self.kind == LABELS)), *pair[0], *pair[1]]

    def _class_rows(self, output: Tensor, labels: Tensor) -> Iterator[Numbers]:
        losses = sample_losses(self._config.objective, output, labels).double()
        output = class_scores(output)
        # Equal scores: the lower class stands first, on every kind of device.
        wanted = output.gather(1, labels[:, None])
        lower = torch.arange(output.shape[1], device=output.device) < labels[:, None]
        places = ((output > wanted) | ((output == wanted) & lower)).sum(1)
        score, predicted = output.softmax(1).double().amax(1), output.argmax(1)
        broken = ~output.isfinite().all(1)
        places[broken], predicted[broken] = output.shape[1], -1
        columns = [column.tolist() for column in (losses, labels, predicted, places, score)]
        pairs = [*zip(output, labels, strict=True)]
        columns += [[metric.count(*pair) for pair in pairs] for metric in self._metrics]
        return zip(*columns, strict=True)

    def _image_row(self, output: Tensor, wanted: Tensor, window: Rect, owned: Rect) -> Numbers:
        pair = output[None], wanted[None]
        row = []
        for metric in self._metrics:
            seen = grown(owned, self._size, metric.reach)
            row.append(metric.count(*(part(image, window, seen)[0] for image in pair)))
        images = (part(image, window, owned) for image in pair)
        loss = float(evaluation_loss(self._config.objective, *images))
        return [loss * wanted.shape[0] * (owned[1] - owned[0]) * (owned[3] - owned[2]), *row]

    def _map_row(self, sample: int, output: Tensor, target: Any) -> Numbers:
        labels = torch.as_tensor(target, device=output.device)
        if self.kind == IMAGES:
            window = (0, self._size[0], 0, self._size[1])
            return self._image_row(output, labels.to(output), window, window)
        ignored = self._config.data.ignore
        [loss] = sample_losses(self._config.objective, output[None], labels[None], ignored)
        scores = class_scores(output[None])[0]
        predicted = scores.argmax(0).masked_fill(broken_pixels(output), -1).flatten()
        labels = labels.flatten().expand(predicted.numel())
        if ignored is not None:
            counts = labels != ignored
            labels, predicted = labels[counts], predicted[counts]
            if not predicted.numel():
                return [0.0, 0, 0]
        columns = len(scores) + 1  # the first one of pixels that are not finite
        counts = torch.bincount(labels * columns + predicted + 1, minlength=len(scores) * columns)
        for key in counts.nonzero().flatten().tolist():
            self.counted.pixels[(sample, key // columns, key % columns - 1)] += int(counts[key])
        right, total = int((predicted == labels).sum()), predicted.numel()
        return [float(loss) * total, total, right]


def grown(rect: Rect, size: Sequence[int], reach: int) -> Rect:
    """Returns a tile's rectangle with the pixels of the image that are so near to it."""
    r0, r1, c0, c1 = rect
    return intersect((r0 - reach, r1 + reach, c0 - reach, c1 + reach), (0, size[0], 0, size[1]))


def with_border(context: Context, values: Tensor, size: Sequence[int], reach: int) -> Tensor:
    """Returns a tile's part of a map, (n, C, h, w), with the border of :func:`grown`.

    All tiles of the map call it together, between two steps. ``size`` is [rows, columns] of the
    whole map.
    """
    rects = own_rects(size, context.stage.tiles)
    owned = rects[context.tile]
    window = grown(owned, size, reach)
    grown_values, posts = new_part(values, window), list[comm.P2POp]()
    pieces = [(owned, values)]
    for tile, rect in enumerate(rects):
        if tile == context.tile:
            continue
        slot = context.replica, context.direction, context.stage.index, tile
        peer = context.plan.rank_of(*slot)
        if not is_empty(sent := intersect(owned, grown(rect, size, reach))):
            posts.append(comm.P2POp(comm.isend, part(values, owned, sent).contiguous(), peer))
        if not is_empty(rect := intersect(rect, window)):
            arrives = values.new_empty(new_part(values, rect).shape)
            pieces.append((rect, arrives))
            posts.append(comm.P2POp(comm.irecv, arrives, peer))
    with comm.logged(None):
        for handle in comm.batch_isend_irecv(posts):
            handle.wait()
    paste(grown_values, window, pieces, window)
    return grown_values


def evaluate_pass(engine: RankEngine, config: RunConfig, source: Source) -> dict[str, Any]:
    """Runs one pass over a data set; returns its summary, the same on all ranks.

    All ranks call it together, with an engine whose plan computes forward only. ``config`` is that
    of the evaluation. Tensors may be those of a training: then its engine is assembled anew each
    time, since inference folds and packs the weights that it finds.
    """
    evaluator, lines = Evaluator(config, source, engine.context.plan.graph), list[dict[str, Any]]()
    steps = range(evaluation_summary.one_pass(len(source), config.batch))
    loaders = [slot_loader(config, c, source, steps, engine.device) for c in engine.contexts]
    try:
        for step in steps:
            engine.executor.step(loaders, number=step, see=evaluator.see)
            lines.append(evaluator.take_rows().to_dict())
    finally:
        evaluator.close()
        for loader in loaders:
            loader.close()
    every = comm.gather_texts(json.dumps(Tally(lines).to_dict()))
    return summarised(config, source, engine.context.plan.graph, Tally(map(json.loads, every)))[0]


def summarised(
    config: RunConfig, source: Source, graph: Graph, counted: Tally
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Returns the summary of what all ranks counted, and what each sample has, by name."""
    kind, shape = kind_of(config, graph), graph.shape(graph.output)
    rows = evaluation_summary.by_sample(kind, counted.rows, len(source))
    names = names_of_classes(source, shape, kind)
    totals = Counter[tuple[int, int]]()
    for (_, label, predicted), count in counted.pixels.items():
        totals[label, predicted] += count
    columns = evaluation_summary.columns_of(kind, rows, shape)
    facts = evaluation_summary.summary(kind, columns, totals, names, shape)
    if kind == PIXELS:
        facts |= overlap_intervals(counted.pixels, len(rows), len(names))
    if kind == NUMBERS:
        facts |= number_intervals(Evaluated(kind, len(rows), columns, ()).rows())
    for name in sample_metrics(kind, shape):
        facts[f"{name}_ci95"] = mean_interval(columns[name])
    return facts, columns


def write_evaluation(
    run_dir: Path, attempt: int, config: RunConfig, source: Source, graph: Graph
) -> None:
    """Writes ``evaluation.json`` of an attempt whose ranks have all counted their last step."""
    files = Attempt(run_dir, attempt, strict=True)
    facts, columns = summarised(config, source, graph, Tally(pass_lines(files, EVALUATED_LINE)))
    facts["data"] = {key: getattr(config.data, key) for key in DATA_KEYS}
    numbers = {name: [*map(finite, column)] for name, column in columns.items()}
    facts["samples"] = {"id": [*map(source.name, range(len(source)))], **numbers}
    write_atomically(files.folder / file_names.EVALUATION, json.dumps(facts))
