"""Makes run folders and finds those that a name means.

No two runs, and no two processes, get in each other's way:

    process A                                  process B, the same run at the same time
    mkdir .NAME.<A>.tmp                        mkdir .NAME.<B>.tmp
    config.yaml plan.json ...                  config.yaml plan.json ...
    rename to NAME; mkdir a0                   rename to NAME: it exists; mkdir a0 or a1 in it

So a folder is whole from the first moment on. The frozen files belong to the latest attempt. If a
run that never completed is started again and its plan or a cosmetic key differs by now (a newer
hires, another ``launcher.port``), the new file was just checked by the hires that will execute it:
it replaces the old one, which moves into the folder of the last attempt that used it. A run that is
complete is only touched with ``--again``.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.ranks import mpi_starter
from hires.core.ranks.mpi_starter import reproduce_line
from hires.core.store import file_names, frozen, reading, trust
from hires.core.store.attempts import Attempt, environment, next_attempt
from hires.core.store.file_names import (
    StrPath,
    attempt_dir,
    attempt_numbers,
    entries_of,
    exists,
    is_dir,
    last_number,
)
from hires.core.store.files import cannot_write, hidden, make_folder, write_atomically
from hires.core.store.frozen import RunInputs
from hires.core.store.naming import identity, plain, run_name
from hires.core.store.reading import Values
from hires.core.store.records import done_attempt

_NO_INPUTS = RunInputs()
_OF_ATTEMPT = (file_names.CONFIG, file_names.PLAN, file_names.FROZEN)
"""Files that an attempt keeps when another plan replaces them."""


@dataclass(frozen=True)
class RunDir:
    """A run folder and the attempt that was opened or made."""

    path: Path
    """The folder, absolute."""
    attempt: int
    """The attempt to launch, or of a complete run that of its record."""

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """``<slug>-<hash8>``."""
        return self.path.name

    @property
    def attempt_dir(self) -> Path:
        """Folder of the attempt."""
        return attempt_dir(self.path, self.attempt)


def run_path(config: RunConfig, inputs: RunInputs = _NO_INPUTS) -> Path:
    """Returns the place of a run's folder, absolute, whether or not it is there."""
    folder = Path(config.results).absolute() / config.campaign
    return folder / run_name(config, inputs.digests)


def create(
    config: RunConfig, plan: Values, argv: Sequence[str], inputs: RunInputs = _NO_INPUTS
) -> RunDir:
    """Returns the folder of a run, made as by :func:`freeze`, with a fresh attempt in it."""
    path = freeze(config, plan, argv, inputs)
    return RunDir(path, next_attempt(path, argv))


def freeze(
    config: RunConfig, plan: Values, argv: Sequence[str], inputs: RunInputs = _NO_INPUTS
) -> Path:
    """Makes or refreshes the folder of a run, which is pending then, and returns it, absolute.

    The caller makes sure that the run is neither under way nor queued, as its job would find
    another config than the one that was submitted; nor complete unless it is wanted again.

    Args:
        config: the resolved config, for ``config.yaml``.
        plan: the verified plan as plain values, for ``plan.json``.
        argv: the command line as typed, which makes this run alone, for ``planned.json``:
            ``["hires", "run", ...]``.
        inputs: what decides the run beside its config.

    Raises:
        RunError: the folder cannot be written; the message has the path, why, and a remedy.
        ConfigError: the config holds something that cannot be written down.
    """
    path = run_path(config, inputs)
    trust.refuse_untrusted(path)
    files = {
        file_names.CONFIG: _config_text(config),
        file_names.PLAN: json.dumps(plan, indent=1) + "\n",
    }
    files |= {
        file_names.FROZEN: frozen.frozen_of(config, files, inputs).text(),
        file_names.LAUNCH_SCRIPT: mpi_starter.launch_script(config, argv),
        file_names.PLANNED: json.dumps(environment(argv, reproduce_line(argv)), indent=1) + "\n",
    }
    if not _is_filled(path):
        make_folder(path.parent)
        building = hidden(path)
        try:
            building.mkdir()
            _write_files(building, files)
            building.rename(path)
            return path
        except OSError as error:
            if not _is_filled(path):  # else another process made it meanwhile
                raise cannot_write(path, error) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
    require_same_config(path, config)
    _refresh(path, files)
    return path


