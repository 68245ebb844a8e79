"""Chooses the checkpoint at which an attempt begins, and loads it.

All ranks agree on the latest checkpoint in which every one of them finds what it needs unharmed.
Layers are found by their names, whatever stage the run that wrote them had them in.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, RunError
from hires.core.ranks.world import World
from hires.core.store import checkpoints, records
from hires.core.store.checkpoints import Checkpoint, DamagedError
from hires.engine.build import RankEngine, names_of
from hires.engine.checkpoint import RANDOM, layout_of, rank_file
from hires.engine.tensorfile import TensorFile
from hires.plan.plan import Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Begin:
    """Where an attempt begins."""

    step: int
    """Number of its first step."""
    checkpoint: Checkpoint | None
    """What it goes on with; None at the start of a run."""

    def line(self, run_dir: Path) -> dict[str, object]:
        """Returns its line of ``metrics.jsonl``: ``attempt`` is None for another run's."""
        assert self.checkpoint is not None
        ours = self.checkpoint.path.parent == run_dir / checkpoints.FOLDER
        return {
            "kind": "begin",
            "rank": 0,
            "step": self.step,
            "checkpoint": self.checkpoint.name if ours else str(self.checkpoint.path),
            "attempt": self.checkpoint.attempt if ours else None,
        }


def choose(run_dir: Path, config: RunConfig, plan: Plan, world: World) -> Begin:
    """Returns where all ranks begin; they call it together.

    A checkpoint that is damaged for one rank is passed over by all.

    Raises:
        ConfigError: ``checkpoint.resume`` names something that this run cannot go on with.
        RunError: all that it names is damaged.
    """
    passed_over = []
    for path in _offered(run_dir, config, world):
        problem = None
        try:
            checkpoint = checkpoints.read(path)
            _check(checkpoint, plan, world.rank)
        except DamagedError as error:
            problem = str(error)
            _warn(run_dir, world, problem)
        if not comm.max_all(int(problem is not None), patient=True):
            return Begin(checkpoints.begin_of(checkpoint, config), checkpoint)
        passed_over.append(path)
    if passed_over and config.checkpoint.source:
        raise RunError(f"{', '.join(passed_over)}: damaged, and there is no other checkpoint")
    return Begin(0, None)


def take_over(begin: Begin, engine: RankEngine, config: RunConfig) -> None:
    """Fills a rank that was just built with the state of a checkpoint, if it begins at one.

    Raises:
        RunError: the checkpoint is of another network.
    """
    checkpoint = begin.checkpoint
    if checkpoint is None:
        return
    engine.recorder.next_step = begin.step
    everything = {**dict(engine.model.named_parameters()), **dict(engine.model.named_buffers())}
    needed = names_of(engine.context.plan, engine.contexts, engine.model)
    stages, momenta = _files(checkpoint, "stage"), _files(checkpoint, "momentum")
    with torch.no_grad():
        for name in sorted(needed):
            everything[name].data.copy_(_fitting(stages, name, everything[name], checkpoint))
        if checkpoint.task == config.task.name and engine.optimizer is not None:
            for name in sorted(needed & momenta.keys()):
                momentum = _fitting(momenta, name, everything[name], checkpoint)
                engine.optimizer.set_direction(everything[name], momentum)
    _set_random(begin, engine, config)
    comm.max_all(0, patient=True)  # so that no rank waits in its first step for another one's disk
    log.info("goes on at step %d from %s", begin.step, checkpoint.path)


def _offered(run_dir: Path, config: RunConfig, world: World) -> list[str]:
    """Returns the checkpoints that rank 0 finds, for all ranks, the best first."""
    answer: dict[str, object] = {}
    if world.rank == 0:
        try:
            found, damaged = checkpoints.candidates(run_dir, config)
            for problem in damaged:
                _warn(run_dir, world, problem)
            answer = {"paths": [str(checkpoint.path) for checkpoint in found]}
        except HiresError as error:  # all ranks wait for the answer, also when there is none
            comm.broadcast_text(json.dumps({"error": str(error)}))
            raise
    agreed = json.loads(comm.broadcast_text(json.dumps(answer)))
    if "error" in agreed:
        raise RunError(agreed["error"])
    return list(agreed["paths"])


def _warn(run_dir: Path, world: World, problem: str) -> None:
    """Says that a checkpoint is damaged, in the log and in ``events.jsonl``."""
    log.warning("%s; the one before is used", problem)
    records.event(run_dir, world.attempt, "checkpoint_damaged", rank=world.rank, text=problem)


def _check(checkpoint: Checkpoint, plan: Plan, rank: int) -> None:
    """Reads what a rank needs and compares it with its sums.

    Raises:
        DamagedError: something has changed since it was written.
    """
    stages = {slot.stage for slot in plan.slots_of(rank)}
    names = {name for stage in stages for node in plan.nodes(stage) for name in node.params}
    for kind in ("stage", "momentum"):
        for file, here in _by_file(_files(checkpoint, kind), names).items():
            file.check(here)
    if checkpoint.layout == layout_of(plan):
        TensorFile(checkpoint.path / rank_file(rank)).check([RANDOM])


def _files(checkpoint: Checkpoint, kind: str) -> dict[str, TensorFile]:
    """Returns the file in which every tensor is, by its name."""
    files = [TensorFile(checkpoint.path / n) for n in checkpoint.files if n.startswith(kind)]
    return {name: file for file in files for name in file.names}


def _by_file(where: dict[str, TensorFile], names: set[str]) -> dict[TensorFile, list[str]]:
    """Returns which of the names each file holds."""
    found: dict[TensorFile, list[str]] = {}
    for name in names & where.keys():
        found.setdefault(where[name], []).append(name)
    return found


def _fitting(
    where: dict[str, TensorFile], name: str, like: Tensor, checkpoint: Checkpoint
) -> Tensor:
    """Returns a tensor of a checkpoint that shall replace another one."""
    advice = "the checkpoint is of another network: use the model and model.classes of its run"
    if name not in where:
        raise RunError(f"{checkpoint.path} has no {name}; {advice}")
    tensor = where[name].tensor(name)
    if tensor.shape != like.shape:
        shapes = f"{list(tensor.shape)}, not {list(like.shape)}"
        raise RunError(f"{name} of {checkpoint.path} has the shape {shapes}; {advice}")
    return tensor


def _set_random(begin: Begin, engine: RankEngine, config: RunConfig) -> None:
    """Lets the random numbers go on, or in another layout begin anew, and not with step 0's."""
    checkpoint, context = begin.checkpoint, engine.context
    assert checkpoint is not None
    same = checkpoint.layout == layout_of(context.plan) and checkpoint.task == config.task.name
    if same:
        file = TensorFile(checkpoint.path / rank_file(context.rank))
        torch.set_rng_state(file.tensor(RANDOM))
    else:
        torch.manual_seed((config.seed * 2**20 + context.rank) ^ (begin.step << 40))
