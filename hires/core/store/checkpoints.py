"""Lists the checkpoints of a run, and decides at which of them an attempt begins.

    <run>/checkpoints/step000012/   checkpoint.json stage00.safetensors ...
                      best.json     which of them had the best evaluation

A checkpoint is the state after so many steps. It is written into a hidden folder beside its place,
which is renamed when all ranks have written and everything is on the disk, so that a folder with
a plain name was whole once. ``checkpoint.json``, the manifest, has the size, the SHA-256 and the
tensors of every file, and a digest of itself: lists compare sizes, and who reads a file compares
all of it. The files belong to ``hires.engine.checkpoint``. No torch, so that the front end can list
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hires.core.config.fields import build
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.store import file_names, frozen, reading
from hires.core.store.cache import sealed, unsealed
from hires.core.store.file_names import StrPath
from hires.core.store.files import write_atomically
from hires.core.store.frozen import Frozen
from hires.core.store.records import done_attempt

FOLDER = file_names.CHECKPOINTS
MANIFEST = file_names.CHECKPOINT
SCHEMA = 4
Shape = list[int]
_REPLACED = "replaced"
"""Ending of a hidden checkpoint while another one takes its name."""
_ROWS = re.compile(r"(.*)\[(\d+):\d+\]", re.DOTALL)
"""A key of a file that holds rows of a tensor: ``conv1.weight[16:32]``."""


class DamagedError(RunError):
    """A checkpoint is not what was written; an earlier one may be."""


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, or some rows of one."""

    file: str
    key: str
    """Its name there: of rows ``conv1.weight[16:32]``."""
    first: int
    """Its first row, along the first dim."""
    shape: Shape


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint as it was written."""

    num_bytes: int
    sha256: str
    shapes: dict[str, Shape]
    """Of its tensors, by their keys."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all there."""

    path: Path
    step: int
    """Steps that were done: the next one has this number."""
    attempt: int
    """Attempt of the run that wrote it."""
    files: dict[str, StoredFile]
    """By name, all but the manifest."""
    numbers: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """The few that all ranks have alike, as the loss scale."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The config's sections that decide what a training learns."""

    @property
    def name(self) -> str:
        """``step000012``."""
        return self.path.name

    @property
    def run(self) -> Path:
        """The run folder that it lies in."""
        return self.path.absolute().parent.parent

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files.values())

    def manifest(self) -> str:
        """Returns the text of its manifest."""
        values = dataclasses.asdict(dataclasses.replace(self, path=Path()))
        return sealed({"schema": SCHEMA, **values, "path": None}, MANIFEST)

    def tensors(self, kind: str) -> dict[str, list[StoredTensor]]:
        """Returns the tensors of one kind by name, each as its parts in the order of their rows.

        Kinds are ``stage`` and what an optimiser keeps, as ``momentum_buffer``.
        """
        # By exact names: one kind may begin with another's name, as exp_avg_sq with exp_avg.
        named = re.compile(rf"{re.escape(kind)}\d{{2,}}(\.\d+)?\.safetensors")
        parts: dict[str, list[StoredTensor]] = {}
        for file, stored in self.files.items():
            for key, shape in stored.shapes.items() if named.fullmatch(file) else ():
                name, first = part_of_key(key)
                parts.setdefault(name, []).append(StoredTensor(file, key, first, shape))
        return {name: sorted(some, key=lambda one: one.first) for name, some in parts.items()}

    def shapes(self, kind: str = "stage") -> dict[str, Shape]:
        """Returns the whole shapes of the tensors of one kind, by name."""
        parts = self.tensors(kind).items()
        return {name: whole_shape([part.shape for part in some]) for name, some in parts}

    def verify(self, names: Iterable[str]) -> None:
        """Reads whole files; raises DamagedError if one is not what was written."""
        for name in names:
            file, path = self.files[name], self.path / name
            now = frozen.sha256_of(path, file.num_bytes)
            if now != file.sha256:
                why = "cannot be read" if now is None else "is not what was written"
                raise DamagedError(f"{self.path} is damaged: {name} {why}")


def place(run_dir: StrPath, step: int) -> Path:
    """Returns where the checkpoint after so many steps belongs."""
    return Path(run_dir) / FOLDER / f"step{step:06d}"


def hidden(path: Path, ending: str) -> Path:
    """Returns a name beside a checkpoint that no reader takes for one."""
    return path.with_name(f".{path.name}.{ending}")


