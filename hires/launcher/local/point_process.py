"""Runs one point of a sweep: a process that waits for its ranks.

``python -m hires.launcher.local.point_process RUN_DIR ATTEMPT`` runs an attempt whose folder
exists already. It prints nothing: everything is in the attempt's ``exit.json`` and logs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hires.core import log
from hires.core.errors import HiresError
from hires.launcher.local.local_launcher import RANK, launch


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the attempt and returns its exit code.

    Args:
        argv: run folder and number of the attempt, then, if it is not hires' own, the Python
            module that every rank runs.
    """
    path, attempt, *module = sys.argv[1:] if argv is None else argv
    log.setup()
    try:
        outcome = launch(path, int(attempt), module=module[0] if module else RANK)
    except HiresError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
