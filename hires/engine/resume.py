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
from hires.engine.build import RankEngine
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
    for path in _candidates(run_dir, config, world):
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


def restore(begin: Begin, engine: RankEngine, config: RunConfig) -> None:
    """Fills a rank that was just built with the state of a checkpoint, if it begins at one.

    Raises:
        RunError: the checkpoint is of another network.
    """
    checkpoint, context = begin.checkpoint, engine.context
    if checkpoint is None:
        return
    engine.recorder.next_step = begin.step
    same_task = checkpoint.task == config.task.name
    values, momenta = _files(checkpoint, "stage"), _files(checkpoint, "momentum")
    with torch.no_grad():
        for name, tensor in sorted(engine.tensors.items()):
            tensor.data.copy_(_fitting(values, name, tensor, checkpoint))
            if same_task and engine.optimizer is not None and name in momenta:
                momentum = _fitting(momenta, name, tensor, checkpoint)
                engine.optimizer.set_direction(tensor, momentum)
    if same_task and checkpoint.layout == layout_of(context.plan):
        file = TensorFile(checkpoint.path / rank_file(context.rank))
        torch.set_rng_state(file.tensor(RANDOM))
    else:  # another layout draws other numbers, and not those of step 0 again
        torch.manual_seed((config.seed * 2**20 + context.rank) ^ (begin.step << 40))
    comm.max_all(0, patient=True)  # so that no rank waits in its first step for another one's disk
    log.info("goes on at step %d from %s", begin.step, checkpoint.path)


def _candidates(run_dir: Path, config: RunConfig, world: World) -> list[str]:
    """Returns the checkpoints that rank 0 finds, for all ranks, the best first."""
    answer: dict[str, object] = {}
    if world.rank == 0:
        try:
            candidates, damaged = checkpoints.candidates(run_dir, config)
            for problem in damaged:
                _warn(run_dir, world, problem)
            answer = {"paths": [str(checkpoint.path) for checkpoint in candidates]}
        except HiresError as error:  # the other ranks wait for an answer in this case too
            comm.broadcast_text(json.dumps({"error": str(error)}))
            raise
    agreed = json.loads(comm.broadcast_text(json.dumps(answer)))
    if "error" in agreed:
        raise RunError(agreed["error"])
    return list(agreed["paths"])


def _warn(run_dir: Path, world: World, problem: str) -> None:
    log.warning("%s; the one before is used", problem)
    records.event(run_dir, world.attempt, "checkpoint_damaged", rank=world.rank, text=problem)


def _check(checkpoint: Checkpoint, plan: Plan, rank: int) -> None:
    """Reads what a rank needs and compares it with its check sums.

    Raises:
        DamagedError: something has changed since it was written.
    """
    stages = {slot.stage for slot in plan.slots_of(rank)}
    names = {name for stage in stages for node in plan.nodes(stage) for name in node.params}
    for kind in ("stage", "momentum"):
        files = _files(checkpoint, kind)
        for name in sorted(names & files.keys()):
            files[name].check([name])
    if checkpoint.layout == layout_of(plan):
        TensorFile(checkpoint.path / rank_file(rank)).check([RANDOM])


def _files(checkpoint: Checkpoint, kind: str) -> dict[str, TensorFile]:
    """Returns the file of every tensor of a kind, by the tensor's name."""
    files = [TensorFile(checkpoint.path / n) for n in checkpoint.files if n.startswith(kind)]
    return {name: file for file in files for name in file.names}


def _fitting(
    files: dict[str, TensorFile], name: str, like: Tensor, checkpoint: Checkpoint
) -> Tensor:
    """Returns a tensor of a checkpoint that replaces another one."""
    advice = "the checkpoint is of another network: use the model and model.classes of its run"
    if name not in files:
        raise RunError(f"{checkpoint.path} has no {name}; {advice}")
    tensor = files[name].tensor(name)
    if tensor.shape != like.shape:
        shapes = f"{list(tensor.shape)}, not {list(like.shape)}"
        raise RunError(f"{name} of {checkpoint.path} has the shape {shapes}; {advice}")
    return tensor
