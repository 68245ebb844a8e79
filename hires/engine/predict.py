"""Predicts: writes the outputs of one pass over a data set as they come, in any layout.

    classes   lines of each rank, step by step        -> predictions.csv of rank 0, at the end
    maps      a part of a file, and a line for it     -> the same table, with the name of each file

Each sample counts once, and so does each pixel of its map (:mod:`hires.engine.owned_outputs`); the
lines tell at the end that none is missing. An interrupted pass continues where it stopped.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hires import comm
from hires.core.config.data_config import PARQUET, PROBABILITY
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.evaluation_summary import IMAGES, PIXELS, ROW_KINDS, by_sample
from hires.core.losses import LABELS
from hires.core.store import file_names
from hires.core.store.attempts import Attempt
from hires.core.store.files import write_atomically
from hires.core.store.step_lines import PREDICTED_LINE, pass_lines
from hires.core.units import spreadsheet_text
from hires.data.georeference import Georeference
from hires.data.image_fit import output_pixels
from hires.data.source import Source
from hires.engine.evaluate import DATA_KEYS
from hires.engine.owned_outputs import (
    Observer,
    Tally,
    broken_pixels,
    names_of_classes,
    owned_output,
    row_values,
)
from hires.engine.prediction_maps import MapKind, MapPlace, PredictionMaps
from hires.losses.class_losses import class_scores
from hires.parallel.context import Context
from hires.plan.graph import Graph
from hires.plan.planner import kind_of

_BYTE = 2**8


class Predictor(Observer):
    """Writes what this rank sees of the outputs of a step, microbatch after microbatch.

    A row is the sample's number, then the predicted class (-1: the output is not finite), its
    probability and, of ``predict.reduce=probability``, those of all classes; of labels and numbers
    it is that number and :func:`row_values`. Of a map it is the number, how many pixels were
    written, and how many of them are not finite; of the tile at the corner, also rows and columns
    of the map, and how many of its pixels are to be written.
    """

    line = PREDICTED_LINE

    def __init__(self, config: RunConfig, source: Source, graph: Graph, run_dir: Path) -> None:
        """Makes the folder of maps in that of the run, if outputs have rows and columns.

        RunError: it cannot be made.
        """
        super().__init__()
        self._config, self._source, self._graph = config, source, graph
        self._kind = kind_of(config, graph)
        self._maps = maps_of(config, source, graph, run_dir)

    def prepare(self, step: int) -> None:
        """Makes the files of a step's maps, on rank 0; RunError: it cannot."""
        if self._maps is not None and comm.get_rank() == 0:
            batch = self._config.batch
            for sample in range(step * batch, min((step + 1) * batch, len(self._source))):
                self._maps.make(sample, self._place(sample))

    def see(self, context: Context, output: Tensor) -> None:
        """Takes the output of the microbatch that a slot of the last stage has just computed."""
        seen = owned_output(context, self._config, len(self._source), output)
        if seen is None:
            return
        if self._kind in ROW_KINDS:
            pairs = zip(seen.samples, row_values(self._kind, seen.values), strict=True)
            self.counted.rows += [[sample, *row] for sample, row in pairs]
            return
        if self._maps is None:
            self.counted.rows += self._class_rows(seen.samples, seen.values)
            return
        assert seen.rect is not None
        # One by one, so that what is computed takes the memory of one sample.
        for sample, values in zip(seen.samples, seen.values, strict=True):
            place, broken = self._place(sample), broken_pixels(values).cpu().numpy()
            self._maps.write(sample, place, self._part(values), seen.rect)
            down, across = place.uses(seen.rect)
            counts = int(down.sum() * across.sum()), int(down @ broken @ across)
            begins = seen.rect[0] == seen.rect[2] == 0  # of one tile: rows of all are added
            facts = (*place.size, place.num_predicted) if begins else (0, 0, 0)
            self.counted.rows.append([sample, *counts, *facts])

    def _place(self, sample: int) -> MapPlace:
        # Which pixels of an output the map takes, and where it lies; RunError: no such image.
        wanted, fit = self._config.fitted_size, self._config.data.fit
        size, reference = self._source.stored(sample) or (wanted, Georeference())
        outputs = self._graph.shape(self._graph.output)[2:]
        rows, cols = (
            output_pixels(*lengths, fit) for lengths in zip(size, wanted, outputs, strict=True)
        )
        step = size[0] / len(rows), size[1] / len(cols)
        return MapPlace(rows, cols, reference.part((0, 0), step))

    def _class_rows(self, samples: range, output: Tensor) -> Iterator[list[float]]:
        output = class_scores(output)
        shares, labels = output.softmax(1).double(), output.argmax(1)
        labels[~output.isfinite().all(1)] = -1
        every = self._config.predict.reduce == PROBABILITY
        for sample, label, row in zip(samples, labels.tolist(), shares.tolist(), strict=True):
            yield [sample, label, row[label] if label >= 0 else math.nan, *(row if every else ())]

    def _part(self, values: Tensor) -> NDArray[Any]:
        # What maps hold of a part of an output, (C, h, w).
        if self._kind == IMAGES:
            # As the reader of pairs takes floats: from black (0) to white (1).
            image = values.clamp(-2, 2).add_(2).div_(4).masked_fill_(~values.isfinite(), math.nan)
            return image.permute(1, 2, 0).float().cpu().numpy()
        scores = class_scores(values[None])[0]
        if self._config.predict.reduce == PROBABILITY:
            return scores.softmax(0).float().cpu().numpy()
        dtype = class_type(len(scores))
        labels = scores.argmax(0).masked_fill_(broken_pixels(scores), np.iinfo(dtype).max)
        return labels.cpu().numpy().astype(dtype)


