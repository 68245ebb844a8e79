"""Writes checkpoints: each rank its part, and rank 0 completes them.

``stage00.safetensors`` holds parameters and running statistics of a stage by the names that they
have in the network, ``momentum00.safetensors`` the momentum of its parameters by the same names:
the rank that is replica 0, direction down, tile 0 of the stage writes them, since all its holders
are equal. ``rank0000.safetensors`` holds the state of a rank's random numbers. Which images come
next is a function of the step and the seed (``hires.data.order``).

Ranks write into a hidden folder; once the files of all are on the disk, rank 0 renames the folder,
so that a crash at any moment leaves the checkpoint before whole. What goes wrong on
any rank ends the save on all of them, and the run goes on. Saving happens between steps, when no
activation is alive, and adds a few MiB (:data:`hires.engine.tensorfile.PIECE_BYTES`) to what is
kept, so the peak that is predicted and measured for a step stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
from pathlib import Path

import torch
from torch import Tensor

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store import checkpoints, records
from hires.core.store.checkpoints import Checkpoint
from hires.core.store.files import cannot_write, write_atomically
from hires.core.units import size
from hires.engine import stopping, tensorfile
from hires.engine.build import RankEngine, names_of
from hires.plan.plan import Plan

RANDOM = "torch"
"""Name of the state of torch's random numbers in a rank's file."""

log = logging.getLogger(__name__)


class Saver:
    """Saves a rank's part of a run, in step with the other ranks.

    Args:
        run_dir: the run folder.
        attempt: number of this attempt.
        config: the run.
        engine: the rank.
        first: step at which the attempt begins, which needs no checkpoint.
    """

    def __init__(
        self, run_dir: Path, attempt: int, config: RunConfig, engine: RankEngine, first: int
    ) -> None:
        self.run_dir = run_dir
        self.attempt = attempt
        self.config = config
        self.engine = engine
        self.first = first
        self._last = first
        stopping.listen()
        self._parts = {
            "making the folder": self._make_folder,
            "writing": self._write,
            "naming it": self._publish,
        }

    def makes_way(self, step: int) -> bool:
        """Whether the run is preempted before a step, once its state is saved.

        All ranks call it before every step; it is the barrier behind which the step begins.
        """
        if not comm.max_all(int(stopping.heard())):
            return False
        stopping.forget()
        return self._last == step or self.save(step)

    def after(self, step: int) -> None:
        """Saves after a step if it is time; ``step`` is the number of steps that are done."""
        every = self.config.checkpoint.every
        if every and step % every == 0:
            self.save(step)

    def save(self, step: int) -> bool:
        """Saves the state after so many steps; returns whether there is a checkpoint now.

        Disks may be slow, so no rank counts as stuck meanwhile, whether it writes or waits.
        """
        with comm.activity.may_stand_still(comm.PATIENCE_S):
            return self._save(step)

    def _save(self, step: int) -> bool:
        """Saves the state; all ranks come here, and leave, together."""
        began_s = time.perf_counter()
        path = checkpoints.place(self.run_dir, step)
        for doing, part in self._parts.items():
            problem = None
            try:
                part(path, step)
            except (OSError, RunError) as error:
                problem = str(cannot_write(path, error) if isinstance(error, OSError) else error)
            if comm.max_all(int(problem is not None), patient=True):
                self._give_up(path, step, f"{doing} failed: {problem}" if problem else None)
                return False
        self._last = step
        self._clean()
        comm.max_all(0, patient=True)  # to remove files may take as long as to write them
        if self._leads:
            taken_s = time.perf_counter() - began_s
            num_bytes = checkpoints.read(path).num_bytes
            log.info("saved %s, %s in %.2f s", path.name, size(num_bytes), taken_s)
            facts = {"step": step, "bytes": num_bytes, "save_s": taken_s}
            self._note("checkpoint_saved", **facts)
        return True

    @property
    def _leads(self) -> bool:
        """Whether this rank makes and names folders."""
        return self.engine.context.rank == 0

    def _make_folder(self, path: Path, step: int) -> None:
        """Makes the hidden folder; what an earlier crash left there goes."""
        if self._leads:
            checkpoints.tidy(self.run_dir)
            checkpoints.hidden(path, "tmp").mkdir(parents=True)

    def _write(self, path: Path, step: int) -> None:
        """Writes this rank's files."""
        for name, tensors in held(self.engine).items():
            tensorfile.write(checkpoints.hidden(path, "tmp") / name, tensors)

    def _publish(self, path: Path, step: int) -> None:
        """Gives the folder its name."""
        if not self._leads:
            return
        building = checkpoints.hidden(path, "tmp")
        files = {file.name: file.stat().st_size for file in sorted(building.iterdir())}
        plan = self.engine.context.plan
        missing = _expected(plan) - files.keys()
        if missing:
            raise RunError(f"{min(missing)} is not in {building}: do all ranks see this folder?")
        made = Checkpoint(path, step, self.attempt, self.config.task.name, layout_of(plan), files)
        text = json.dumps(made.to_dict(), indent=1) + "\n"
        write_atomically(building / checkpoints.MANIFEST, text)
        _sync(building)
        if path.exists():  # of an attempt that this one repeats
            checkpoints.remove(path)
        building.rename(path)
        _sync(path.parent)

    def _clean(self) -> None:
        """Removes the checkpoints that are too many; if that fails, they stay."""
        if not self._leads:
            return
        try:
            checkpoints.tidy(self.run_dir, self.config.checkpoint.keep)
        except OSError as error:
            log.warning("an old checkpoint stays: %s", error)

    def _give_up(self, path: Path, step: int, problem: str | None) -> None:
        """Removes the files of a save that failed, and logs why it did."""
        if self._leads:
            shutil.rmtree(checkpoints.hidden(path, "tmp"), ignore_errors=True)
        # No rank writes after this, and the disk may have room again for the event.
        comm.max_all(0, patient=True)
        if problem is not None:
            log.warning("there is no checkpoint of step %d: %s; the run goes on", step, problem)
            self._note("checkpoint_failed", step=step, text=problem)

    def _note(self, event: str, **fields: str | float) -> None:
        """Writes an event down, if there is room for it."""
        with contextlib.suppress(RunError):
            rank = self.engine.context.rank
            records.event(self.run_dir, self.attempt, event, rank=rank, **fields)


