"""Writes and loads checkpoints: each rank its part.

    stage00.safetensors      parameters and running statistics of a stage, by their names in the
                             network
    momentum00.safetensors   what the optimiser keeps for its parameters, by the same names
    rank0000.safetensors     states of a rank's random numbers
    scale.safetensors        loss scale, of a training in fp16

All holders of a stage are equal, so that of replica 0, direction down, tile 0 writes its files.
Which images come next is a function of the step and the seed (``hires.data.source``).

    all ranks   write into a hidden folder, wait until the files are on the disk
    all ranks   agree that every part was written
    rank 0      renames the folder

Tensors of an accelerator are written from copies on the host, piece by piece, so a checkpoint
serves every kind of device.

A crash at any moment leaves the checkpoint before whole. A failure on any rank ends the save on all
of them, and the run goes on. Saving happens between steps and adds a few MiB to what is kept
(:data:`hires.engine.tensorfile.PIECE_BYTES`), so the predicted peak of a step holds.

An attempt begins at the latest checkpoint in which every rank finds what it needs unharmed. Layers
are found by their names, whatever stage the run that wrote them had them in.
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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, RunError
from hires.core.ranks.world import World
from hires.core.store import checkpoints, records
from hires.core.store.checkpoints import Checkpoint, DamagedError
from hires.core.store.files import append_line, cannot_write, write_atomically
from hires.core.units import size
from hires.engine import tensorfile
from hires.engine.build import RankEngine, names_of
from hires.engine.tensorfile import TensorFile
from hires.nets.generators import HOST_STATE
from hires.plan.plan import Plan

SCALE, SCALE_FILE = "loss_scale", "scale.safetensors"

log = logging.getLogger(__name__)


class Begin(NamedTuple):
    """Where an attempt begins."""

    step: int  # number of its first step
    checkpoint: Checkpoint | None  # what it goes on with; None at the start of a run


@dataclass
class Saver:
    """Restores and saves a rank's part of a run, in step with the other ranks."""

    run_dir: Path
    attempt: int
    config: RunConfig
    engine: RankEngine
    begin: Begin

    def __post_init__(self) -> None:
        self.first = self.last = self.begin.step  # steps that were done at the last checkpoint
        self._rank = self.engine.context.rank

    def save(self, step: int) -> bool:
        """Saves the state after so many steps; returns whether there is a checkpoint now.

        All ranks call it, and leave it, together. Disks may be slow, so no rank counts as stuck
        meanwhile, whether it writes or waits.
        """
        began_s, path = time.perf_counter(), checkpoints.place(self.run_dir, step)
        parts = {
            "making the folder": self._make_folder,
            "writing": self._write,
            "naming it": self._publish,
        }
        with comm.activity.may_stand_still(comm.PATIENCE_S):
            for name, part in parts.items():
                problem = None
                try:
                    part(path, step)
                except (OSError, RunError) as error:
                    problem = cannot_write(path, error) if isinstance(error, OSError) else error
                # No rank goes on to the next part before all have done this one.
                if comm.max_all(int(problem is not None), patient=True):
                    self._give_up(path, step, f"{name} failed: {problem}" if problem else None)
                    return False
            self.last = step
            if self._rank == 0:
                try:
                    checkpoints.tidy(self.run_dir, self.config.checkpoint.keep)
                except OSError as error:
                    log.warning("an old checkpoint stays: %s", error)
            comm.max_all(0, patient=True)  # to remove files may take as long as to write them
        if self._rank == 0:
            taken_s = time.perf_counter() - began_s
            num_bytes = checkpoints.read(path).num_bytes
            log.info("saved %s, %s in %.2f s", path.name, size(num_bytes), taken_s)
            self._note("checkpoint_saved", step=step, bytes=num_bytes, save_s=taken_s)
        return True

    def _make_folder(self, path: Path, step: int) -> None:
        if self._rank == 0:
            checkpoints.tidy(self.run_dir)  # what an earlier crash left
            checkpoints.hidden(path, "tmp").mkdir(parents=True)

    def _write(self, path: Path, step: int) -> None:
        for name, tensors in _files_of(self.engine).items():
            tensorfile.write(checkpoints.hidden(path, "tmp") / name, tensors)

    def _publish(self, path: Path, step: int) -> None:
        if self._rank != 0:
            return
        building, plan = checkpoints.hidden(path, "tmp"), self.engine.context.plan
        files = {file.name: file.stat().st_size for file in sorted(building.iterdir())}
        needed = {_rank_file(rank) for rank in range(plan.world)}
        needed |= {_stage_file("stage", stage.index) for stage in plan.stages}
        if missing := needed - files.keys():
            raise RunError(f"{min(missing)} is not in {building}: do all ranks see this folder?")
        made = Checkpoint(path, step, self.attempt, self.config.task.name, _layout_of(plan), files)
        text = json.dumps(made.to_dict(), indent=1) + "\n"
        write_atomically(building / checkpoints.MANIFEST, text)
        _sync(building)
        if path.exists():  # of an attempt that this one repeats
            checkpoints.remove(path)
        building.rename(path)
        _sync(path.parent)

    def _give_up(self, path: Path, step: int, problem: str | None) -> None:
        if self._rank == 0:
            shutil.rmtree(checkpoints.hidden(path, "tmp"), ignore_errors=True)
        # No rank writes after this, and the disk may have room again for the event.
        comm.max_all(0, patient=True)
        if problem is not None:
            log.warning("there is no checkpoint of step %d: %s; the run goes on", step, problem)
            self._note("checkpoint_failed", step=step, text=problem)

    def _note(self, event: str, **fields: str | float) -> None:
        with contextlib.suppress(RunError):  # the disk may be full
            records.event(self.run_dir, self.attempt, event, rank=self._rank, **fields)

    def restore(self, metrics: Path) -> None:
        """Fills the rank, just built, from the checkpoint, if any; RunError: of another network.

        Rank 0 notes it in ``metrics``: ``attempt`` is None for a checkpoint of another run.
        """
        checkpoint, engine, step = self.begin.checkpoint, self.engine, self.begin.step
        if checkpoint is None:
            return
        engine.recorder.next_step = step
        same_task = checkpoint.task == self.config.task.name
        values, optimizer = _files(checkpoint, "stage"), engine.optimizer if same_task else None
        kept = {kind: _files(checkpoint, kind) for kind in (optimizer.kept if optimizer else ())}
        with torch.no_grad():
            for name, tensor in sorted(engine.tensors.items()):
                tensor.data.copy_(_fitting(values, name, tensor, checkpoint))
                for kind, files in kept.items():
                    if optimizer is not None and name in files:
                        state = optimizer.kept_of(tensor, make=True)[kind]
                        state.copy_(_fitting(files, name, state, checkpoint))
        scale = engine.executor.scale
        if scale is not None and SCALE_FILE in checkpoint.files:
            scale.restore(TensorFile(checkpoint.path / SCALE_FILE).tensor(SCALE))
        # Another layout or kind of device draws other numbers, and not those of step 0 again.
        torch.manual_seed((self.config.seed * 2**20 + self._rank) ^ (step << 40))
        if same_task and checkpoint.layout == _layout_of(engine.context.plan):
            file = TensorFile(checkpoint.path / _rank_file(self._rank))
            engine.device.set_random_states({name: file.tensor(name) for name in file.names})
        # So that no rank waits in its first step for another one's disk.
        comm.max_all(0, patient=True)
        log.info("goes on at step %d from %s", step, checkpoint.path)
        if self._rank == 0:
            ours = checkpoint.path.parent == self.run_dir / checkpoints.FOLDER
            line = {"kind": "begin", "rank": 0, "step": step}
            line["checkpoint"] = checkpoint.name if ours else str(checkpoint.path)
            line["attempt"] = checkpoint.attempt if ours else None
            append_line(metrics, line)


