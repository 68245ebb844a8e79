"""What happens in every step of a run, and what is written down about it?"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, LossError
from hires.core.ranks.timeline import GRADIENTS, OPTIMISER
from hires.core.store import records
from hires.engine.build import RankEngine
from hires.engine.checkpoint import Saver
from hires.engine.memory_meter import PeakMeter
from hires.parallel.executor import Feed, StepResult

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
        saver: saves the run, and knows where it begins.

    Returns:
        How many steps of the run are done now: fewer than all if it was asked to make way.

    Raises:
        LossError: the loss is no number any more.
    """
    rank = engine.context.rank
    ready = {"kind": "ready", "rank": rank, "rss_import_bytes": meter.rss_import}
    records.append(metrics, {**ready, **engine.byte_counts()})
    with _timeline(engine, metrics.parent):
        done = _run_all(engine, config, metrics, meter, saver)
        line = {"kind": "memory", "rank": rank, **meter.line(), **engine.byte_counts()}
        records.append(metrics, line)
    engine.loader.close()
    return done


def _run_all(
    engine: RankEngine, config: RunConfig, metrics: Path, meter: PeakMeter, saver: Saver
) -> int:
    """Runs and notes all steps; returns how many are done."""
    for step in range(saver.first, config.steps):
        if saver.makes_way(step):
            return step
        waited_s, start_s = engine.loader.wait_s, time.perf_counter()
        with meter.watch(step - saver.first):
            loss = run_step(engine)
        step_s = time.perf_counter() - start_s
        line = {"kind": "step", "rank": engine.context.rank, "step": step, "step_s": step_s}
        line |= {"loss": loss, "data_s": engine.loader.wait_s - waited_s}
        records.append(metrics, line)
        peak = meter.news()
        if peak is not None:
            records.append(metrics, {"kind": "memory", "rank": engine.context.rank, **peak})
        if loss is not None and not math.isfinite(loss):
            raise LossError(
                f"the loss is {loss} at step {step}; a smaller task.lr (now {config.task.lr}) helps"
            )
        saver.after(step + 1)
    return config.steps


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


def run_step(engine: RankEngine, feed: Feed | None = None) -> float | None:
    """Runs one step; returns the replica's mean loss where it is known.

    Args:
        engine: the rank.
        feed: where the microbatches come from; unset: the rank's loader.
    """
    return run_passes(engine, feed or engine.loader).loss


def run_passes(engine: RankEngine, feed: Feed) -> StepResult:
    """Runs one step; returns what it told this rank, whose numbers nobody has looked at yet."""
    record = engine.recorder
    record.begin_step()
    if not engine.context.plan.training:
        return engine.executor.step(feed)
    if engine.optimizer is not None:
        engine.optimizer.zero_grad()
    engine.sync.begin_step()
    result = engine.executor.step(feed)
    with record.span(GRADIENTS):
        engine.sync.end_step()
    if engine.optimizer is not None:
        with record.span(OPTIMISER):
            engine.optimizer.step()
    return result