def read(path: StrPath) -> Checkpoint:
    """Returns the checkpoint at a path; raises DamagedError if it is not whole."""
    path = Path(path)
    notes: list[reading.Note] = []
    values = _unsealed(path / MANIFEST, notes, needed=True)
    if notes:
        why = notes[0].text.removeprefix("damaged: ")
        raise DamagedError(f"{path} is damaged: {MANIFEST}: {why}")
    if (schema := values.pop("schema", None)) != SCHEMA:
        raise DamagedError(f"{path} has schema {schema!r}, this hires reads {SCHEMA}")
    try:
        checkpoint = build(Checkpoint, {**values, "path": path})
    except (ConfigError, TypeError, ValueError, KeyError) as error:
        raise DamagedError(f"{path} is damaged: {MANIFEST} makes no sense ({error})") from None
    if step_of(path) not in (None, checkpoint.step):
        raise DamagedError(f"{path} is damaged: its files are of step {checkpoint.step}")
    for name, file in checkpoint.files.items():
        try:
            present = (path / name).stat().st_size
        except OSError as error:
            raise DamagedError(f"{path} is damaged: {name} is missing ({error.strerror})") from None
        if present != file.num_bytes:
            why = f"{name} has {present} bytes of {file.num_bytes}"
            raise DamagedError(f"{path} is damaged: {why}")
    return checkpoint


def step_of(path: Path) -> int | None:
    """Returns the step that the name of a checkpoint's folder has; None: it has another name."""
    match = re.fullmatch(r"step(\d{6,})", path.name)
    return int(match[1]) if match else None


def is_checkpoint(path: Path) -> bool:
    """Whether a path is meant as a checkpoint, perhaps a damaged one, and not as a run folder."""
    return (path / MANIFEST).is_file() or (step_of(path) is not None and path.is_dir())


def whole_checkpoints(run_dir: StrPath) -> tuple[list[Checkpoint], list[str]]:
    """Returns a run's checkpoints, the latest first, and what is wrong with those left out."""
    whole: list[Checkpoint] = []
    damaged: list[str] = []
    try:
        folders = _folders(run_dir)
    except OSError as error:
        return [], [f"{Path(run_dir) / FOLDER} cannot be read: {error.strerror}"]
    for path in folders.values():
        try:
            whole.append(read(path))
        except DamagedError as error:
            damaged.append(str(error))
    return sorted(whole, key=lambda c: (c.attempt, c.step), reverse=True), damaged


def saved_step(run_dir: StrPath) -> int:
    """Returns after how many steps a run was last saved, by the names alone; 0: it never was."""
    with contextlib.suppress(OSError):
        return max(_folders(run_dir), default=0)
    return 0


@dataclass(frozen=True)
class Best:
    """The best evaluation of a training, whose checkpoint is kept."""

    step: int
    """Steps that were done."""
    metric: str
    value: float


def write_best(run_dir: StrPath, best: Best) -> None:
    """Notes which checkpoint of a run is the best; RunError: it cannot."""
    text = sealed(dataclasses.asdict(best), file_names.BEST)
    write_atomically(Path(run_dir) / FOLDER / file_names.BEST, text)


def read_best(run_dir: StrPath) -> Best | None:
    """Returns which checkpoint of a run is the best; None: none is or, with a warning, damaged."""
    path, notes = Path(run_dir) / FOLDER / file_names.BEST, reading.Warned()
    values = _unsealed(path, notes)
    try:
        return build(Best, values) if values else None
    except (ConfigError, TypeError) as error:
        reading.damaged(path, str(error), notes)
        return None


def candidates(
    run_dir: StrPath, config: RunConfig, planned: Frozen | None = None
) -> tuple[list[Checkpoint], list[str]]:
    """Returns the checkpoints at which an attempt begins, the best first; none: at step 0.

    A run that is complete has none: the attempt after it repeats the run. Beside them it returns
    what is wrong with those of the run that are damaged. ``planned`` is what will be frozen of a
    run whose folder is not there yet, or is of an earlier plan.

    Raises:
        ConfigError: ``checkpoint.resume`` names something that this run cannot go on with.
    """
    if config.checkpoint.resume == "never":
        return [], []
    done = done_attempt(run_dir)
    with contextlib.suppress(OSError):  # of a run that is only read
        _put_back(run_dir)
    there, damaged = whole_checkpoints(run_dir)
    own = [checkpoint for checkpoint in there if done is None or checkpoint.attempt > done]
    try:
        others, more = _elsewhere(config)
        if others and config.checkpoint.continues is not None:
            _require_same_series(planned or frozen.read(run_dir), others[0])
    except ConfigError:
        if not own:
            raise
        others, more = [], []
    return own + others, damaged + more


def _require_same_series(own: Frozen | None, checkpoint: Checkpoint) -> None:
    """Refuses to continue a run that differs in more than its steps, or may do so."""
    other = frozen.read(checkpoint.run)
    if own is None or other is None or not own.continues(other):
        raise ConfigError(
            f"checkpoint.continues={checkpoint.path} is of a run that differs in more than its "
            f"steps; use checkpoint.resume={checkpoint.path} to begin with its parameters"
        )


