"""Evaluates a network: one pass over a data set, each sample once, in any layout.

Each rank that sees the output counts its own samples and pixels (:mod:`hires.engine.seen_outputs`).
The numbers of all ranks are those of one process (:mod:`hires.core.evaluation_summary`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hires import comm
from hires.core import evaluation_summary
from hires.core.config.run_config import RunConfig
from hires.core.evaluation_metrics import CLASSES, IMAGES, PIXELS, sample_metrics
from hires.core.evaluation_summary import Numbers, finite
from hires.core.store import file_names
from hires.core.store.attempts import Attempt
from hires.core.store.files import write_atomically
from hires.core.store.step_lines import EVALUATED_LINE, pass_lines
from hires.data.source import Source
from hires.engine.build import RankEngine
from hires.engine.evaluation_intervals import mean_interval, overlap_intervals
from hires.engine.loader import slot_loader, target_of
from hires.engine.seen_outputs import (
    Counted,
    SeenOutput,
    broken_pixels,
    merged,
    names_of_classes,
    seen_output,
)
from hires.engine.tile_borders import grown, with_border
from hires.losses.class_losses import class_scores
from hires.parallel.context import Context
from hires.parallel.halo import part
from hires.parallel.loss import evaluation_loss, sample_losses
from hires.plan.graph import Graph, Rect
from hires.plan.rules import TILED
from hires.plan.validation import kind_of

DATA_KEYS = ("name", "path", "split", "split_file", "validation", "test", "split_seed")
"""Keys of the data that an evaluation, or prediction, names."""


class Evaluator:
    """Counts what this rank sees of the outputs of a step, microbatch after microbatch."""

    line = EVALUATED_LINE

    def __init__(self, config: RunConfig, source: Source, graph: Graph) -> None:
        self.kind = kind_of(config, graph)
        self.counted = Counted()
        self._config, self._source = config, source
        self._output = graph.output
        self._size = graph.shape(graph.output)[2:]
        self._metrics = [*sample_metrics(self.kind, graph.shape(graph.output)).values()]
        self._reach = max((one.reach for one in self._metrics), default=0)
        self._tiles: list[tuple[Context, int, SeenOutput]] = []
        """Images in tiles, whose borders other ranks have: they count when the step is done."""

    def prepare(self, step: int) -> None:
        """Makes nothing: ranks write lines of their own."""

    def see(self, context: Context, output: Tensor) -> None:
        """Counts the output of the microbatch that a slot of the last stage has just computed."""
        seen = seen_output(context, self._config, len(self._source), output)
        if seen is None:
            return
        if self.kind == IMAGES and context.stage.layout[self._output] == TILED:
            self._tiles.append((context, context.place, seen))
            return
        target = target_of(self._source, None if self.kind == CLASSES else seen.rect)
        for sample, numbers in self._rows(seen.samples, seen.values, target):
            self.counted.rows.append([sample, *numbers])

    def drain(self) -> Counted:
        """Returns what was counted since the last call; all ranks call it after each step."""
        # Two directions of a pipeline may share ranks, in another order on each.
        for context, _, seen in sorted(self._tiles, key=lambda one: one[1]):
            self._count_tile(context, seen)
        self._tiles.clear()
        counted, self.counted = self.counted, Counted()
        return counted

    def _count_tile(self, context: Context, seen: SeenOutput) -> None:
        assert seen.rect is not None
        window = grown(seen.rect, self._size, self._reach)
        images = with_border(context, seen.values, self._size, self._reach)
        target = target_of(self._source, window)
        for sample, image in zip(seen.samples, images, strict=True):
            wanted = torch.from_numpy(target(sample)).to(image)
            row = self._image_row(image, wanted, window, seen.rect)
            self.counted.rows.append([sample, *row])

    def _rows(self, samples: range, output: Tensor, target: Any) -> Iterable[tuple[int, Numbers]]:
        if self.kind == CLASSES:
            labels = torch.tensor([*map(target, samples)], device=output.device)
            return zip(samples, self._class_rows(output, labels), strict=True)
        # One by one, so that what is computed takes the memory of one sample.
        pairs = zip(samples, output, strict=True)
        return ((i, self._map_row(i, one, target(i))) for i, one in pairs)

    def _class_rows(self, output: Tensor, labels: Tensor) -> Iterator[Numbers]:
        losses = sample_losses(self._config.objective, output, labels).double()
        output = class_scores(output)
        # Equal scores: the lower class stands first, on every kind of device.
        own = output.gather(1, labels[:, None])
        lower = torch.arange(output.shape[1], device=output.device) < labels[:, None]
        places = ((output > own) | ((output == own) & lower)).sum(1)
        score, predicted = output.softmax(1).double().amax(1), output.argmax(1)
        broken = ~output.isfinite().all(1)
        places[broken], predicted[broken] = output.shape[1], -1
        columns = [one.tolist() for one in (losses, labels, predicted, places, score)]
        pairs = [*zip(output, labels, strict=True)]
        columns += [[one.count(*pair) for pair in pairs] for one in self._metrics]
        return zip(*columns, strict=True)

    def _image_row(self, output: Tensor, wanted: Tensor, window: Rect, own: Rect) -> Numbers:
        pair = output[None], wanted[None]
        row = []
        for metric in self._metrics:
            seen = grown(own, self._size, metric.reach)
            row.append(metric.count(*(part(one, window, seen)[0] for one in pair)))
        loss = evaluation_loss(self._config.objective, *(part(one, window, own) for one in pair))
        return [float(loss) * wanted.shape[0] * (own[1] - own[0]) * (own[3] - own[2]), *row]

    def _map_row(self, sample: int, output: Tensor, target: Any) -> Numbers:
        if self.kind == IMAGES:
            whole = (0, self._size[0], 0, self._size[1])
            return self._image_row(output, torch.from_numpy(target).to(output), whole, whole)
        labels = torch.as_tensor(target, device=output.device)
        ignored = self._config.data.ignore
        [loss] = sample_losses(self._config.objective, output[None], labels[None], ignored)
        scores = class_scores(output[None])[0]
        made = scores.argmax(0).masked_fill(broken_pixels(output), -1).flatten()
        labels = labels.flatten().expand(made.numel())
        if ignored is not None:
            counts = labels != ignored
            labels, made = labels[counts], made[counts]
            if not made.numel():
                return [0.0, 0, 0]
        columns = len(scores) + 1  # the first one of pixels that are not finite
        counts = torch.bincount(labels * columns + made + 1, minlength=len(scores) * columns)
        for key in counts.nonzero().flatten().tolist():
            self.counted.pixels[(sample, key // columns, key % columns - 1)] += int(counts[key])
        return [float(loss) * made.numel(), made.numel(), int((made == labels).sum())]


def evaluate_pass(engine: RankEngine, config: RunConfig, source: Source) -> dict[str, Any]:
    """Runs one pass over a data set; returns its summary, the same on all ranks.

    All ranks call it together, with an engine whose plan computes forward only. ``config`` is that
    of the evaluation. Tensors may be those of a training: then its engine is assembled anew each
    time, since inference folds and packs the weights that it finds.
    """
    evaluator, own = Evaluator(config, source, engine.context.plan.graph), Counted()
    steps = range(evaluation_summary.one_pass(len(source), config.batch))
    loaders = [slot_loader(config, c, source, steps, engine.device) for c in engine.contexts]
    try:
        for step in steps:
            engine.executor.step(loaders, number=step, see=evaluator.see)
            own.add(evaluator.drain().to_dict())
    finally:
        for loader in loaders:
            loader.close()
    every = Counted()
    for text in comm.gather_texts(json.dumps(own.to_dict())):
        every.add(json.loads(text))
    return summarised(config, source, engine.context.plan.graph, every)[0]


def summarised(
    config: RunConfig, source: Source, graph: Graph, counted: Counted
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Returns the summary of what all ranks counted, and what each sample has, by name."""
    kind, shape = kind_of(config, graph), graph.shape(graph.output)
    rows = evaluation_summary.by_sample(kind, counted.rows, len(source))
    names = names_of_classes(source, shape)
    totals = Counter[tuple[int, int]]()
    for (_, label, made), count in counted.pixels.items():
        totals[label, made] += count
    columns = evaluation_summary.columns_of(kind, rows, shape)
    facts = evaluation_summary.summary(kind, columns, totals, names, shape)
    if kind == PIXELS:
        facts |= overlap_intervals(counted.pixels, len(rows), len(names))
    for name in sample_metrics(kind, shape):
        facts[f"{name}_ci95"] = mean_interval(columns[name])
    return facts, columns


def write_evaluation(
    run_dir: Path, attempt: int, config: RunConfig, source: Source, graph: Graph
) -> None:
    """Writes ``evaluation.json`` of an attempt whose ranks have all counted their last step."""
    own = Attempt(run_dir, attempt, strict=True)
    facts, columns = summarised(config, source, graph, merged(pass_lines(own, EVALUATED_LINE)))
    facts["data"] = {key: getattr(config.data, key) for key in DATA_KEYS}
    numbers = {name: [*map(finite, column)] for name, column in columns.items()}
    facts["samples"] = {"id": [*map(source.name, range(len(source)))], **numbers}
    write_atomically(own.folder / file_names.EVALUATION, json.dumps(facts))
