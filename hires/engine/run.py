"""Runs the steps of an attempt on one rank, to its end or until a preemption.

SIGUSR2 asks a rank to save its state and end. Every thread blocks it, so the kernel keeps it until
a step begins; then all ranks take the largest flag, so that they end at the same step whichever of
them got the signal:

    rank 0   step 3 ............ | barrier: max(0, 1) | save, end with code 75
    rank 1   step 3 .. SIGUSR2 . | barrier: max(0, 1) | save, end with code 75
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import learning_rate
from hires.core.errors import HiresError
from hires.core.store import records
from hires.core.store.files import append_metric
from hires.core.store.step_lines import BANDS_LINE, ENDED_LINE, EPOCH_LINE, VALIDATED_LINE
from hires.engine.checkpoint import Saver
from hires.engine.epochs import Epochs
from hires.engine.finite_checks import FiniteLoss
from hires.engine.loader import sample_names
from hires.engine.memory_meter import PeakMeter
from hires.engine.owned_outputs import Observer
from hires.engine.rank_engine import RankEngine
from hires.engine.tracking import Tracking
from hires.engine.validate import Validation
from hires.parallel.band_module import BandModule
from hires.parallel.executor import StepResult
from hires.plan.groups import groups

PREEMPTION_SIGNAL = signal.SIGUSR2
BANDS_S = 10.0
"""How often a rank notes how far it has come inside of a step."""

log = logging.getLogger(__name__)

# A process has one handler of a signal, so what has come belongs to the module.
_signals: list[int] = []


def hold_preemption() -> None:
    """Makes the kernel keep the signal, in the main thread, until :func:`is_preempted` takes it."""
    # Threads that start from now on block it, too: no system call of a library is interrupted. One
    # that started before may take it, and the handler then notes it for the main thread.
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_BLOCK, {PREEMPTION_SIGNAL})
        signal.signal(PREEMPTION_SIGNAL, lambda number, frame: _signals.append(number))
        signal.siginterrupt(PREEMPTION_SIGNAL, False)


def is_preempted(clear: bool = False) -> bool:
    """Whether the signal has come since the last call with ``clear``."""
    if threading.current_thread() is threading.main_thread():
        # What waits is handled between these two lines, and so is what another thread took: until
        # the main thread gives the interpreter up, CPython does not look for that (bpo-40010).
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {PREEMPTION_SIGNAL})
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    has_come = bool(_signals)
    if clear:
        _signals.clear()
    return has_come


def run_steps(
    engine: RankEngine,
    config: RunConfig,
    folder: Path,
    meter: PeakMeter,
    saver: Saver,
    tracking: Tracking,
    observer: Observer | None = None,
    validation: Validation | None = None,
    epochs: Epochs | None = None,
) -> int:
    """Runs the attempt's steps; every step is a line in its ``folder``, beside the timeline.

    What an ``observer`` finds in it is another line. Returns how many steps of the run are done:
    fewer than all after a preemption, or where ``validation`` ends. LossError: the loss is not
    finite; RunError: the last state that a training should save is not on the disk.
    """
    rank, done, trains = engine.rank, config.steps, config.task.name == "train"
    every = config.checkpoint.every if trains else 0
    hold_preemption()
    note = functools.partial(append_metric, folder, rank)
    sizes = {"rss_import_bytes": meter.rss_import, "start_bytes": meter.end_start()}
    note("ready", **sizes, **engine.byte_counts())
    counted, log = records.counted_steps(config, saver.first), message_log(engine, config)
    see = None if observer is None else observer.see
    samples = functools.partial(sample_names, config, engine.context.replica)
    finite = FiniteLoss(config, engine.context, samples)
    for module in engine.modules if rank == 0 else ():
        if isinstance(module, BandModule):
            module.progress = _BandProgress(engine, config, note)
    with _recorded(engine, log, folder), comm.logged(log):
        for step in range(saver.first, config.steps):
            if validation is not None and validation.ends:
                done = step
                break
            if observer is not None:
                observer.prepare(step)
            # The barrier of the step: all ranks agree whether the run ends here.
            if engine.executor.begin(functools.partial(_ends_before, step, saver)):
                done = step
                break
            waited_s, start_s = engine.data_wait_s, time.perf_counter()
            with meter.watch(step - saver.first):
                result = engine.executor.step(engine.loaders, number=step, see=see)
                engine.device.synchronize()
            step_s, data_s = time.perf_counter() - start_s, engine.data_wait_s - waited_s
            loss, facts = result.loss, _facts_of(result, config, step)
            note("step", step=step, step_s=step_s, loss=loss, data_s=data_s, **facts)
            if observer is not None:
                note(observer.line, step=step, **observer.take_rows().to_dict())
            if log is not None:
                log.end_step(step, step_s, step in counted)
            if step - saver.first == meter.step:  # long runs report their peak while they run
                note("memory", **meter.line())
            if engine.executor.scale is not None:
                engine.executor.scale.require_progress()
            if not result.skipped:
                finite.require(step, result)
            tracking.step(step, step_s, loss, facts)
            epoch = None if epochs is None else epochs.add(step, loss)
            if epoch is not None and rank == 0:
                note(EPOCH_LINE, **epoch)
            better = False
            if validation is not None and epochs is not None and validation.is_due(step, epochs):
                evaluation, better = validation.evaluate(step)
                tracking.evaluation(step, evaluation)
                if rank == 0:
                    note(VALIDATED_LINE, step=step, **evaluation)
            if every and (step + 1) % every == 0:
                saver.save(step + 1)
            if better and validation is not None:
                validation.keep_best()
        ends_early = validation is not None and validation.ends and done < config.steps
        if ends_early and validation is not None:
            note(ENDED_LINE, step=done, **validation.end_early(done))
        ends = ends_early or done == config.steps
        if ends and trains and config.checkpoint.saves_end and saver.last != done:
            saver.save(done)
        note("memory", **meter.line(), **engine.byte_counts())
    engine.close()
    if observer is not None:
        observer.close()
    if trains:
        saver.require_saved()
    return done


class _BandProgress:
    """Notes from time to time how far a step has come that computes images in bands."""

    def __init__(self, engine: RankEngine, config: RunConfig, note: Callable[..., None]) -> None:
        self._context, self._note = engine.context, note
        share = config.batch // config.parallel.replicas
        self._pixels = share * config.height * config.width / 10**6
        self._begin = self._last = 0.0
        self._first = self._done = 1.0

    def __call__(self, done: float) -> None:
        """Takes the share of a microbatch that is done."""
        now, context = time.monotonic(), self._context
        done = (context.microbatch + done) / context.plan.total_microbatches
        if done <= self._done:  # the first band of another step
            self._begin, self._last, self._first = now, now, done
        elif now - self._last >= BANDS_S and done < 1:
            self._last = now
            left_s = (now - self._begin) * (1 - done) / (done - self._first)
            parts = {"done": done * self._pixels, "total": self._pixels, "left_s": left_s}
            self._note(BANDS_LINE, step=context.step, **parts)
        self._done = done


def _facts_of(result: StepResult, config: RunConfig, step: int) -> dict[str, float]:
    # What a step is noted with beside its times and its loss.
    facts: dict[str, float] = {}
    if config.task.name == "train":
        facts["lr"] = learning_rate(config, step)
    if result.loss_scale is not None:
        facts |= {"loss_scale": result.loss_scale, "skipped": result.skipped}
    if result.grad_norm is not None:
        facts["grad_norm"] = result.grad_norm
    if result.unlabelled:
        facts["unlabelled"] = result.unlabelled
    return facts


def message_log(engine: RankEngine, config: RunConfig) -> comm.MessageLog | None:
    """Returns an empty log of a rank's messages; None: the run keeps none."""
    plan, cursor = engine.context.plan, engine.executor.cursor
    # Residents send copies, which nothing carries.
    if config.comm.log == "off" or plan.world == 1 or plan.resident > 1:
        return None
    return comm.MessageLog(cursor, cursor.events, config.comm.log == "full")


def _ends_before(step: int, saver: Saver) -> bool:
    # Whether a preemption ends the run before a step, after the state of a training was saved.
    if not comm.max_all(int(is_preempted())):
        return False
    is_preempted(clear=True)
    return saver.config.task.name != "train" or saver.last == step or saver.save(step)


@contextlib.contextmanager
def _recorded(engine: RankEngine, log: comm.MessageLog | None, folder: Path) -> Iterator[None]:
    # Also of a run that fails, as far as the disk allows it.
    def write() -> None:
        engine.write_timeline(folder, log)
        if log is not None:
            log.write(folder, engine.rank, groups(engine.context.plan))

    try:
        yield
    except BaseException:
        with contextlib.suppress(HiresError, RuntimeError):  # an accelerator may have failed
            write()
        raise
    write()