def refreeze(path: Path, config: RunConfig) -> None:
    """Freezes a config that differs in cosmetic keys only; raises RunError if it cannot.

    An EditedError: the frozen files, or those of the network, were edited since.
    """
    trust.refuse_untrusted(path)
    frozen.require_unchanged(path)
    require_same_config(path, config)
    text, before = _config_text(config), frozen.read(path)
    files = {file_names.CONFIG: text}
    if before is not None:
        hashes = {**before.files, **frozen.hashes(files)}
        files[file_names.FROZEN] = replace(before, files=hashes).text()
    _refresh(path, files)


def done_attempts(path: StrPath) -> list[int]:
    """Returns the attempts of a run that completed it, in order; none if there is no run."""
    done = {n for n in attempt_numbers(path) if Attempt(path, n).is_done}
    of_record = done_attempt(path)
    return sorted(done if of_record is None else done | {of_record})


def frozen_folder(path: StrPath) -> Path:
    """Returns the absolute path of a run folder; raises RunError if there is none at ``path``."""
    path = Path(path).absolute()
    if not os.path.lexists(path / file_names.CONFIG):
        raise RunError(f"{path} is no run folder: it holds no config.yaml")
    return path


def open_run(path: StrPath) -> RunDir:
    """Returns a run at its latest attempt or that of its record; raises RunError if it has none."""
    path = frozen_folder(path)
    last, done = last_number(path), done_attempt(path)
    if last is None:
        raise RunError(
            f"{path} is pending: no attempt has started; sweep its campaign again, or start it "
            f"with {path / file_names.LAUNCH_SCRIPT}"
        )
    return RunDir(path, last if done is None else done)


def _config_text(config: RunConfig) -> str:
    return reading.yaml_text(plain(config))


def _is_filled(path: Path) -> bool:
    try:
        return any(path.iterdir())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False  # whether it can be made is seen when it is made
    except OSError as error:
        raise cannot_write(path, error) from error


def _write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        write_atomically(folder / name, text, executable=name.endswith(".sh"))


def _refresh(path: Path, files: dict[str, str]) -> None:
    """Replaces frozen files that differ; the old ones move to the last attempt that used them.

    If this process is killed meanwhile, the run seems to have been edited until the command that
    made it is given again.
    """
    attempts, changed = attempt_numbers(path), {}
    for name, text in files.items():
        data = reading.read_bytes(path / name, [])
        old = None if data is None else data.decode(errors="replace")
        if old == text:
            continue
        if old is not None and attempts and name in _OF_ATTEMPT:
            kept = attempt_dir(path, attempts[-1]) / name
            if not kept.exists():
                write_atomically(kept, old)
        changed[name] = text
    _write_files(path, changed)


def require_same_config(path: Path, config: RunConfig) -> None:
    """Refuses a folder whose frozen config is of another run: it was edited, or damaged."""
    file = path / file_names.CONFIG
    if not os.path.lexists(file):
        return  # a folder that was made by hand
    held = reading.read_yaml(file, [])
    if not held or identity(held) != identity(plain(config)):
        raise RunError(
            f"{file} is not the config of this run any more: it was edited or damaged; move "
            f"{path} away, or choose another campaign=NAME"
        )


class NamedRuns(NamedTuple):
    """Run folders, and those of the campaigns that were meant as a whole; all absolute."""

    paths: list[Path]
    campaigns: list[Path]


def campaigns(results: StrPath = "results") -> list[Path]:
    """Returns the folders of all campaigns, in order."""
    return [entry.absolute() for entry in entries_of(results) if _is_campaign(entry)]


