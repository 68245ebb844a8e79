"""Launches a run folder by hand: ``python -m hires.launcher RUN_DIR [-- COMMAND]``.

The ``launch.sh`` of every run folder calls it, and may name the command that starts the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hires.core import streams
from hires.core.errors import HiresError
from hires.core.store import attempts, records, rundir, trust
from hires.launcher.interface import launcher_of
from hires.launcher.launch_attempt import launch, say
from hires.launcher.status import running_elsewhere


def main(argv: Sequence[str] | None = None) -> int:
    """Launches an attempt and returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    end = words.index("--") if "--" in words else len(words)
    (folder, *others), command = words[:end] or [""], words[end + 1 :]
    if folder in ("", "-h", "--help") or others:
        say("usage: python -m hires.launcher RUN_DIR [-- COMMAND THAT STARTS ALL RANKS]")
        return 0 if folder.startswith("-") else 2
    streams.setup_log()
    trust.keep_folders_private()
    try:
        path = rundir.frozen_folder(folder)
        with running_elsewhere.exclusive_start(path):
            number = attempts.next_attempt(path)
        config, world = records.read_config(path), records.read_world(path)
        say(f"{path.name}: attempt {number}, {world} ranks")
        places = launcher_of(config).rank_places(config, world, command)
        return launch(path, number, places=places, aloud=True).exit_code
    except HiresError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    streams.secure()
    sys.exit(main())