def choose_begin(run_dir: Path, config: RunConfig, plan: Plan, world: World) -> Begin:
    """Returns where all ranks begin; all pass over a checkpoint that is damaged for one of them.

    ConfigError: ``checkpoint.resume`` names something that this run cannot go on with; RunError:
    all that it names is damaged.
    """
    paths = _candidates(run_dir, config, world)
    for path in paths:
        is_damaged = False
        try:
            checkpoint = checkpoints.read(path)
            _check(checkpoint, plan, world.rank)
        except DamagedError as error:
            is_damaged = True
            _warn(run_dir, world, str(error))
        if not comm.max_all(int(is_damaged), patient=True):
            return Begin(checkpoints.begin_of(checkpoint, config), checkpoint)
    if paths and config.checkpoint.source:
        raise RunError(f"{', '.join(paths)}: damaged, and there is no other checkpoint")
    return Begin(0, None)


def _files_of(engine: RankEngine) -> dict[str, dict[str, Tensor]]:
    # What a rank writes: name of the file -> tensors by name, as they lie in memory.
    context, tensors, optimizer = engine.context, engine.tensors, engine.optimizer
    files = {_rank_file(context.rank): engine.device.random_states()}
    if engine.executor.scale is not None and context.rank == 0:  # all ranks have the same
        files[SCALE_FILE] = {SCALE: engine.executor.scale.state()}
    if context.replica or context.tile:
        return files
    names, stage = sorted(names_of([context], tensors)), context.stage.index
    files[_stage_file("stage", stage)] = {name: tensors[name].detach() for name in names}
    if optimizer is not None:
        kept = {name: optimizer.kept_of(tensors[name]) for name in names}
        for kind in optimizer.kept:
            moved = {name: state[kind] for name, state in kept.items() if state}
            files[_stage_file(kind, stage)] = moved
    return files