def _elsewhere(config: RunConfig) -> tuple[list[Checkpoint], list[str]]:
    """Returns the checkpoints that ``checkpoint.resume`` names by a path, the latest first.

    Beside them it returns what is wrong with those that are damaged. A run that continues another
    one takes the checkpoints before the named one, too.
    """
    source = config.checkpoint.source
    if source is None:
        return [], []
    name = "resume" if config.checkpoint.continues is None else "continues"
    key, path = f"checkpoint.{name}={source}", Path(source)
    there, damaged = whole_checkpoints(
        path.absolute().parent.parent if is_checkpoint(path) else path
    )
    if is_checkpoint(path):
        last = step_of(path) if name == "continues" else None
        there, damaged = [one for one in there if one.step < (last or 0)], []
        try:
            there.insert(0, read(path))
        except DamagedError as error:
            damaged = [str(error)]
    if not there:
        why = "; ".join(damaged) or f"it is no checkpoint, and has none in a folder {FOLDER}"
        raise ConfigError(f"{key}: {why}; give the path of a run folder or checkpoint")
    if begin_of(there[0], config) >= config.steps:
        raise ConfigError(
            f"{key} has done {there[0].step} steps, which leaves none of steps={config.steps}; use "
            f"steps={there[0].step + 1} or more, or name an earlier checkpoint"
        )
    return [one for one in there if begin_of(one, config) < config.steps], damaged


def begin_of(checkpoint: Checkpoint, config: RunConfig) -> int:
    """Returns the first step of a run that starts from a checkpoint: 0 unless it trains."""
    return checkpoint.step if config.task.name == "train" else 0


def tidy(run_dir: StrPath, keep: int | None = None, damaged: Collection[Path] = ()) -> None:
    """Removes what crashes left, and all but the best and the last ``keep`` checkpoints.

    Those that are known as ``damaged`` do not count, and stay. OSError: it cannot.
    """
    _put_back(run_dir)
    for path in (Path(run_dir) / FOLDER).glob(".step*"):
        shutil.rmtree(path)
    best = read_best(run_dir)
    there = [one for one in whole_checkpoints(run_dir)[0] if one.path not in damaged]
    for checkpoint in there[keep:] if keep else []:
        if best is None or checkpoint.step != best.step:
            remove(checkpoint.path)


def remove(path: Path) -> None:
    """Removes a checkpoint so that no reader ever sees half of it; raises OSError if it cannot."""
    shutil.rmtree(_hide(path))


def publish(building: Path, path: Path) -> None:
    """Gives a hidden folder its name; one that has it is removed after that. OSError: it cannot."""
    old = hidden(path, _REPLACED) if path.exists() else None  # of an attempt that this one repeats
    if old is not None:
        path.rename(old)
    building.rename(path)
    if old is not None:
        shutil.rmtree(old)


def _put_back(run_dir: StrPath) -> None:
    # A crash of :func:`publish` may leave a checkpoint, whole, without its name.
    for path in (Path(run_dir) / FOLDER).glob(f".step*.{_REPLACED}"):
        named = path.with_name(path.stem.removeprefix("."))
        if not named.exists():
            path.rename(named)


def _hide(path: Path) -> Path:
    dying = hidden(path, "old")
    if dying.exists():
        shutil.rmtree(dying)
    return path.rename(dying)


def _folders(run_dir: StrPath) -> dict[int, Path]:
    """Returns the folders of checkpoints by their step, in order; OSError: they cannot be read."""
    try:
        paths = sorted((Path(run_dir) / FOLDER).iterdir())
    except FileNotFoundError:
        return {}
    steps = ((step_of(path), path) for path in paths)
    return {step: path for step, path in steps if step is not None}


def _unsealed(path: Path, notes: reading.Notes, *, needed: bool = False) -> dict[str, Any]:
    """Returns the values of a file that shows whether they are what was written."""
    data = reading.read_bytes(path, notes, needed=needed)
    try:
        return {} if data is None else dict(unsealed(data, path.name))
    except (ValueError, TypeError) as error:
        return reading.damaged(path, str(error), notes)


def part_of_key(key: str) -> tuple[str, int]:
    """Returns the tensor that a key of a file names, and the first of its rows there."""
    rows = _ROWS.fullmatch(key)
    return (rows[1], int(rows[2])) if rows else (key, 0)


def whole_shape(shapes: list[Shape]) -> Shape:
    """Returns the shape of a tensor that lies in rows of these shapes."""
    return [sum(one[0] for one in shapes), *shapes[0][1:]] if shapes[1:] else shapes[0]
