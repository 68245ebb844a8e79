"""One rank: ``python -m hires.worker RUN_DIR`` reads config and plan, and runs its part.

Environment variables of what started it hold its rank. Exit codes: 0 done, 1 failed, 2 the frozen
config cannot be used, 75 preempted (SIGUSR2): saved and ended.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import asdict
from pathlib import Path

import torch

from hires import comm
from hires.core import streams, trackers
from hires.core.config.run_config import RunConfig
from hires.core.errors import PREEMPTED, CommError, HiresError, RunError
from hires.core.ranks import heartbeat, meeting, world
from hires.core.ranks.machine import bind
from hires.core.ranks.world import World, from_environment
from hires.core.store import file_names, frozen, records, trust
from hires.core.store.attempts import Attempt
from hires.core.store.ends import State
from hires.core.store.files import append_metric
from hires.core.store.network_weights import weights_of
from hires.data.opening import open_data
from hires.engine.build import build_rank
from hires.engine.calibrate import Calibrator
from hires.engine.checkpoint import Saver
from hires.engine.device import RankDevice, open_device, prepare_arithmetic
from hires.engine.epochs import Epochs
from hires.engine.evaluate import Evaluator, write_evaluation
from hires.engine.kept_layers import write_calibration
from hires.engine.memory_meter import PeakMeter
from hires.engine.owned_outputs import Observer
from hires.engine.predict import Predictor, write_prediction
from hires.engine.region_compiler import Compilation, compile_regions
from hires.engine.resume_point import resume_point
from hires.engine.run import hold_preemption, run_steps
from hires.engine.tracking import import_packages, tracked
from hires.engine.validate import Validation
from hires.engine.verify import verify_rank
from hires.engine.weights_file import WeightsFile, agreed_weights
from hires.plan.plan import Plan
from hires.plan.traffic import backends_of_plan

VERIFY_TIMEOUT_S = 3600.0
"""In a verification the ranks wait while rank 0 computes the whole network alone."""
TRANSPORT_GRACE_S = 30.0
"""The transport gives up this much later than the watchdog, so that every rank can still report the
communication in which it waits."""

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Runs one rank; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hires.worker", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run folder that `hires run` made")
    parser.add_argument("--verify", action="store_true", help="compare one step with one process")
    parser.add_argument("--reference", help="device of that process, if not this rank's")
    options = parser.parse_args(argv)
    hold_preemption()
    trust.keep_folders_private()
    world = None
    try:
        world = from_environment()
        streams.setup_log(world.rank)
        return run_rank(options.run_dir, world, options.verify, options.reference)
    except Exception as error:
        if world is not None:
            # Every failure is recorded: the launcher separates the cause from its consequences.
            # Of all that tell of other ranks the launcher knows that they are no first causes.
            kind = CommError if isinstance(error, CommError) else type(error)
            fields = {"type": kind.__name__, "text": str(error)}
            try:
                run, attempt = options.run_dir, world.attempt
                records.rank_event(run, attempt, "rank_failed", world.rank, **fields)
            except HiresError:
                log.error("the failure could not be recorded as an event")
        if isinstance(error, HiresError):
            log.error("%s", error)
            return error.exit_code
        log.exception("rank failed")
        return 1


def run_rank(run_dir: Path, world: World, verify: bool, reference: str | None = None) -> int:
    """Runs a rank of a run folder, or compares one of its steps; returns the exit code."""
    records.require_seen(run_dir)
    trust.refuse_untrusted(run_dir)
    frozen.require_unchanged(run_dir, by_time=True)  # the launcher has read the files
    config = records.read_config(run_dir)
    binding = bind(world, config)  # before the first thread starts: it is inherited
    records.rank_event(run_dir, world.attempt, "rank_bound", world.rank, **asdict(binding))
    world = meeting.with_secret(world, file_names.attempt_dir(run_dir, world.attempt))
    timeout_s = VERIFY_TIMEOUT_S if verify else config.comm.timeout_s
    with heartbeat.beat(run_dir, world.attempt, world.rank, comm.activity, timeout_s):
        plan = Plan.from_dict(records.read_plan(run_dir))
        if (size := plan.num_processes) != world.size:
            raise RunError(f"the plan is for {size} ranks, but WORLD_SIZE={world.size}")
        torch.set_num_threads(config.launcher.threads)
        device = open_device(plan.device, world.local_rank)
        prepare_arithmetic(config, device, world.rank)
        if world.rank == 0:
            import_packages(config)
        meter = PeakMeter(config, device)
        wait_s = config.comm.timeout_s + TRANSPORT_GRACE_S
        comm.init(
            backends_of_plan(plan),
            world=world,
            timeout_s=wait_s,
            host_empty=device.host_empty,
            check=config.comm.check,
            plan=frozen.frozen_sha256(run_dir, file_names.PLAN) or "",
        )
        code = 0
        if verify:
            weights = agreed_weights(config, run_dir)
            engine = build_rank(config, plan, world.rank, 1, device, weights)
            _note_compiled(run_dir, world, compile_regions(engine, config))
            other = open_device(reference, world.local_rank) if reference else device
            verify_rank(engine, config, file_names.attempt_dir(run_dir, world.attempt), other)
            comm.max_all(0, patient=True)  # rank 0 may compute once more to judge
        else:
            code = run_attempt(run_dir, config, plan, world, meter, device)
        comm.shutdown()
        return code


def run_attempt(
    run_dir: Path,
    config: RunConfig,
    plan: Plan,
    world: World,
    meter: PeakMeter,
    device: RankDevice | None = None,
) -> int:
    """Runs the attempt's steps, from the last checkpoint on; returns the exit code."""
    folder = file_names.attempt_dir(run_dir, world.attempt)
    begin = resume_point(run_dir, config, plan, world)
    steps = range(begin.step, config.steps)
    # A resumed run reads its own checkpoint, since its first weights may be gone.
    weights = None if begin.checkpoint is not None else agreed_weights(config, run_dir)
    if begin.checkpoint is not None and not plan.training:
        weights = WeightsFile(weights_of(begin.checkpoint, "checkpoint.resume"))
    engine = build_rank(config, plan, world.rank, steps, device, weights)
    saver = Saver(run_dir, world.attempt, config, engine, begin)
    saver.restore()
    _note_compiled(run_dir, world, compile_regions(engine, config))
    source = open_data(config)
    observer: Observer | None = None
    if config.task.name == "evaluate":
        observer = Evaluator(config, source, plan.graph)
    elif config.task.name == "predict":
        observer = Predictor(config, source, plan.graph, run_dir)
    calibrates = config.task.name == "calibrate"
    calibrator = Calibrator(config, engine) if calibrates else None
    validation = epochs = None
    if config.task.name == "train":
        attempt = Attempt(run_dir, world.attempt)
        epochs = Epochs(config, len(source), world.rank, attempt, begin.step)
    if plan.validation is not None:
        validation = Validation(config, plan, engine, saver, world)
    with tracked(config, run_dir, begin.step, world.rank) as tracking:
        parts = tracking, observer, validation, epochs
        done = run_steps(engine, config, folder, meter, saver, *parts)
        comm.barrier()
        ends = done == config.steps or (validation is not None and validation.ends)
        tracking.status = trackers.DONE if ends else trackers.PREEMPTED
    if not ends:
        log.info("preempted after %d of %d steps", done, config.steps)
        if world.rank == 0:
            records.rank_event(run_dir, world.attempt, "preempted", 0, step=done)
        return PREEMPTED
    if calibrator is not None:
        write_calibration(calibrator, config, source, run_dir, world.attempt)
    if world.rank == 0:
        if isinstance(observer, Evaluator):
            write_evaluation(run_dir, world.attempt, config, source, plan.graph)
        elif isinstance(observer, Predictor):
            write_prediction(run_dir, world.attempt, config, source, plan.graph)
        append_metric(folder, 0, "done")
        records.finish(run_dir, world.attempt, State.DONE)
    return 0


def _note_compiled(run_dir: Path, world: World, compiled: Compilation | None) -> None:
    if compiled is not None:
        folder = file_names.attempt_dir(run_dir, world.attempt)
        append_metric(folder, world.rank, "compiled", **asdict(compiled))


if __name__ == "__main__":
    world.run(main)
