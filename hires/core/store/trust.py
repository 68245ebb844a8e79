"""Refuses to execute what another user could have written, and keeps new folders from others.

A run folder decides which code runs: its config names modules and programs. So who may write there
may run code as the user who starts it. Reading such a folder is safe, and never refused.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hires.core.errors import ConfigError
from hires.core.store import file_names
from hires.core.store.file_names import StrPath

TRUST, SHARED = "HIRES_TRUST_OWNER", "HIRES_SHARED"
"""Variables that stand for ``--trust-owner`` and ``--shared``, also in jobs and on other nodes."""
_DECIDES = (
    file_names.CONFIG,
    file_names.PLAN,
    file_names.FROZEN,
    file_names.LAUNCH_SCRIPT,
    file_names.JOB_SCRIPT,
)


def refuse_untrusted(folder: StrPath) -> None:
    """Raises a ConfigError if another user could have written what a run folder executes."""
    if _is_set(TRUST):
        return
    for path in (Path(folder), *(Path(folder) / name for name in _DECIDES)):
        if why := distrust(path):
            remedy = f"; if that is meant, add --trust-owner ({TRUST}=1 for scripts)"
            if path.stat().st_uid == os.geteuid():
                remedy = f"; `chmod -R go-w {folder}` keeps them out{remedy}"
            raise ConfigError(f"{path} {why}, who could run code as you{remedy}")
    parent = Path(folder).absolute().parent
    if why := distrust_parent(parent):
        raise ConfigError(
            f"{parent} {why}, who could put another run in the place of {Path(folder).name}; "
            f"`chmod go-w {parent}` keeps them out; if that is meant, add --trust-owner ({TRUST}=1 "
            f"for scripts)"
        )


def distrust(path: Path) -> str:
    """Returns in words who else may write to a path; nothing if none, or if it is not there."""
    try:
        facts = path.stat()
    except OSError:
        return ""
    if facts.st_uid != os.geteuid():
        owner, me = (_name(pwd.getpwuid, one) for one in (facts.st_uid, os.geteuid()))
        return f"belongs to user {owner} and you are {me}"
    if facts.st_mode & stat.S_IWOTH:
        return "may be written by every user"
    if facts.st_mode & stat.S_IWGRP and not (_is_private(facts.st_gid) or _is_set(SHARED)):
        return f"may be written by group {_name(grp.getgrgid, facts.st_gid)}"
    return ""


def distrust_parent(folder: Path) -> str:
    """Returns in words who else may replace what this user has in a folder, as :func:`distrust`."""
    try:
        facts = folder.stat()
    except OSError:
        return ""
    only_root = facts.st_uid == 0 and not facts.st_mode & 0o022
    return "" if only_root or facts.st_mode & stat.S_ISVTX else distrust(folder)


def keep_folders_private() -> None:
    """Makes the files of this process, and of those that it starts, writable by its user alone."""
    if not _is_set(SHARED):
        os.umask(os.umask(0o077) | 0o022)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def _is_private(group: int) -> bool:
    # Many systems give each user a group of the same name, and let it write by default.
    try:
        user, held = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    is_own = user.pw_gid == group and held.gr_name == user.pw_name
    return is_own and {*held.gr_mem} <= {user.pw_name}


def _name(entry_of: Callable[[int], Sequence[Any]], number: int) -> str:
    try:
        return str(entry_of(number)[0])
    except KeyError:
        return str(number)
