"""Draws a published figure from a stored sweep: predicted on any machine, measured where it fits.

conf/experiment/fig2.4.yaml
  overrides   the published sizes ----> plans, simulated on the published machine: predicted
  small       words in their place ---> runs, where this machine has too few GPUs: measured
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.cli.calibration import with_assumed_scales
from hires.cli.compose.compose_config import Composer
from hires.cli.data_keys import with_classes
from hires.cli.planning import Planner
from hires.cli.screens.progress import show_planning
from hires.cli.screens.screen import print_table
from hires.cli.sweep.axes import StoredSweep, axes_of
from hires.cli.sweep.sweep_points import Points, SweepPoint, Where, compose_all
from hires.core import terminal
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError, HiresError
from hires.core.published import TABLE_2_1, TABLE_2_1_RUN
from hires.core.store.files import write_atomically
from hires.core.store.naming import model_label
from hires.core.units import gib
from hires.plan.hardware import CUDA, device_of, gpus_of_node
from hires.plan.memory import device_bytes
from hires.plan.simulation.costs import Device, Roofline
from hires.plan.simulation.published_machine import (
    CLUSTER,
    GPU_BYTES,
    calibrated,
    on_published_machine,
)
from hires.plan.simulation.simulate import simulate
from hires.report.published_figures import MEASURED, PREDICTED, FigurePoint, PublishedFigure
from hires.report.read.measured_points import median_speed
from hires.report.read.plain_values import count, dicts
from hires.report.tables import done_records

AUTO, PUBLISHED, SMALL = "auto", "published", "small"
"""Sizes that a sweep measures: ``auto`` is small where the published ones lack GPUs."""
_TABLES, _PLOTS = ("csv", "md"), ("png", "svg")
_WIDTH = 100  # of what stands below a table, when the output is no terminal
_KEEP = ("source", "precision", "img_per_s", "total_bytes", "speedup", "reduction", "published")


class FigureSweep:
    """A stored sweep that draws a published figure."""

    def __init__(
        self, stored: StoredSweep, typed: Sequence[str], zipped: Sequence[str], size: str
    ) -> None:
        assert stored.figure is not None
        self.figure = PublishedFigure(stored.figure)
        self._stored, self._typed, self._zipped, self._size = stored, typed, zipped, size

    def words(self, composer: Composer, where: Where | None) -> list[str]:
        """Returns the words of the points to measure, and composes those to predict.

        Typed words stand for both, but those of keys that the small variant changes are measured
        only.
        """
        small = self._stored.small
        full = self._composed(self._typed, composer, where)
        why = self._why_small(full)
        if why and small:
            keys = {_key(word) for word in small}
            shared = [word for word in self._typed if _key(word) not in keys]
            self.published = self._composed(shared, composer, where)
            self.figure.setting = (
                f"Predicted at the published sizes on a model of their machine (A100 40 GB, two "
                f"in a node). Measured scaled down, since {why}: {' '.join(small)}."
            )
            return [*self._stored.words, *small, *self._typed]
        self.published = full
        self.figure.setting = (
            "Predicted on a model of the published machine (A100 40 GB, two in a node), measured "
            "at the same sizes."
        )
        return [*self._stored.words, *self._typed]

    def predict(self) -> None:
        """Adds a predicted point for each published one."""
        speeds = _PublishedDevices()
        with Planner() as planner, tempfile.TemporaryDirectory(prefix="hires-figure-") as folder:
            points = self.published.listed
            for point in show_planning(points, _name_of, planner.begin_point):
                if point.config is not None:
                    self.figure.points.append(_predicted(point, planner, folder, speeds))

    def measure(self, points: Points, repeat: int) -> None:
        """Adds a measured point for each complete one of a sweep."""
        for point in points.valid:
            records = done_records(point.path, repeat)
            if records:
                self.figure.points.append(_measured(point.ready, records))

    def show(self) -> None:
        """Prints the tables."""
        for table in self.figure.tables():
            if not table.rows:
                print(table.missing)
                continue
            print_table(table.title, table.columns, table.text_rows(), _KEEP)
            if table.caption:
                print(f"{textwrap.fill(table.caption, terminal.columns() or _WIDTH)}\n")

    def write(self, folder: Path) -> list[Path]:
        """Writes the tables and the plot into the folder of a campaign."""
        from hires.report import summaries  # matplotlib and pandas take a second
        from hires.report.plots import base, published_figure, style

        tables = self.figure.tables()
        data = {f"{t.name}.{form}": summaries.encoded(t, form) for t in tables for form in _TABLES}
        with style.styled():
            drawn = published_figure.draw(self.figure)
            base.add_setting(drawn, self.figure.setting)
        plot = base.Plot(tables[0].name, tables[0].title, False, lambda data: "", drawn)
        data |= {f"{plot.name}.{form}": base.encoded(plot, form) for form in _PLOTS}
        files = {folder / name: content for name, content in data.items() if content is not None}
        for path, content in files.items():
            write_atomically(path, content)
        return [*files]

    def facts(self) -> dict[str, Any]:
        """Returns the figure as plain values."""
        points, beside = self.figure.tables()

        def rows(table: Any) -> list[dict[str, Any]]:
            keys = [column.key for column in table.columns]
            return [dict(zip(keys, row, strict=True)) for row in table.rows]

        return {"points": rows(points), "published": rows(beside), "meaning": points.caption}

    def _composed(self, typed: Sequence[str], composer: Composer, where: Where | None) -> Points:
        axes = axes_of([*self._stored.words, *typed], self._zipped, composer.groups)
        return compose_all(axes, composer, where)

    def _why_small(self, points: Points) -> str:
        """Returns why the published sizes are not measured here; nothing if they are."""
        if self._size == PUBLISHED:
            return ""
        if self._size == SMALL:
            return "--size small was chosen"
        configs = [point.config for point in points.listed if point.config is not None]
        most = max(configs, key=lambda config: config.parallel.num_ranks)
        ranks = most.parallel.num_ranks
        if device_of(most) != CUDA:
            return "the runs have no GPU (--size published runs them nevertheless)"
        gpus = (gpus_of_node(most) or 0) * most.launcher.num_nodes
        return f"{ranks} GPUs are needed and there are {gpus}" if gpus < ranks else ""


class _PublishedDevices:
    """The GPUs of the published machine, by precision; calibrated when they are first needed."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Device] = {}

    def of(self, run: RunConfig, planner: Planner, folder: str) -> Device | None:
        """Returns the device on which Table 2.1 holds in the precision and engine of a run.

        None: the table does not have the precision.
        """
        precision = run.precision.name
        if precision not in TABLE_2_1:
            return None
        key = precision, run.engine.fuse
        if key not in self._known:
            values = {**TABLE_2_1_RUN, "precision": {"name": precision}}
            config = dataclasses.replace(from_dict(values), engine=run.engine)
            plan = planner.plan(_assumed(config, [], planner, folder), memory=False)
            self._known[key] = calibrated(plan, config.batch, TABLE_2_1[precision][1])
        return self._known[key]