def _rank_file(rank: int) -> str:
    return f"rank{rank:04d}.safetensors"


def _stage_file(kind: str, stage: int) -> str:
    return f"{kind}{stage:02d}.safetensors"


def _layout_of(plan: Plan) -> str:
    # Equal for plans in which each rank computes the same in one order: then it draws the same
    # random numbers.
    stages = [[s.first, s.last, s.tiles, s.shards, s.segments] for s in plan.stages]
    facts = [stages, plan.schedule, plan.num_replicas, plan.num_directions, plan.graph.input_shape]
    nodes = [dataclasses.asdict(node) for node in plan.graph.nodes]
    return hashlib.sha256(json.dumps([facts, nodes]).encode()).hexdigest()[:16]


def _candidates(run_dir: Path, config: RunConfig, world: World) -> list[str]:
    # Rank 0 looks, so that all ranks try the same checkpoints in one order, the best first.
    paths, failure = [], None
    if world.rank == 0:
        try:
            there, damaged = checkpoints.candidates(run_dir, config)
            for problem in damaged:
                _warn(run_dir, world, problem)
            paths = [str(checkpoint.path) for checkpoint in there]
        except HiresError as error:  # the other ranks wait for an answer in this case too
            failure = error
    answer = [paths, None if failure is None else str(failure)]
    agreed, problem = json.loads(comm.broadcast_text(json.dumps(answer)))
    if problem is not None:
        raise failure or RunError(problem)
    return list(agreed)


def _warn(run_dir: Path, world: World, problem: str) -> None:
    log.warning("%s; the one before is used", problem)
    records.event(run_dir, world.attempt, "checkpoint_damaged", rank=world.rank, text=problem)


def _check(checkpoint: Checkpoint, plan: Plan, rank: int) -> None:
    # DamagedError: something that the rank needs has changed since it was written.
    stages = {slot.stage for slot in plan.slots_of(rank)}
    names = {name for stage in stages for node in plan.nodes(stage) for name in node.params}
    for name in checkpoint.files:
        if not name.startswith("rank"):
            file = TensorFile(checkpoint.path / name)
            file.check((names | {SCALE}) & file.names)
    if checkpoint.layout == _layout_of(plan):
        file = TensorFile(checkpoint.path / _rank_file(rank))
        file.check(file.names | {HOST_STATE})


def _files(checkpoint: Checkpoint, kind: str) -> dict[str, TensorFile]:
    # By exact names: one kind may begin with another's name, as exp_avg_sq with exp_avg.
    stages = [_stage_file(kind, stage) for stage in range(len(checkpoint.files))]
    files = [TensorFile(checkpoint.path / name) for name in stages if name in checkpoint.files]
    return {name: file for file in files for name in file.names}


def _fitting(
    files: dict[str, TensorFile], name: str, like: Tensor, checkpoint: Checkpoint
) -> Tensor:
    problem = f"{checkpoint.path} has no {name}"
    if name in files:
        tensor = files[name].tensor(name)
        if tensor.shape == like.shape:
            return tensor
        shapes = f"{list(tensor.shape)}, not {list(like.shape)}"
        problem = f"{name} of {checkpoint.path} has the shape {shapes}"
    advice = "the checkpoint is of another network: use the model and model.classes of its run"
    raise RunError(f"{problem}; {advice}")


def _sync(folder: Path) -> None:  # returns when the names in a folder are on the disk
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
