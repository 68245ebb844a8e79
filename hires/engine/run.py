"""Runs the steps of an attempt on one rank, and writes a line about each."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, LossError
from hires.core.store import records
from hires.engine.build import RankEngine
from hires.engine.checkpoint import Saver
from hires.engine.memory_meter import PeakMeter

log = logging.getLogger(__name__)


def run_steps(
    engine: RankEngine, config: RunConfig, metrics: Path, meter: PeakMeter, saver: Saver
) -> int:
    """Runs the attempt's steps on one rank; every step is one line in ``metrics``.

    When they end, or fail, the last steps' spans go to the timeline beside ``metrics``.

    Args:
        engine: the rank.
        config: the run.
        metrics: file that all ranks append to.
        meter: measures the rank's memory.
        saver: saves the run, and holds the step at which it begins.

    Returns:
        How many steps of the run are done: fewer than all if it was told to stop.

    Raises:
        LossError: the loss is not finite.
    """
    rank, done = engine.context.rank, config.steps

    def note(kind: str, **values: object) -> None:
        """Appends a line of this rank."""
        records.append(metrics, {"kind": kind, "rank": rank, **values})

    note("ready", rss_import_bytes=meter.rss_import, **engine.byte_counts())
    with _timeline(engine, metrics.parent):
        for step in range(saver.first, config.steps):
            # The barrier of the step: all ranks agree whether the run ends here.
            if engine.executor.begin(functools.partial(saver.makes_way, step)):
                done = step
                break
            waited_s, start_s = engine.loader.wait_s, time.perf_counter()
            with meter.watch(step - saver.first):
                loss = engine.executor.step(engine.loader).loss
            step_s, data_s = time.perf_counter() - start_s, engine.loader.wait_s - waited_s
            note("step", step=step, step_s=step_s, loss=loss, data_s=data_s)
            peak = meter.news()
            if peak is not None:
                note("memory", **peak)
            if loss is not None and not math.isfinite(loss):
                lr = config.task.lr
                raise LossError(
                    f"the loss is {loss} at step {step}; a smaller task.lr (now {lr}) helps"
                )
            saver.after(step + 1)
        note("memory", **meter.line(), **engine.byte_counts())
    engine.loader.close()
    return done


@contextlib.contextmanager
def _timeline(engine: RankEngine, folder: Path) -> Iterator[None]:
    """Writes the rank's timeline at the end, of a failed run as far as that is possible."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(HiresError):
            engine.recorder.write(folder, engine.context.rank)
        raise
    engine.recorder.write(folder, engine.context.rank)
