"""Writes and loads checkpoints: each rank its part.

    stage00.safetensors      parameters and running statistics of a stage, by their names in the
                             network
    exp_avg00.safetensors    what the optimiser keeps for its parameters, by the same names; where
                             holders divide it, exp_avg00.001.safetensors of each, by rows
    gradient_left00.001.safetensors   what a codec has left of a rank's gradients of the stage
    checkpoint.json          the digest of each file, and the few numbers that all ranks have alike

All holders of a stage are equal, so one of them (``weights_file.reader_of``) writes its files and
reads them again; the others get what it has read by broadcast.
Which images come next, and what a step draws, are functions of the step and the seed
(``hires.data.source``, ``hires.nets.random_draws``).

    all ranks   write into a hidden folder, wait until the files are on the disk
    all ranks   agree that every part was written
    rank 0      renames the folder

Tensors of an accelerator are written from copies on the host, piece by piece, so a checkpoint
serves every kind of device.

A crash at any moment leaves the checkpoint before whole. A failure on any rank ends the save on all
of them, and the run goes on; a training whose last save failed ends as failed. Saving happens
between steps and adds a few MiB to what is kept (:data:`hires.engine.tensorfile.PIECE_BYTES`), so
the predicted peak of a step holds.

Layers are found by their names, whatever stage the run that wrote them had them in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hires import comm
from hires.core.config.fields import build
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store import checkpoints, records
from hires.core.store.checkpoints import Checkpoint, StoredFile
from hires.core.store.file_names import attempt_dir
from hires.core.store.files import append_metric, cannot_write, write_atomically
from hires.core.store.naming import overrides, plain
from hires.core.store.network_weights import misfit
from hires.core.units import size
from hires.engine import tensorfile
from hires.engine.build import names_of
from hires.engine.optimizer import EMA, Optimizer
from hires.engine.rank_engine import RankEngine
from hires.engine.resume_point import ResumePoint
from hires.engine.tensorfile import ContentsReader, stage_file
from hires.engine.weights_file import reader_of, share_weights
from hires.plan.groups import gradient_group, process_groups
from hires.plan.updates import shares_of_holders

SCALE, OPTIMIZER = "loss_scale", "optimizer."
"""Numbers of the manifest: the loss scale with its counters, and before their names those that the
optimiser keeps alike for all parameters."""
LEFT = "gradient_left"
"""Begins the files of what a codec has left of the gradients of each rank (``comm.codec=topk``)."""
SETTINGS = (
    "seed", "batch", "epochs", "model", "data", "augment", "precision", "optimizer", "lr_schedule",
    "loss",
)  # fmt: skip
"""Keys and sections that decide what a training learns."""

log = logging.getLogger(__name__)


@dataclass
class Saver:
    """Restores and saves a rank's part of a run, in step with the other ranks."""

    run_dir: Path
    attempt: int
    config: RunConfig
    engine: RankEngine
    begin: ResumePoint

    def __post_init__(self) -> None:
        self.first = self.last = self.begin.step  # steps that were done at the last checkpoint
        self._rank = self.engine.rank
        self._written: dict[str, StoredFile] = {}  # files of this rank in the checkpoint being made
        self.problem: str | None = None  # why the last save failed, if it did

    def save(self, step: int) -> bool:
        """Saves the state after so many steps; returns whether there is a checkpoint now.

        All ranks call it, and leave it, together. Disks may be slow, so no rank counts as stuck
        meanwhile, whether it writes or waits.
        """
        began_s, path = time.perf_counter(), checkpoints.place(self.run_dir, step)
        make, publish = self._make_folder, self._publish
        parts = {"making the folder": make, "writing": self._write, "naming it": publish}
        with comm.activity.may_stand_still(comm.PATIENCE_S):
            for name, part in parts.items():
                problem = None
                try:
                    part(path, step)
                except (OSError, RunError) as error:
                    problem = cannot_write(path, error) if isinstance(error, OSError) else error
                # No rank goes on to the next part before all have done this one.
                if comm.max_all(int(problem is not None), patient=True):
                    self._give_up(path, step, f"{name} failed: {problem}" if problem else "")
                    return False
            self.last, self.problem = step, None
            if self._rank == 0:
                self.tidy()
            comm.max_all(0, patient=True)  # to remove files may take as long as to write them
        if self._rank == 0:
            taken_s = time.perf_counter() - began_s
            num_bytes = checkpoints.read(path).num_bytes
            log.info("saved %s, %s in %.2f s", path.name, size(num_bytes), taken_s)
            self._note("checkpoint_saved", step=step, bytes=num_bytes, save_s=taken_s)
        return True

    def require_saved(self) -> None:
        """RunError: the last state that was to be saved is not on the disk."""
        if self.problem is not None:
            raise RunError(
                f"the last save of the training failed, so the weights that it should leave are "
                f"lost: {self.problem}; then the same command goes on at step {self.last}"
            )

    def tidy(self) -> None:
        """Removes the checkpoints that are not kept."""
        try:
            checkpoints.tidy(self.run_dir, self.config.checkpoint.keep, self.begin.damaged)
        except OSError as error:
            log.warning("an old checkpoint stays: %s", error)

    def _make_folder(self, path: Path, step: int) -> None:
        if self._rank == 0:
            checkpoints.tidy(self.run_dir)  # what an earlier crash left
            checkpoints.hidden(path, "tmp").mkdir(parents=True)

    def _write(self, path: Path, step: int) -> None:
        building = checkpoints.hidden(path, "tmp")
        self._written = {
            name: tensorfile.write(building / name, tensors)
            for name, tensors in _files_of(self.engine).items()
        }

    def _publish(self, path: Path, step: int) -> None:
        files, numbers = dict[str, StoredFile](), dict[str, list[float]]()
        optimizer = self.engine.optimizer
        own = {} if optimizer is None else optimizer.numbers()  # none of a rank without parameters
        mine = {name: dataclasses.asdict(file) for name, file in self._written.items()}
        for text in comm.gather_texts(json.dumps([mine, own])):
            written, kept = json.loads(text)
            files |= {name: build(StoredFile, one) for name, one in written.items()}
            numbers |= {OPTIMIZER + name: [number] for name, number in kept.items()}
        if self._rank != 0:
            return
        building, engine = checkpoints.hidden(path, "tmp"), self.engine
        for name, file in files.items():
            there = building / name
            if not there.is_file() or there.stat().st_size != file.num_bytes:
                raise RunError(f"{name} is not in {building}: do all ranks see this folder?")
        if engine.executor.scale is not None:
            numbers[SCALE] = engine.executor.scale.state().tolist()
        facts = path, step, self.attempt, files, numbers
        made = Checkpoint(*facts, _settings_of(self.config))
        write_atomically(building / checkpoints.MANIFEST, made.manifest())
        _sync(building)
        checkpoints.publish(building, path)
        _sync(path.parent)

    def _give_up(self, path: Path, step: int, problem: str) -> None:
        if self._rank == 0:
            shutil.rmtree(checkpoints.hidden(path, "tmp"), ignore_errors=True)
        # No rank writes after this, and the disk may have room again for the event.
        self.problem = next(filter(None, comm.gather_texts(problem)))
        if self._rank == 0:
            log.warning("there is no checkpoint of step %d: %s", step, self.problem)
            self._note("checkpoint_failed", step=step, text=self.problem)

    def _note(self, event: str, **fields: str | float) -> None:
        with contextlib.suppress(RunError):  # the disk may be full
            records.rank_event(self.run_dir, self.attempt, event, self._rank, **fields)

    def restore(self) -> None:
        """Fills the rank, just built, from the checkpoint, if any; RunError: of another network.

        An inference was built with the checkpoint's weights. Rank 0 records it:
        ``attempt`` is None for a checkpoint of another run, and ``differs`` says what that run had
        otherwise.
        """
        checkpoint, engine, step = self.begin.checkpoint, self.engine, self.begin.step
        folder, earlier = attempt_dir(self.run_dir, self.attempt), self.begin.attempt
        for one in engine.ranks:
            one.recorder.next_step = step
        if checkpoint is None:
            if step and self._rank == 0:
                log.info("resumes at step %d of attempt a%s", step, earlier)
                append_metric(folder, 0, "begin", step=step, checkpoint=None, attempt=earlier)
            return
        trains = engine.optimizer is not None
        lost = self._restore_tensors(checkpoint, engine.optimizer) if trains else []
        scale = engine.executor.scale
        if scale is not None and (state := checkpoint.numbers.get(SCALE)) is not None:
            scale.restore(torch.tensor(state, dtype=torch.float64))
        # So that no rank waits in its first step for another one's disk.
        comm.max_all(0, patient=True)
        log.info("resumes at step %d from %s", step, checkpoint.path)
        if self._rank == 0:
            ours = checkpoint.path.parent == self.run_dir / checkpoints.FOLDER
            line: dict[str, object] = {"step": step}
            line["checkpoint"] = checkpoint.name if ours else str(checkpoint.path)
            line["attempt"] = checkpoint.attempt if ours else earlier
            if scale is not None:
                line["skipped_steps"] = scale.skipped
            if not ours:
                line["differs"] = self._say_differences(checkpoint, lost)
            append_metric(folder, 0, "begin", **line)

    def _say_differences(self, checkpoint: Checkpoint, lost: list[str]) -> list[str]:
        # What the run of a checkpoint had otherwise than this one, its words as of a command line.
        trains = self.engine.optimizer is not None
        own = _settings_of(self.config)
        here, there = overrides(checkpoint.settings, own), overrides(own, checkpoint.settings)
        said = []
        if not trains:
            said.append("of a training it takes the parameters alone")
        elif lost:
            said.append(f"the optimiser begins without its {', '.join(lost)}")
        if trains and here:
            said.append(f"it has {' '.join(here)} where that run had {' '.join(there)}")
        if said:
            text = f"begins with {checkpoint.path}: {'; '.join(said)}"
            log.warning("%s", text)
            self._note("resume_differs", text=text)
        return there if trains else []

    @torch.no_grad()
    def _restore_tensors(self, checkpoint: Checkpoint, optimizer: Optimizer | None) -> list[str]:
        # Returns the kinds of tensors that the optimiser keeps and the checkpoint lacks.
        engine, plan = self.engine, self.engine.context.plan
        kept = _kept_kinds(checkpoint, optimizer)
        reader, shared = ContentsReader(checkpoint), dict[int, list[Tensor]]()
        kinds = {"stage": checkpoint.tensors("stage")}
        kinds |= {kind: checkpoint.tensors(kind) for kind in kept}
        for stage, context in {c.stage.index: c for c in engine.contexts}.items():
            is_reader, shared[stage] = reader_of(plan, stage) == self._rank, []
            divided = bool(shares_of_holders(plan, stage))
            tensors = {name: engine.tensors[name] for name in names_of([context], engine.tensors)}
            for kind, parts in kinds.items():
                needed = [n for n in sorted(tensors) if kind == "stage" or n in parts]
                shapes = {name: list(tensors[name].shape) for name in needed}
                held = checkpoint.shapes(kind)
                if wrong := misfit(held, shapes, others=held):
                    raise RunError(
                        f"the checkpoint is of another network: {checkpoint.path}: "
                        f"{wrong.text(3)}; use the model and model.classes of its run"
                    )
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
        parts, lost = checkpoint.tensors(LEFT), list[str]()
        for key, tensor in (item for own in _left_of(engine).values() for item in own.items()):
            if key in parts:
                reader.fill(tensor, parts[key], 0)
            else:  # of another layout or codec
                lost = [LEFT]
        comm.max_all(0, patient=True)  # a disk may need longer than a message
        share_weights(engine.context, shared)
        engine.spread_buffers()
        if optimizer is not None and EMA not in kept:  # of a run that kept none
            optimizer.begin_ema()
        kinds_kept = optimizer.kept if optimizer else ()
        return [kind for kind in kinds_kept if kind not in {*kept, EMA}] + lost


