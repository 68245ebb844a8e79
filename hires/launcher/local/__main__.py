"""Launches a run folder by hand: ``python -m hires.launcher.local RUN_DIR [-- COMMAND]``.

The ``launch.sh`` of every run folder calls it, and may name the command that starts the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hires.core import log
from hires.core.errors import HiresError
from hires.core.store import attempts, file_names, records, rundir
from hires.launcher.interface import launcher_of
from hires.launcher.local import local_launcher
from hires.launcher.local.local_launcher import say
from hires.launcher.status import running_elsewhere
from hires.launcher.status.run_progress import RunProgress


def main(argv: Sequence[str] | None = None) -> int:
    """Launches a run folder by hand, as a new attempt, and returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if len(words) < 1 or words[0] in ("-h", "--help") or words[1:2] not in ([], ["--"]):
        say("usage: python -m hires.launcher.local RUN_DIR [-- COMMAND THAT STARTS ALL RANKS]")
        return 0 if words in (["-h"], ["--help"]) else 2
    log.setup()
    try:
        path = rundir.frozen_folder(words[0])
        with running_elsewhere.alone(path):
            attempt = attempts.next_attempt(path)
        config, world = records.read_config(path), int(records.read_plan(path)["world"])
        say(f"{path.name}: attempt {attempt}, {world} ranks")
        places = launcher_of(config).rank_places(config, world, words[2:])
        progress = RunProgress(world, config.batch, config.steps)
        outcome = local_launcher.launch(path, attempt, on_line=progress.printer(say), places=places)
    except HiresError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    for line in outcome.tail:
        sys.stderr.write(f"    {line}\n")
    if outcome.cause:
        logs = file_names.attempt_dir(path, attempt) / file_names.LOGS
        sys.stderr.write(f"{outcome.cause}; the logs are in {logs}\n")
    say(f"{path.name}: {outcome.state}")
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