def _predicted(
    point: SweepPoint, planner: Planner, folder: str, devices: _PublishedDevices
) -> FigurePoint:
    config = with_classes(point.ready, planner.sizes)
    made = _point(config, PREDICTED)
    try:
        on = _assumed(config, point.words, planner, folder)
        plan = planner.plan(on, memory=False)
        plan.require_ok()
        planner.add_memory(on, plan)
        device = devices.of(config, planner, folder)
    except HiresError as error:
        return dataclasses.replace(made, state=str(error))
    each = [device_bytes(entry) for entry in plan.memory]
    ranks = tuple(each * plan.num_replicas)
    most = max(ranks, default=0)
    fits = f"a GPU would need {gib(most)}" if most > GPU_BYTES else "fits"
    if not ranks:  # the last finding says why there is no prediction
        fits = plan.findings[-1].text
    speed = None
    if device is not None:
        speed = config.batch / simulate(plan, Roofline(plan, device), CLUSTER).step_s
    return dataclasses.replace(made, img_per_s=speed, rank_bytes=ranks, state=fits)


def _assumed(config: RunConfig, words: Sequence[str], planner: Planner, folder: str) -> RunConfig:
    """Returns a config on the published machine, with scales that stand for those of int8."""
    own = on_published_machine(config)
    # Neither a calibration's images nor what they would cost is of interest.
    own = dataclasses.replace(own, quant=dataclasses.replace(own.quant, calibration="data"))
    return with_assumed_scales(own, planner, words, tempfile.mkdtemp(dir=folder))[0]


def _measured(config: RunConfig, records: Sequence[dict[str, Any]]) -> FigurePoint:
    entries = dicts(records[-1].get("memory"))
    each = tuple(count(entry.get("peak_bytes")) or 0 for entry in entries)
    speed = median_speed(records)
    made = _point(config, MEASURED)
    return dataclasses.replace(made, img_per_s=speed, rank_bytes=each, state="done")


def _name_of(point: SweepPoint) -> str:
    if point.config is None:
        return ""
    made = _point(point.config, PREDICTED)
    size = "x".join(map(str, made.image))
    return f"{made.model}, {size}, {made.grid}, {made.precision}, predicted"


def _point(config: RunConfig, source: str) -> FigurePoint:
    parallel = config.parallel
    return FigurePoint(
        source, model_label(config.model), (config.height, config.width), config.batch,
        parallel.label, math.prod(parallel.grids[0]), parallel.num_ranks, config.precision.name,
    )  # fmt: skip


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def require_size(size: str, stored: StoredSweep) -> None:
    """Refuses ``--size`` for a sweep that has one size only; ConfigError: what it is for."""
    if size != AUTO and not (stored.figure and stored.small):
        raise ConfigError(
            f"--size {size}: this sweep has one size; it is for stored sweeps with a small "
            f"variant, as experiment=fig2.4"
        )
