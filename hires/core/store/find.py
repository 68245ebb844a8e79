"""Finds the run that a user names by a path, a name or the beginning of a hash."""

from __future__ import annotations

from pathlib import Path

from hires.core.errors import ConfigError
from hires.core.store import file_names
from hires.core.store.file_names import StrPath
from hires.core.store.rundir import RunDir, open_run


def find(name: str, results: StrPath = "results") -> RunDir:
    """Returns the run that a user names by a path, a folder name or the beginning of a hash.

    Raises:
        ConfigError: no run, or more than one, goes by this name.
        RunError: the run is pending.
    """
    return open_run(locate(name, results))


def locate(name: str, results: StrPath = "results") -> Path:
    """Returns the folder of the run that :func:`find` means, whether or not it has an attempt.

    Raises:
        ConfigError: no run, or more than one, goes by this name.
    """
    if (Path(name) / file_names.CONFIG).is_file():
        return Path(name).absolute()
    runs = sorted(Path(results).glob(f"*/*/{file_names.CONFIG}"))
    folders = [file.parent for file in runs if not file.parent.name.startswith(".")]
    for match in (
        [f for f in folders if f.name == name or f"{f.parent.name}/{f.name}" == name],
        [f for f in folders if name and f.name.rpartition("-")[2].startswith(name)],
        [f for f in folders if name and f.name.startswith(name)],
    ):
        if len(match) == 1:
            return match[0].absolute()
        if match:
            _refuse_campaign(name, results)
            several = ", ".join(str(f) for f in match[:5])
            raise ConfigError(
                f"{name!r} may be any of {len(match)} runs: give one path of {several}"
            )
    _refuse_campaign(name, results)
    raise ConfigError(
        f"there is no run {name!r}: give the path of a run folder, or its name or hash if it is "
        f"under {results}/"
    )


def _refuse_campaign(name: str, results: StrPath) -> None:
    """Raises a ConfigError that says what to type if the name is that of a campaign."""
    for folder in (Path(results) / name, Path(name)):
        runs = (
            sorted(folder.glob(f"*/{file_names.CONFIG}"))
            if name and folder != Path(results)
            else []
        )
        if runs:
            count = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
            raise ConfigError(
                f"{name!r} is a campaign of {count}, and one run is asked for: name it, as "
                f"{folder.name}/{runs[0].parent.name}; `hires list runs --campaign {folder.name}` "
                f"lists them, `hires report {folder.name}` shows them all"
            )
