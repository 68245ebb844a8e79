"""What happens in every step of a run, and what is written down about it?"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from hires.comm import barrier
from hires.core import records
from hires.core.config import RunConfig
from hires.core.errors import HiresError, RunError
from hires.core.timeline import GRADIENTS, OPTIMISER
from hires.engine.build import RankEngine
from hires.engine.memory import peak_rss_bytes
from hires.parallel.executor import Feed

log = logging.getLogger(__name__)


def run_steps(engine: RankEngine, config: RunConfig, metrics: Path, rss_import: int) -> None:
    """Runs all steps of one rank; every step is one line in ``metrics``.

    When they end, or fail, the last steps' spans go to the timeline beside ``metrics``.

    Args:
        engine: the rank.
        config: the run.
        metrics: file that all ranks append to.
        rss_import: resident bytes after the imports, which no table counts.

    Raises:
        RunError: the loss is no number any more.
    """
    rank = engine.context.rank
    ready = {"kind": "ready", "rank": rank, "rss_import_bytes": rss_import}
    records.append(metrics, {**ready, **engine.byte_counts()})
    with _timeline(engine, metrics.parent):
        _run_all(engine, config, metrics)
        records.append(metrics, _memory_line(engine, rss_import))
    engine.loader.close()


def _run_all(engine: RankEngine, config: RunConfig, metrics: Path) -> None:
    """Runs and notes all steps."""
    for step in range(config.steps):
        barrier()
        waited_s, start_s = engine.loader.wait_s, time.perf_counter()
        loss = run_step(engine)
        step_s = time.perf_counter() - start_s
        line = {"kind": "step", "rank": engine.context.rank, "step": step, "step_s": step_s}
        line |= {"loss": loss, "data_s": engine.loader.wait_s - waited_s}
        records.append(metrics, line)
        if loss is not None and not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {step}; a smaller task.lr (now {config.task.lr}) helps"
            )


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
    feed, record = feed or engine.loader, engine.recorder
    record.begin_step()
    if not engine.context.plan.training:
        engine.executor.step(feed)
        return None
    if engine.optimizer is not None:
        engine.optimizer.zero_grad(set_to_none=True)
    engine.sync.begin_step()
    result = engine.executor.step(feed)
    with record.span(GRADIENTS):
        engine.sync.end_step()
    if engine.optimizer is not None:
        with record.span(OPTIMISER):
            engine.optimizer.step()
    return result.loss


def _memory_line(engine: RankEngine, rss_import: int) -> dict[str, object]:
    """Returns the rank's peak: of the device's allocator if it tells, else of the process."""
    peak_rss = peak_rss_bytes()
    line: dict[str, object] = {"kind": "memory", "rank": engine.context.rank}
    if torch.cuda.is_available():
        line |= {"peak_bytes": torch.cuda.max_memory_allocated(), "source": "device"}
    else:
        line |= {"peak_bytes": max(0, peak_rss - rss_import), "source": "rss"}
    return {**line, "peak_rss_bytes": peak_rss, **engine.byte_counts()}
