"""Finds the weights that ``weights=PATH`` names, and compares them with a network; no torch.

    run folder             its latest whole checkpoint
    run folder and /best   that of the best evaluation in its training
    checkpoint folder      the tensors of its stages, whatever layout wrote them
    either, and /ema       the same, with the running means of its parameters in their place
    FILE.safetensors       a plain state dict
    FILE.pt, FILE.pth      one of torch.save, whose pickle holds tensors only (engine.weights_file)

The front end and every reading rank look at the same path; its digest, part of the run's identity,
shows whether they see the same numbers. It is of the tensors alone: a checkpoint, its tensors in
one file, and that file under another name are the same weights. Files of a checkpoint are compared
with its manifest before anything in them is believed; of a run folder whose latest checkpoint is
damaged, the one before counts, with a warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hires.core.errors import ConfigError
from hires.core.store import checkpoints, file_names, frozen, reading
from hires.core.store.checkpoints import (
    Checkpoint,
    DamagedError,
    Shape,
    StoredTensor,
    part_of_key,
    whole_shape,
)
from hires.core.units import listed

SAFETENSORS, PICKLES = (".safetensors",), (".pt", ".pth")
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
_TYPES |= {
    f"{kind[0].upper()}{n}": f"{kind}{n}" for kind in ("int", "uint") for n in (8, 16, 32, 64)
}
log = logging.getLogger(__name__)

COUNTER = "num_batches_tracked"
"""Of batch norms: files of older versions of torch lack it, and no layer computes with it."""


_NAMED = 6
"""Tensors of each kind that one error names."""
EMA = "ema"
"""What follows a path to take running means; their files begin with it."""


BEST = "best"
"""What follows the path of a run folder to take the checkpoint of its best evaluation."""


def is_mean(file: Path) -> bool:
    """Whether a file of a checkpoint holds running means of parameters."""
    return file.name.startswith(EMA)


@dataclass(frozen=True)
class WeightsPlace:
    """A checkpoint folder or a file that holds weights."""

    path: Path
    key: str
    """``weights=PATH`` as the config has it, which begins every error."""
    files: tuple[Path, ...]
    """What holds the tensors: safetensors files, or one pickle."""
    checkpoint: Checkpoint | None = None
    """Whose files they are; None: of no checkpoint."""
    verified: bool = True
    """Whether they were compared with what was written; else who reads one does so."""

    @property
    def is_pickle(self) -> bool:
        """Whether only torch can read it."""
        return self.files[0].suffix in PICKLES

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is a checkpoint of a run."""
        return self.checkpoint is not None

    def digest(self) -> str:
        """Returns :func:`tensors_digest` of its tensors; ConfigError: it is damaged.

        That of a pickle is :meth:`hires.engine.weights_file.WeightsFile.digest`.
        """
        assert not self.is_pickle
        types, name = self.dtypes(), self.path.name
        whole = {key: [StoredTensor(name, key, 0, shape)] for key, shape in self.shapes().items()}
        with contextlib.ExitStack() as stack:
            files = {path.name: stack.enter_context(path.open("rb")) for path in self.files}
            places = {file: _places(opened) for file, opened in files.items()}
            return tensors_digest(
                (key, types[key], whole_shape([one.shape for one in some]), pieces)
                for key, some in (self.parts() or whole).items()
                for pieces in [_numbers((files[x.file], places[x.file][x.key]) for x in some)]
            )

    def shapes(self) -> dict[str, Shape]:
        """Returns the shapes of all tensors but those of a pickle; ConfigError: it is damaged."""
        if self.checkpoint is not None:
            parts = self.parts().items()
            return {name: whole_shape([one.shape for one in some]) for name, some in parts}
        with self._opened(self.path) as file:
            return {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}

    def parts(self) -> dict[str, list[StoredTensor]]:
        """Returns the tensors of its checkpoint by name, each as its parts; none of a file."""
        if self.checkpoint is None:
            return {}
        means = self.checkpoint.tensors(EMA) if any(map(is_mean, self.files)) else {}
        return self.checkpoint.tensors("stage") | means

    def metadata(self) -> dict[str, str]:
        """Returns what the header of its only file says beside the tensors; ConfigError: damaged.

        Nothing of a pickle or a checkpoint.
        """
        if self.is_pickle or self.is_checkpoint:
            return {}
        with self._opened(self.path) as file:
            return dict(file.metadata() or {})

    def dtypes(self) -> dict[str, str]:
        """Returns the types of all tensors but those of a pickle, as torch names them, by name.

        A type that hires never writes has the name that the file has for it.
        """
        names: dict[str, str] = {}
        for path in self.files:
            with self._opened(path) as file:
                types = {key: file.get_slice(key).get_dtype() for key in sorted(file.keys())}
            names |= {part_of_key(key)[0]: dtype for key, dtype in types.items()}
        return {name: _TYPES.get(dtype, dtype) for name, dtype in names.items()}

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        try:
            # The library bounds the header and compares all places in it with the file's size.
            with safe_open(path, framework="np") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{self.key} is damaged: {path.name}: {error}; copy it again, or name another one"
            ) from None


