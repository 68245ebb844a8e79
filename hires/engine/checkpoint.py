"""Writes and loads checkpoints: each rank its part.

    stage00.safetensors      parameters and running statistics of a stage, by their names in the
                             network
    momentum00.safetensors   what the optimiser keeps for its parameters, by the same names; where
                             holders divide it, momentum00.001.safetensors of each, by rows
    rank0000.safetensors     states of a rank's random numbers
    scale.safetensors, ...   the few numbers that all ranks have alike (:mod:`.checkpoint_numbers`)

All holders of a stage are equal, so one of them (``weight_sharing.reader_of``) writes its files and
reads them again; the others get what it has read by broadcast.
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
from hires.engine.build import RankEngine, made_tensors, names_of
from hires.engine.checkpoint_contents import Contents, ContentsReader, rank_file, stage_file
from hires.engine.checkpoint_numbers import NAMES, SCALE, UPDATES, files_of_numbers, numbers_in
from hires.engine.optimizer import EMA, Optimizer
from hires.engine.stopped_pass import agreed_step
from hires.engine.tensorfile import TensorFile
from hires.engine.weight_sharing import reader_of, share_weights
from hires.engine.weights_file import WeightsFile
from hires.nets.generators import HOST_STATE
from hires.plan.groups import held_stages
from hires.plan.ownership import shares_of_holders
from hires.plan.plan import Plan

log = logging.getLogger(__name__)


class Begin(NamedTuple):
    """Where an attempt begins."""

    step: int  # number of its first step
    contents: Contents | None  # of the checkpoint that it resumes from; None: it needs none
    attempt: int | None = None  # whose lines hold the steps before, of a pass without a checkpoint


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
                self.tidy()
            comm.max_all(0, patient=True)  # to remove files may take as long as to write them
        if self._rank == 0:
            taken_s = time.perf_counter() - began_s
            num_bytes = checkpoints.read(path).num_bytes
            log.info("saved %s, %s in %.2f s", path.name, size(num_bytes), taken_s)
            self._note("checkpoint_saved", step=step, bytes=num_bytes, save_s=taken_s)
        return True

    def tidy(self) -> None:
        """Removes the checkpoints that are not kept."""
        try:
            checkpoints.tidy(self.run_dir, self.config.checkpoint.keep)
        except OSError as error:
            log.warning("an old checkpoint stays: %s", error)

    def _make_folder(self, path: Path, step: int) -> None:
        if self._rank == 0:
            checkpoints.tidy(self.run_dir)  # what an earlier crash left
            checkpoints.hidden(path, "tmp").mkdir(parents=True)

    def _write(self, path: Path, step: int) -> None:
        for name, tensors in _files_of(self.engine, self._own_tensors()).items():
            tensorfile.write(checkpoints.hidden(path, "tmp") / name, tensors)

    def _own_tensors(self) -> dict[str, Tensor]:
        # All tensors of the network. A rewritten one holds what was computed from them, so a rank
        # that writes makes them again as they were at the start: of the seed, of a file, or of the
        # last checkpoint. RunError: the network is another one each time that it is built.
        engine, last = self.engine, self.begin.contents
        readers = {reader_of(one.plan, one.stage.index) for one in engine.contexts}
        if engine.derived.have_all or self._rank not in readers:
            return engine.tensors
        made, _ = made_tensors(self.config, engine.contexts)
        if self.last != self.first:
            last = Contents.read(checkpoints.read(checkpoints.place(self.run_dir, self.last)))
        if last is None and engine.weights is not None:
            WeightsFile(engine.weights).fill_all({n: tensor.data for n, tensor in made.items()})
        elif last is not None:
            reader, parts = ContentsReader(last), last.of_kind("stage")
            for name, tensor in made.items():
                reader.fill(tensor.data, parts[name])
        made = {name: engine.device.place(tensor) for name, tensor in made.items()}
        if not engine.derived.are_of(made):
            raise RunError(
                "the network's function returns other weights each time; seed its numbers"
            )
        return {**made, **engine.tensors}

    def _publish(self, path: Path, step: int) -> None:
        if self._rank != 0:
            return
        building, plan = checkpoints.hidden(path, "tmp"), self.engine.context.plan
        files = {file.name: file.stat().st_size for file in sorted(building.iterdir())}
        needed = {rank_file(rank) for rank in range(plan.world)}
        needed |= {stage_file("stage", stage.index) for stage in plan.stages}
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
        contents, engine, step = self.begin.contents, self.engine, self.begin.step
        engine.recorder.next_step = step
        if contents is None:
            if step and self._rank == 0:
                log.info("goes on at step %d of attempt a%s", step, self.begin.attempt)
                line = {"kind": "begin", "rank": 0, "step": step, "checkpoint": None}
                append_line(metrics, {**line, "attempt": self.begin.attempt})
            return
        checkpoint = contents.checkpoint
        same_task = checkpoint.task == self.config.task.name
        self._restore_tensors(contents, engine.optimizer if same_task else None)
        engine.derived.refresh()
        engine.prepare()
        scale = engine.executor.scale
        if scale is not None and (state := numbers_in(contents, self._rank, SCALE)) is not None:
            scale.restore(state)
            if step == 0:  # of another task: its steps are none of this run
                scale.skipped = 0
        # Another layout or kind of device draws other numbers, and not those of step 0 again.
        torch.manual_seed((self.config.seed * 2**20 + self._rank) ^ (step << 40))
        if same_task and checkpoint.layout == _layout_of(engine.context.plan):
            file = TensorFile(checkpoint.path / rank_file(self._rank))
            engine.device.set_random_states({name: file.tensor(name) for name in file.names})
        # So that no rank waits in its first step for another one's disk.
        comm.max_all(0, patient=True)
        log.info("goes on at step %d from %s", step, checkpoint.path)
        if self._rank == 0:
            ours = checkpoint.path.parent == self.run_dir / checkpoints.FOLDER
            line = {"kind": "begin", "rank": 0, "step": step}
            line["checkpoint"] = checkpoint.name if ours else str(checkpoint.path)
            line["attempt"] = checkpoint.attempt if ours else self.begin.attempt
            if scale is not None:
                line["skipped_steps"] = scale.skipped
            append_line(metrics, line)

    @torch.no_grad()
    def _restore_tensors(self, contents: Contents, optimizer: Optimizer | None) -> None:
        engine, plan = self.engine, self.engine.context.plan
        reader, shared = ContentsReader(contents), dict[int, list[Tensor]]()
        kinds = {"stage": contents.of_kind("stage")}
        kinds |= {kind: contents.of_kind(kind) for kind in (optimizer.kept if optimizer else ())}
        for stage, context in {c.stage.index: c for c in engine.contexts}.items():
            is_reader, shared[stage] = reader_of(plan, stage) == self._rank, []
            divided = bool(shares_of_holders(plan, stage))
            tensors = {name: engine.tensors[name] for name in names_of([context], engine.tensors)}
            for kind, parts in kinds.items():
                needed = [n for n in sorted(tensors) if kind == "stage" or n in parts]
                contents.require(kind, {name: list(tensors[name].shape) for name in needed})
                for name in needed:
                    tensor, first = tensors[name].data, 0
                    if kind != "stage" and optimizer is not None:
                        if not optimizer.moves(tensors[name]):
                            continue
                        first = optimizer.first_row(tensors[name])
                        tensor = optimizer.kept_of(tensors[name], make=True)[kind]
                    own = divided and kind != "stage"
                    if own or is_reader:
                        reader.fill(tensor, parts[name], first)
                    if not own:
                        shared[stage].append(tensor)
        updates = numbers_in(contents, self._rank, UPDATES)
        if (
            optimizer is not None
            and updates is not None
            and any(kinds[k] for k in {*optimizer.kept} - {EMA})
        ):
            optimizer.updates = int(updates)
        comm.max_all(0, patient=True)  # a disk may need longer than a message
        share_weights(engine.context, shared)
        if optimizer is not None and not kinds.get(EMA, True):  # of a run that kept none
            optimizer.begin_ema()


def choose_begin(run_dir: Path, config: RunConfig, plan: Plan, world: World) -> Begin:
    """Returns where all ranks begin; all pass over a checkpoint that is damaged for one of them.

    ConfigError: ``checkpoint.resume`` names something that this run cannot go on with; RunError:
    all that it names is damaged.
    """
    there = _candidates(run_dir, config, world)
    for checkpoint in there:
        contents = None
        try:
            contents = _agreed_contents(checkpoint, world)
            if contents is not None:
                _check(contents, plan, world.rank)
        except DamagedError as error:
            contents = None
            _warn(run_dir, world, str(error))
        if not comm.max_all(int(contents is None), patient=True):
            step, attempt = checkpoints.begin_of(checkpoint, config), None
            if step == 0:  # the parameters of another run: a pass over the data may go on
                step, attempt = agreed_step(run_dir, config, world)
            return Begin(step, contents, attempt)
    if there and config.checkpoint.source:
        paths = ", ".join(str(checkpoint.path) for checkpoint in there)
        raise RunError(f"{paths}: damaged, and there is no other checkpoint")
    if there:
        return Begin(0, None)
    step, attempt = agreed_step(run_dir, config, world)
    return Begin(step, None, attempt)


def _files_of(engine: RankEngine, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    # What a rank writes: name of the file -> tensors by name, as they lie in memory.
    context, optimizer = engine.context, engine.optimizer
    files = {rank_file(context.rank): engine.device.random_states()}
    files |= files_of_numbers(engine) if context.rank == 0 else {}
    plan = context.plan
    for stage, one in {c.stage.index: c for c in engine.contexts}.items():
        names, shares = sorted(names_of([one], tensors)), shares_of_holders(plan, stage)
        is_writer = reader_of(plan, stage) == context.rank
        if is_writer:
            files[stage_file("stage", stage)] = {name: tensors[name].detach() for name in names}
        part, keys = None, {name: name for name in names if is_writer}
        if shares:
            part, own = [*shares].index(context.rank), shares[context.rank]
            keys = {rows.name: f"{rows.name}[{rows.first}:{rows.last}]" for rows in own}
        kept = {}
        if optimizer is not None:
            kept = {key: optimizer.kept_of(tensors[name]) for name, key in keys.items()}
        for kind in optimizer.kept if optimizer is not None and (shares or is_writer) else ():
            moved = {key: state[kind] for key, state in kept.items() if state}
            files[stage_file(kind, stage, part)] = moved
    return files


def _layout_of(plan: Plan) -> str:
    # Equal for plans in which each rank computes the same in one order: then it draws the same
    # random numbers.
    stages = [[s.first, s.last, s.tiles, s.shards, s.segments] for s in plan.stages]
    facts = [stages, plan.schedule, plan.num_replicas, plan.num_directions, plan.graph.input_shape]
    nodes = [dataclasses.asdict(node) for node in plan.graph.nodes]
    return hashlib.sha256(json.dumps([facts, nodes]).encode()).hexdigest()[:16]


def _candidates(run_dir: Path, config: RunConfig, world: World) -> list[Checkpoint]:
    # Rank 0 looks, so that all ranks try the same checkpoints in one order, the best first.
    there: list[Checkpoint] = []
    failure = None
    if world.rank == 0:
        try:
            there, damaged = checkpoints.candidates(run_dir, config)
            for problem in damaged:
                _warn(run_dir, world, problem)
        except HiresError as error:  # the other ranks wait for an answer in this case too
            failure = error
    answer = [
        [{**dataclasses.asdict(one), "path": str(one.path)} for one in there],
        failure and str(failure),
    ]
    agreed, problem = json.loads(comm.broadcast_text(json.dumps(answer)))
    if problem is not None:
        raise failure or RunError(problem)
    return [checkpoints.from_dict(values) for values in agreed]


def _agreed_contents(checkpoint: Checkpoint, world: World) -> Contents | None:
    # What rank 0 finds in a checkpoint; DamagedError there, None on the others: it is not whole.
    text, problem = "", None
    if world.rank == 0:
        try:
            text = Contents.read(checkpoint).to_json()
        except DamagedError as error:
            problem = error
    text = comm.broadcast_text(text)
    if problem is not None:
        raise problem
    return Contents.from_json(checkpoint, text) if text else None


def _warn(run_dir: Path, world: World, problem: str) -> None:
    log.warning("%s; the one before is used", problem)
    records.event(run_dir, world.attempt, "checkpoint_damaged", rank=world.rank, text=problem)


def _check(contents: Contents, plan: Plan, rank: int) -> None:
    # DamagedError: something that the rank reads has changed since it was written.
    names, kept = set[str](), {*NAMES} if rank == 0 else set[str]()
    for stage in held_stages(plan, rank):
        shares = shares_of_holders(plan, stage)
        if reader_of(plan, stage) == rank:
            own = {name for node in plan.nodes(stage) for name in node.params}
            own = plan.graph.own_params(own)
            names |= own
            kept |= set() if shares else own
        kept |= {rows.name for rows in shares.get(rank, [])}
    contents.check(names, kept)
    if contents.checkpoint.layout == _layout_of(plan):
        file = TensorFile(contents.checkpoint.path / rank_file(rank))
        file.check(file.names | {HOST_STATE})


def _sync(folder: Path) -> None:  # returns when the names in a folder are on the disk
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
