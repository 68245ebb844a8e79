"""Lists the checkpoints of a run, and decides at which of them an attempt begins.

    <run>/checkpoints/step000012/   checkpoint.json stage00.safetensors rank0000.safetensors ...
                      best.json     which of them had the best evaluation

A checkpoint is the state after so many steps. It is written into a hidden folder beside its place,
which is renamed when all ranks have written and everything is on the disk, so that a folder with
a plain name was whole once. ``checkpoint.json`` names its files with their sizes; the files belong
to ``hires.engine.checkpoint``. No torch, so that the front end can list them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.config.value_checks import build
from hires.core.errors import ConfigError, RunError
from hires.core.store import file_names, frozen, reading
from hires.core.store.file_names import StrPath
from hires.core.store.files import write_atomically
from hires.core.store.frozen import Frozen
from hires.core.store.records import done_attempt

FOLDER = file_names.CHECKPOINTS
MANIFEST = file_names.CHECKPOINT
SCHEMA = 1
Shape = list[int]
_ROWS = re.compile(r"(.*)\[(\d+):\d+\]", re.DOTALL)
"""A key of a file that holds rows of a tensor: ``conv1.weight[16:32]``."""
_SHOWN = 3
"""Tensors that one error names."""


class DamagedError(RunError):
    """A checkpoint is not what was written; an earlier one may be."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all there."""

    path: Path
    step: int
    """Steps that were done: the next one has this number."""
    attempt: int
    """Attempt of the run that wrote it."""
    task: str
    """``train`` or ``infer``."""
    layout: str
    """Equal for layouts in which every rank does the same."""
    files: dict[str, int]
    """Name -> bytes, of all but the manifest."""

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
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns the values of its manifest."""
        return {"schema": SCHEMA, **dataclasses.asdict(self), "path": None}


def from_dict(values: dict[str, Any]) -> Checkpoint:
    """Returns a checkpoint from its values, with a ``path``; ConfigError, TypeError: no such."""
    return build(Checkpoint, {**values, "path": Path(values["path"])})


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
    values = reading.read_json(path / MANIFEST, notes, needed=True)
    if notes:
        why = notes[0].text.removeprefix("damaged: ")
        raise DamagedError(f"{path} is damaged: {MANIFEST}: {why}")
    schema = values.pop("schema", None)
    if schema not in (None, SCHEMA):
        raise DamagedError(f"{path} has schema {schema!r}, this hires reads {SCHEMA}")
    try:
        checkpoint = build(Checkpoint, {**values, "path": path})
    except (ConfigError, TypeError) as error:
        raise DamagedError(f"{path} is damaged: {MANIFEST} makes no sense ({error})") from None
    for name, size in checkpoint.files.items():
        try:
            present = (path / name).stat().st_size
        except OSError:
            raise DamagedError(f"{path} is damaged: {name} is missing") from None
        if present != size:
            raise DamagedError(f"{path} is damaged: {name} has {present} bytes of {size}")
    return checkpoint


def whole_checkpoints(run_dir: StrPath) -> tuple[list[Checkpoint], list[str]]:
    """Returns a run's checkpoints, the latest first, and what is wrong with those left out."""
    whole: list[Checkpoint] = []
    damaged: list[str] = []
    for path in _folders(run_dir).values():
        try:
            whole.append(read(path))
        except DamagedError as error:
            damaged.append(str(error))
    return sorted(whole, key=lambda c: (c.attempt, c.step), reverse=True), damaged


def saved_step(run_dir: StrPath) -> int:
    """Returns after how many steps a run was last saved, by the names alone; 0: it never was."""
    return max(_folders(run_dir), default=0)


@dataclass(frozen=True)
class Best:
    """The best evaluation of a training, whose checkpoint is kept."""

    step: int
    """Steps that were done."""
    metric: str
    value: float


def write_best(run_dir: StrPath, best: Best) -> None:
    """Notes which checkpoint of a run is the best; RunError: it cannot."""
    text = json.dumps(dataclasses.asdict(best)) + "\n"
    write_atomically(Path(run_dir) / FOLDER / file_names.BEST, text)


def read_best(run_dir: StrPath) -> Best | None:
    """Returns which checkpoint of a run is the best; None: there is none, or nobody can tell."""
    values = reading.read_json(Path(run_dir) / FOLDER / file_names.BEST, [])
    try:
        return build(Best, values)
    except (ConfigError, TypeError):
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
    there, damaged = whole_checkpoints(run_dir)
    own = [checkpoint for checkpoint in there if done is None or checkpoint.attempt > done]
    if own:
        return own, damaged
    others = _elsewhere(config)
    if others and config.checkpoint.continues is not None:
        _require_same_series(planned or frozen.read(run_dir), others[0])
    return others, damaged