def tensors_digest(tensors: Iterable[tuple[str, str, Shape, Iterable[Any]]]) -> str:
    """Returns 16 digits of tensors in any order: name, type as torch names it, shape and bytes.

    Counters of batch norms are left out.
    """
    digests = dict[str, str]()
    for name, dtype, shape, pieces in tensors:
        if name.rpartition(".")[2] != COUNTER:
            found = hashlib.sha256(json.dumps([dtype, [*shape]]).encode())
            for piece in pieces:
                found.update(piece)
            digests[name] = found.hexdigest()
    return frozen.digest(digests)


def _places(file: BinaryIO) -> dict[str, tuple[int, int]]:
    # Where the numbers of each tensor begin and end; the library has checked the header.
    size = int.from_bytes(file.read(8), "little")
    entries = json.loads(file.read(size))
    entries.pop("__metadata__", None)
    return {
        key: (8 + size + one["data_offsets"][0], 8 + size + one["data_offsets"][1])
        for key, one in entries.items()
    }


def _numbers(parts: Iterable[tuple[BinaryIO, tuple[int, int]]]) -> Iterator[bytes]:
    for file, (begin, end) in parts:
        file.seek(begin)
        while begin < end and (piece := file.read(min(file_names.MIB, end - begin))):
            yield piece
            begin += len(piece)


def find_weights(source: str, verify: bool = True) -> WeightsPlace:
    """Returns what the path holds; ConfigError: no weights, or a checkpoint that is not whole.

    With ``verify`` the files of a checkpoint are read and compared with what was written.
    """
    key, path = f"weights={source}", Path(source)
    takes_means = path.name == EMA and not os.path.lexists(path)
    path = path.parent if takes_means else path
    if path.name == BEST and not os.path.lexists(path):
        path = _best_of(path.parent, key)
    if path.is_dir():
        return _weights_in(path, key, takes_means, verify)
    kinds = (*SAFETENSORS, *PICKLES)
    if not os.path.lexists(path):
        raise ConfigError(
            f"{key} does not exist; give a run folder, a checkpoint or a file {' '.join(kinds)}"
        )
    if path.suffix not in kinds:
        raise ConfigError(
            f"{key} is no kind of file that is read; give a run folder, a checkpoint or a file "
            f"{' '.join(kinds)} of a plain state dict"
        )
    try:
        reading.open_regular(path).close()
    except OSError as error:
        raise ConfigError(f"{key} cannot be read ({error.strerror}); give a plain file") from None
    return WeightsPlace(path, key, (path,))


def _weights_in(path: Path, key: str, takes_means: bool, verify: bool) -> WeightsPlace:
    there: list[Checkpoint] = []
    damaged: list[str] = []
    try:
        if checkpoints.is_checkpoint(path):
            there = [checkpoints.read(path)]
        else:
            there, damaged = checkpoints.whole_checkpoints(path)
    except DamagedError as error:
        damaged = [str(error)]
    for checkpoint in there:
        try:
            place = weights_of(checkpoint, key, takes_means, verify)
            if verify:
                checkpoint.verify(file.name for file in place.files)
        except DamagedError as error:
            damaged.append(str(error))
            continue
        if damaged:
            log.warning("%s: %s; %s is used", key, "; ".join(damaged), checkpoint.path)
        return place
    if damaged:
        raise ConfigError(f"{key}: {'; '.join(damaged)}; name a whole one, or its run folder")
    why = f"it has no checkpoint in a folder {checkpoints.FOLDER}"
    raise ConfigError(
        f"{key}: {why}; run it with checkpoint.at_end=always --again, or name a checkpoint or a "
        f"file"
    )


