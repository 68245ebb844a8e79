"""Decides at which step all ranks begin: at a complete checkpoint, or after the recorded steps.

A training resumes at the latest checkpoint whose files every rank finds complete and unchanged. An
evaluation or prediction has no checkpoint: it resumes after the steps that all ranks have recorded.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import NamedTuple

from hires import comm
from hires.core.config.fields import build
from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, RunError
from hires.core.ranks.world import World
from hires.core.store import checkpoints, file_names, records
from hires.core.store.checkpoints import Checkpoint, DamagedError
from hires.core.store.step_lines import PASS_LINES, done_pass
from hires.engine.weights_file import reader_of
from hires.plan.groups import held_stages
from hires.plan.plan import Plan
from hires.plan.updates import shares_of_holders

log = logging.getLogger(__name__)


class ResumePoint(NamedTuple):
    """Where an attempt begins."""

    step: int  # number of its first step
    checkpoint: Checkpoint | None  # that it resumes from; None: it needs none
    attempt: int | None = None  # whose lines hold the steps before, of a pass without a checkpoint
    damaged: frozenset[Path] = frozenset()  # checkpoints that were found to be so


def resume_point(run_dir: Path, config: RunConfig, plan: Plan, world: World) -> ResumePoint:
    """Returns where all ranks begin; all pass over a checkpoint that is damaged for one of them.

    ConfigError: ``checkpoint.resume`` names something that this run cannot go on with; RunError:
    all that it names is damaged.
    """
    there, problems = _candidates(run_dir, config, world)
    damaged, chosen = [Path(one.path) for one in there], None
    for checkpoint in there:
        is_damaged = False
        try:
            checkpoint.verify(_files_read(checkpoint, plan, world.rank))
        except DamagedError as error:
            problems.append(str(error))
            is_damaged = True
        if not comm.max_all(int(is_damaged), patient=True):
            chosen = checkpoint
            damaged = damaged[: there.index(checkpoint)]
            break
    is_lost = chosen is None and there and config.checkpoint.source
    if chosen is not None:
        result = f"{chosen.path} is used"
    elif is_lost:
        result = "checkpoint.resume names no other one; name a whole one, or its run folder"
    else:
        result = "there is no other to go on from: it begins at step 0"
    for text in (f"{problem}; {result}" for problem in problems):
        log.warning("%s", text)
        records.rank_event(run_dir, world.attempt, "checkpoint_damaged", world.rank, text=text)
    if is_lost:
        paths = ", ".join(str(path) for path in damaged)
        raise RunError(f"{'; '.join(problems) or f'{paths}: damaged'}; {result}")
    step, attempt = (0, None) if chosen is None else (checkpoints.begin_of(chosen, config), None)
    # Parameters of another run, or none: a pass over the data may go on.
    if step == 0 and (chosen is not None or not there):
        step, attempt = _agreed_step(run_dir, config, world)
    return ResumePoint(step, chosen, attempt, frozenset(damaged))


def _agreed_step(run_dir: Path, config: RunConfig, world: World) -> tuple[int, int | None]:
    """Returns after how many steps all ranks go on, and whose lines hold these; (0, None): none.

    A run that is complete is done anew, and so is any with ``checkpoint.resume=never``.
    """
    kind = PASS_LINES.get(config.task.name)
    if kind is None or config.checkpoint.resume == "never":
        return 0, None
    done: tuple[int, int | None] = 0, None
    if world.rank == 0:
        complete = records.done_attempt(run_dir)
        first = 0 if complete is None else complete + 1
        earlier = [n for n in file_names.attempt_numbers(run_dir) if first <= n < world.attempt]
        done = done_pass(run_dir, earlier, world.size, kind)
    step, attempt = json.loads(comm.broadcast_text(json.dumps(done)))
    return min(step, config.steps - 1), attempt


def _candidates(
    run_dir: Path, config: RunConfig, world: World
) -> tuple[list[Checkpoint], list[str]]:
    # Rank 0 looks, so that all ranks try the same checkpoints in one order, the best first. Beside
    # them, on rank 0, what is wrong with others.
    there: list[Checkpoint] = []
    damaged: list[str] = []
    failure = None
    if world.rank == 0:
        try:
            there, damaged = checkpoints.candidates(run_dir, config)
        except HiresError as error:  # the other ranks wait for an answer in this case too
            failure = error
    plain = [{**dataclasses.asdict(one), "path": str(one.path)} for one in there]
    answer = json.dumps([plain, failure and str(failure)])
    agreed, problem = json.loads(comm.broadcast_text(answer))
    if problem is not None:
        raise failure or RunError(problem)
    return [build(Checkpoint, values) for values in agreed], damaged


def _files_read(checkpoint: Checkpoint, plan: Plan, rank: int) -> list[str]:
    # Names of the files that a rank reads.
    names, kept = set[str](), set[str]()
    for stage in held_stages(plan, rank):
        shares = shares_of_holders(plan, stage)
        if reader_of(plan, stage) == rank:
            own = {name for node in plan.nodes(stage) for name in node.params}
            own = plan.graph.own_params(own)
            names |= own
            kept |= set() if shares else own
        kept |= {rows.name for rows in shares.get(rank, [])}
    read = []
    for file, stored in checkpoint.files.items():
        wanted = names if file.startswith("stage") else kept
        if any(checkpoints.part_of_key(key)[0] in wanted for key in stored.shapes):
            read.append(file)
    return read