def class_type(num_classes: int) -> Any:
    """Returns the type of a map of class numbers; its largest value means: none."""
    return np.uint8 if num_classes < _BYTE else np.uint16


def maps_of(
    config: RunConfig, source: Source, graph: Graph, run_dir: Path
) -> PredictionMaps | None:
    """Returns the files of the maps of a run; None: outputs have no rows and columns."""
    kind = kind_of(config, graph)
    if kind not in (PIXELS, IMAGES):
        return None
    classes = names_of_classes(source, graph.shape(graph.output))
    if kind == IMAGES:
        form = MapKind(graph.shape(graph.output)[1], np.float32, "YXS")
    elif config.predict.reduce == PROBABILITY:
        form = MapKind(len(classes), np.float32, "CYX", classes)
    else:
        form = MapKind(1, class_type(len(classes)), "YX", classes)
    names = map(source.name, range(len(source)))
    return PredictionMaps(run_dir / file_names.PREDICTIONS, names, form, config.predict.format)


def write_prediction(
    run_dir: Path, attempt: int, config: RunConfig, source: Source, graph: Graph
) -> None:
    """Writes the table of an attempt whose ranks have all predicted their last step.

    RunError: a sample, or a part of its map, is missing.
    """
    files, kind = Attempt(run_dir, attempt, strict=True), kind_of(config, graph)
    counted = Tally(pass_lines(files, PREDICTED_LINE))
    rows = by_sample(kind, counted.rows, len(source), "predicted")
    ids = [source.name(i) for i in range(len(source))]
    maps = maps_of(config, source, graph, run_dir)
    facts: dict[str, Any] = {"kind": kind, "images": len(ids), "reduce": config.predict.reduce}
    names = names_of_classes(source, graph.shape(graph.output), kind)
    if kind in ROW_KINDS:
        heads, lines = _row_table(kind, ids, rows, names)
        facts["not_finite"] = sum(not all(map(math.isfinite, row)) for row in rows)
    elif maps is None:
        heads, lines = _class_table(ids, rows, names)
        facts["not_finite"] = sum(row[0] < 0 for row in rows)
    else:
        heads = ["id", "file", "rows", "columns", "not_finite", "not_predicted"]
        lines = []
        for number, (name, row) in enumerate(zip(ids, rows, strict=True)):
            pixels, broken, height, width, wanted = map(int, row)
            if pixels != wanted or not wanted:
                raise RunError(
                    f"sample {number}, {name}, has {pixels} predicted pixels of {wanted}: repeat "
                    f"the run with --again"
                )
            path = f"../{file_names.PREDICTIONS}/{maps.names[number]}"
            lines.append([name, path, height, width, broken, height * width - pixels])
        facts |= {key: sum(line[heads.index(key)] for line in lines) for key in heads[4:]}
        facts["format"] = config.predict.format
        facts["map"] = {**maps.kind._asdict(), "dtype": np.dtype(maps.kind.dtype).name}
        facts["folder"] = str(maps.folder.relative_to(run_dir))
    table = files.folder / file_names.PREDICTION_TABLES[config.predict.table]
    write_atomically(table, _encoded(config.predict.table, heads, lines))
    facts["table"] = str(table.relative_to(run_dir))
    facts["data"] = {key: getattr(config.data, key) for key in DATA_KEYS}
    write_atomically(files.folder / file_names.PREDICTION, json.dumps(facts))


def _class_table(
    ids: Sequence[str], rows: Sequence[Sequence[float]], names: Sequence[str]
) -> tuple[list[str], list[list[Any]]]:
    labels = names if len({*names}) == len(names) else [*map(str, range(len(names)))]
    heads = ["id", "class", "name", "probability"]
    heads += [f"p_{label}" for label in labels] if len(rows[0]) > 2 else []
    lines: list[list[Any]] = []
    for sample, (label, *shares) in zip(ids, rows, strict=True):
        name = names[int(label)] if label >= 0 else None
        cells = (share if math.isfinite(share) else None for share in shares)
        lines.append([sample, int(label), name, *cells])
    return heads, lines


def _row_table(
    kind: str, ids: Sequence[str], rows: Sequence[Sequence[float]], names: Sequence[str]
) -> tuple[list[str], list[list[Any]]]:
    heads = ["id", "labels", *(f"p_{name}" for name in names)] if kind == LABELS else ["id", *names]
    lines: list[list[Any]] = []
    for sample, row in zip(ids, rows, strict=True):
        cells = [value if math.isfinite(value) else None for value in row]
        labels = ";".join(name for name, value in zip(names, row, strict=True) if value > 0.5)
        lines.append([sample, *([labels] if kind == LABELS else []), *cells])
    return heads, lines


def _encoded(form: str, heads: list[str], lines: list[list[Any]]) -> bytes:
    """Returns a table as a CSV, or as a Parquet file, whose numbers keep their types."""
    if form == PARQUET:
        import pandas as pd  # not before: each rank would pay for it

        frame = pd.DataFrame(lines, columns=heads)
        for name in {"id", "file", "name", "labels"} & {*heads}:  # no name of a file need be UTF-8
            frame[name] = [_readable(cell) for cell in frame[name]]
        data = io.BytesIO()
        frame.to_parquet(data, index=False)
        return data.getvalue()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(spreadsheet_text, heads))
    for line in lines:
        writer.writerow([spreadsheet_text(c) if isinstance(c, str) else c for c in line])
    return text.getvalue().encode("utf-8", "surrogateescape")


def _readable(cell: Any) -> Any:
    if not isinstance(cell, str):
        return cell
    return cell.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