def weights_of(
    checkpoint: Checkpoint, key: str, takes_means: bool = False, verify: bool = True
) -> WeightsPlace:
    """Returns the weights of a checkpoint; ConfigError: it has none, or not those asked for."""
    files = [checkpoint.path / name for name in sorted(checkpoint.files)]
    stages = tuple(file for file in files if file.name.startswith("stage"))
    if not stages:
        raise ConfigError(f"{key}: {checkpoint.path} holds no stage; name another checkpoint")
    if not takes_means:
        return WeightsPlace(checkpoint.path, key, stages, checkpoint, verify)
    means = tuple(file for file in files if is_mean(file))
    if not means:
        raise ConfigError(
            f"{key}: {checkpoint.path} holds no running means of its weights; train with "
            f"optimizer.ema=0.999, or leave /{EMA} out"
        )
    return WeightsPlace(checkpoint.path / EMA, key, (*stages, *means), checkpoint, verify)


def _best_of(run: Path, key: str) -> Path:
    best = checkpoints.read_best(run)
    path = run if best is None else checkpoints.place(run, best.step)
    if best is None or not path.is_dir():
        raise ConfigError(
            f"{key}: {run} has no whole checkpoint that {file_names.BEST} calls the best; "
            f"train with validate.every=epoch, or leave /{BEST} out"
        )
    return path


@dataclass(frozen=True)
class Misfit:
    """The names of tensors that are not those of a network."""

    missing: tuple[str, ...]
    of_no_layer: tuple[str, ...]
    of_another_shape: dict[str, tuple[Shape, Shape]]
    """By its name the shape of a tensor there, and that which the network needs."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.of_no_layer or self.of_another_shape)

    def text(self, most: int | None = None) -> str:
        """Returns how many there are of each kind, and their names, or only so many of each."""
        shapes = [
            f"{name} is {there} there and {here} here"
            for name, (there, here) in self.of_another_shape.items()
        ]
        kinds = {
            "missing": self.missing,
            "of no layer": self.of_no_layer,
            "of another shape": shapes,
        }
        wrong = ((kind, names) for kind, names in kinds.items() if names)
        return ", ".join(f"{len(names)} {kind} ({listed(names, most)})" for kind, names in wrong)


def misfit(
    held: Mapping[str, Shape], needed: Mapping[str, Shape], others: Collection[str] = ()
) -> Misfit:
    """Returns what differs between tensors and those of a network; it is false if they fit.

    ``needed`` are the shapes of what its layers read, ``others`` the names of what none reads.
    """
    extra = [name for name in held if name not in needed and name not in others]
    return Misfit(
        tuple(name for name in needed if name not in held),
        tuple(name for name in extra if name.rpartition(".")[2] != COUNTER),
        {
            name: (list(held[name]), list(shape))
            for name, shape in needed.items()
            if name in held and list(held[name]) != list(shape)
        },
    )


def require_fit(
    key: str,
    held: Mapping[str, Shape],
    needed: Mapping[str, Shape],
    others: Collection[str] = (),
    how: str = "",
    whole: bool = False,
) -> None:
    """Refuses tensors that are not those of a network (:func:`misfit`) with one ConfigError.

    It counts them all, and names all or, unless ``whole``, the first of each kind. ``how`` is a
    remedy that fits better than the common one.
    """
    wrong = misfit(held, needed, others)
    if wrong:
        prefix = common_prefix(held, needed)
        how = how or "use the model and model.classes that the weights were trained with"
        if prefix:
            how = f"all names begin with {prefix!r}: `hires weights import` takes that away"
        names = wrong.text(None if whole else _NAMED)
        if names != wrong.text():
            source = shlex.quote(key.partition("=")[2])
            how += f"; `hires weights show {source} model=...` lists all names"
        raise ConfigError(f"{key} is of another network: of {len(needed)} tensors {names}; {how}")


def require_types(key: str, held: Mapping[str, str], needed: Mapping[str, str]) -> None:
    """Refuses tensors of another kind of numbers than the network's; ConfigError names them."""
    wrong = [
        f"{name} is {held[name]} there and {dtype} here"
        for name, dtype in needed.items()
        if name in held and _kind(held[name]) != _kind(dtype)
    ]
    if wrong:
        raise ConfigError(
            f"{key} holds other kinds of numbers than the network: {listed(wrong, _NAMED)}; "
            f"name a file of real numbers, as a training writes"
        )


def _kind(dtype: str) -> str:
    word = dtype.lower().removeprefix("b")  # safetensors' own names, as F8_E4M3, too
    return next((kind for kind in ("f", "c") if word.startswith(kind)), "whole")


def common_prefix(held: Collection[str], needed: Collection[str]) -> str:
    """Returns what a wrapper, as DDP with ``module.``, has put before all names; often nothing."""
    first = next(iter(needed), "")
    for name in held:
        prefix = name.removesuffix(first)
        if prefix and prefix != name and all(prefix + one in held for one in needed):
            return prefix
    return ""