def _kept_kinds(checkpoint: Checkpoint, optimizer: Optimizer | None) -> list[str]:
    """Returns what an optimiser takes from a checkpoint: all of its own state, or none of it."""
    if optimizer is None:
        return []
    stored = [kind for kind in optimizer.kept if checkpoint.tensors(kind)]
    own = {*optimizer.kept} - {EMA}
    numbers = {
        name.removeprefix(OPTIMIZER): number
        for name, [number, *_] in checkpoint.numbers.items()
        if name.startswith(OPTIMIZER)
    }
    if own and own <= {*stored} and optimizer.restore_numbers(numbers):
        return stored
    return [kind for kind in stored if kind == EMA]


def _settings_of(config: RunConfig) -> dict[str, object]:
    return {key: value for key, value in plain(config).items() if key in SETTINGS}


def _files_of(engine: RankEngine) -> dict[str, dict[str, Tensor]]:
    # What a rank writes: name of the file -> tensors by name, as they lie in memory.
    context, optimizer, tensors = engine.context, engine.optimizer, engine.tensors
    files: dict[str, dict[str, Tensor]] = {}
    plan = context.plan
    for stage, one in {c.stage.index: c for c in engine.contexts}.items():
        names, shares = sorted(names_of([one], tensors)), shares_of_holders(plan, stage)
        is_writer = reader_of(plan, stage) == engine.rank
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
    return files | {name: own for name, own in _left_of(engine).items() if own}


def _left_of(engine: RankEngine) -> dict[str, dict[str, Tensor]]:
    # By file what a codec has left of gradients, whose names have the number of their rank before.
    plan, rank, found = engine.context.plan, engine.rank, dict[str, dict[str, Tensor]]()
    sync = engine.executor.sync
    for group, left in (sync.left() if sync is not None else {}).items():
        members = process_groups(plan)[group]
        stage, part = group - gradient_group(plan, 0), members.index(rank)
        named = {f"{part}of{len(members)}/{name}": tensor for name, tensor in left.items()}
        found[stage_file(LEFT, stage, part)] = named
    return found


def _sync(folder: Path) -> None:  # returns when the names in a folder are on the disk
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