def of_campaign(folder: Path) -> list[Path]:
    """Returns the run folders of a campaign, in order, damaged ones without a config too."""
    return [run for run in entries_of(folder) if is_run(run)]


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, perhaps one whose config is missing or damaged."""
    has_config = os.path.lexists(folder / file_names.CONFIG)
    return has_config or bool(file_names.attempt_numbers(folder))


def matching(values: Any, results: StrPath = "results") -> NamedRuns:
    """Returns the runs that a path, pattern or name means, or several of them; None: ``results``.

    A campaign is named by its name or folder, a run by its folder, its name or the beginning of its
    hash; patterns, as ``fig2*``, and paths are those of runs, campaigns and all results.

    Raises:
        ConfigError: one of them means no run and no campaign, or a name may mean several runs.
        TypeError: one of them is neither text nor a path.
    """
    if values is None:
        values = results
    one = isinstance(values, str | os.PathLike) or not isinstance(values, Iterable)
    return merged(_matching(value, results) for value in ([values] if one else values))


def locate(name: str, results: StrPath = "results") -> Path:
    """Returns the one run folder that a name means, as for :func:`matching`.

    A name of no run, or of several, as of a campaign, is a ConfigError.
    """
    runs, folders = matching(name, results)
    if len(runs) == 1 and not folders:
        if not exists(runs[0] / file_names.CONFIG):
            raise ConfigError(
                f"{runs[0]} has attempts and no {file_names.CONFIG}: copy that there again"
            )
        return runs[0]
    folder = runs[0].parent.name if runs else name
    raise ConfigError(
        f"{name!r} means {len(runs)} run{'' if len(runs) == 1 else 's'}: name one of those that "
        f"`hires list runs --campaign {folder}` lists; `hires report {folder}` shows them all"
    )


def _matching(value: Any, results: StrPath) -> NamedRuns:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"runs are paths, patterns or names, as 'results/fig2*' or 'default', not {value!r}"
        )
    name = str(os.fspath(value))
    places = [Path(results) / name, Path(name)] if name else []
    folders = next(([one] for one in places if _is_campaign(one)), places[1:])
    for hits in (folders, *(_folders(top, name) for top in ("", results))):
        made = _together(filter(is_dir, hits))
        if made != ([], []):
            return made
    if run := _run_named(name, results):
        return NamedRuns([run], [])
    others = ", ".join(folder.name for folder in campaigns(results))
    there = f"the campaigns under {results}/ are {others}"
    there = there if others else f"there is no campaign under {results}/ at all"
    raise ConfigError(
        f"{name!r} is no campaign and no run: {there}; a run is named by its folder, its name or "
        f"the beginning of its hash"
    )


def _folders(top: StrPath, pattern: str) -> list[Path]:
    hits = glob.glob(pattern, root_dir=top or None)  # noqa: PTH207 (it takes absolute ones, too)
    return [Path(top) / hit for hit in sorted(hits)]


def _run_named(name: str, results: StrPath) -> Path | None:
    """Returns the run of a name or beginning of a hash; a ConfigError: there are several."""
    folders = [run for folder in campaigns(results) for run in of_campaign(folder)]
    matches = (
        [f for f in folders if name in (f.name, f"{f.parent.name}/{f.name}")],
        [f for f in folders if name and f.name.rpartition("-")[2].startswith(name)],
        [f for f in folders if name and f.name.startswith(name)],
    )
    match = next(filter(None, matches), [])
    if len(match) > 1:
        several = ", ".join(map(str, match[:5]))
        raise ConfigError(f"{name!r} may be any of {len(match)} runs: give one path of {several}")
    return match[0] if match else None


def _together(folders: Iterable[Path]) -> NamedRuns:
    """Returns what folders of runs, campaigns and all results hold; others have no run."""
    parts = []
    for folder in (folder.absolute() for folder in folders):
        if is_run(folder):
            parts.append(NamedRuns([folder], []))
            continue
        held = [folder] if _is_campaign(folder) else campaigns(folder)
        parts.append(NamedRuns([run for one in held for run in of_campaign(one)], held))
    return merged(parts)


def merged(parts: Iterable[NamedRuns]) -> NamedRuns:
    """Returns everything once, in order."""
    paths, whole = {}, {}
    for part in parts:
        paths.update(dict.fromkeys(part.paths))
        whole.update(dict.fromkeys(part.campaigns))
    return NamedRuns([*paths], [*whole])


def _is_campaign(folder: Path) -> bool:
    """Whether a folder holds runs, or the plan of a sweep."""
    if folder.name.startswith(".") or not is_dir(folder) or is_run(folder):
        return False
    return exists(folder / file_names.CAMPAIGN) or bool(of_campaign(folder))