def held(engine: RankEngine) -> dict[str, dict[str, Tensor]]:
    """Returns what a rank writes: name of the file -> tensors by name, as they lie in memory."""
    files = {rank_file(engine.context.rank): {RANDOM: torch.get_rng_state()}}
    context = engine.context
    if context.replica or context.tile:
        return files
    names = names_of(context.plan, [context], engine.model)
    everything = {**dict(engine.model.named_parameters()), **dict(engine.model.named_buffers())}
    files[stage_file(context.stage.index)] = {n: everything[n].detach() for n in sorted(names)}
    if engine.optimizer is not None:
        momenta = {n: engine.optimizer.direction(everything[n]) for n in sorted(names)}
        moved = {name: momentum for name, momentum in momenta.items() if momentum is not None}
        files[momentum_file(context.stage.index)] = moved
    return files


def stage_file(stage: int) -> str:
    """Returns the name of the file of a stage's parameters and buffers."""
    return f"stage{stage:02d}.safetensors"


def momentum_file(stage: int) -> str:
    """Returns the name of the file of a stage's momentum."""
    return f"momentum{stage:02d}.safetensors"


def rank_file(rank: int) -> str:
    """Returns the name of the file of a rank's random numbers."""
    return f"rank{rank:04d}.safetensors"


def layout_of(plan: Plan) -> str:
    """Returns what is equal for plans in which every rank computes the same things in one order."""
    stages = [[s.first, s.last, s.tiles, s.shards, s.segments] for s in plan.stages]
    facts = [stages, plan.schedule, plan.num_replicas, plan.num_directions, plan.graph.input_shape]
    nodes = [dataclasses.asdict(node) for node in plan.graph.nodes]
    return hashlib.sha256(json.dumps([facts, nodes]).encode()).hexdigest()[:16]


def _expected(plan: Plan) -> set[str]:
    """Returns the files without which there is no checkpoint."""
    ranks = {rank_file(rank) for rank in range(plan.world)}
    return ranks | {stage_file(stage.index) for stage in plan.stages}


def _sync(folder: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