def _require_same_series(own: Frozen | None, checkpoint: Checkpoint) -> None:
    """Refuses to continue a run that differs in more than its steps, or may do so."""
    other = frozen.read(checkpoint.run)
    if own is None or other is None or not own.continues(other):
        raise ConfigError(
            f"checkpoint.continues={checkpoint.path} is of a run that differs in more than its "
            f"steps; use checkpoint.resume={checkpoint.path} to begin with its parameters"
        )


def _elsewhere(config: RunConfig) -> list[Checkpoint]:
    """Returns the checkpoints that ``checkpoint.resume`` names by a path, the latest first."""
    source = config.checkpoint.source
    if source is None:
        return []
    name = "resume" if config.checkpoint.continues is None else "continues"
    key = f"checkpoint.{name}={source}"
    damaged: list[str] = []
    if (Path(source) / MANIFEST).is_file():
        try:
            there = [read(source)]
        except DamagedError as error:
            raise ConfigError(f"{key}: {error}; name another one") from None
    else:
        there, damaged = whole_checkpoints(source)
    if not there:
        why = "; ".join(damaged) or f"it is no checkpoint, and has none in a folder {FOLDER}"
        raise ConfigError(f"{key}: {why}; give the path of a run folder or checkpoint")
    if begin_of(there[0], config) >= config.steps:
        raise ConfigError(
            f"{key} has done {there[0].step} steps, which leaves none of steps={config.steps}; use "
            f"steps={there[0].step + 1} or more, or name an earlier checkpoint"
        )
    return [checkpoint for checkpoint in there if begin_of(checkpoint, config) < config.steps]


def begin_of(checkpoint: Checkpoint, config: RunConfig) -> int:
    """Returns the step at which a run goes on: of another task it takes the parameters only."""
    return checkpoint.step if checkpoint.task == config.task.name else 0


def tidy(run_dir: StrPath, keep: int | None = None) -> None:
    """Removes what crashes left, and all but the best and the last ``keep`` checkpoints.

    OSError: it cannot.
    """
    for path in (Path(run_dir) / FOLDER).glob(".step*"):
        shutil.rmtree(path)
    best = read_best(run_dir)
    for checkpoint in whole_checkpoints(run_dir)[0][keep:] if keep else []:
        if best is None or checkpoint.step != best.step:
            remove(checkpoint.path)


def remove(path: Path) -> None:
    """Removes a checkpoint so that no reader ever sees half of it; raises OSError if it cannot."""
    dying = hidden(path, "old")
    if dying.exists():
        shutil.rmtree(dying)
    path.rename(dying)
    shutil.rmtree(dying)


def _folders(run_dir: StrPath) -> dict[int, Path]:
    """Returns the folders of checkpoints by their step, in order."""
    try:
        paths = sorted((Path(run_dir) / FOLDER).iterdir())
    except OSError:
        return {}
    named = ((re.fullmatch(r"step(\d{6,})", path.name), path) for path in paths)
    return {int(match[1]): path for match, path in named if match}


def part_of_key(key: str) -> tuple[str, int]:
    """Returns the tensor that a key of a file names, and the first of its rows there."""
    rows = _ROWS.fullmatch(key)
    return (rows[1], int(rows[2])) if rows else (key, 0)


def shapes_in(checkpoint: Checkpoint) -> dict[str, Shape]:
    """Returns the shapes of parameters and buffers, by name; raises DamagedError."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, Shape] = {}
    for path in (checkpoint.path / n for n in checkpoint.files if n.startswith("stage")):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    shapes[name] = file.get_slice(name).get_shape()
        except (SafetensorError, OSError) as error:
            raise DamagedError(f"{path} is damaged: {error}") from None
    return shapes


def refuse_other_network(
    there: list[Checkpoint], needed: Mapping[str, Shape], source: str | None
) -> None:
    """Refuses a checkpoint, the first whole one of ``there``, of other layers than a network has.

    ``needed`` are the shapes of the network's parameters and buffers; ``checkpoint.resume`` names
    ``source``. A ConfigError names the first layers that differ.
    """
    for checkpoint in there:
        try:
            held = shapes_in(checkpoint)
        except DamagedError:
            continue  # the ranks skip it, too
        if wrong := differences(held, needed):
            raise ConfigError(
                f"checkpoint.resume={source}: {checkpoint.name} is of another network: "
                f"{first_of(wrong)}; use the model and model.classes of its run"
            )
        return


def differences(held: Mapping[str, Shape], needed: Mapping[str, Shape]) -> list[str]:
    """Returns in words which tensors that a network needs are missing or have another shape."""
    return [
        f"{n} is {held[n]} there and {shape} here" if n in held else f"it has no {n}"
        for n, shape in needed.items()
        if held.get(n) != shape
    ]


def first_of(wrong: list[str]) -> str:
    """Returns the first of some differences, and how many more there are."""
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return "; ".join(wrong[:_SHOWN]) + more
