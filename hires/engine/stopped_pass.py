"""Finds the step from which an interrupted pass over the data continues, without a checkpoint.

It needs no state of the steps before, only the lines that all ranks wrote in them.
"""

from __future__ import annotations

import json
from pathlib import Path

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.ranks.world import World
from hires.core.store import file_names, records
from hires.core.store.step_lines import PASS_LINES, done_pass


def agreed_step(run_dir: Path, config: RunConfig, world: World) -> tuple[int, int | None]:
    """Returns after how many steps all ranks go on, and whose lines hold these; (0, None): none.

    A run that is complete is done anew, and so is any with ``checkpoint.resume=never``.
    """
    kind = PASS_LINES.get(config.task.name)
    if kind is None or config.checkpoint.resume == "never":
        return 0, None
    done: tuple[int, int | None] = 0, None
    if world.rank == 0:
        complete = records.done_attempt(run_dir)
        first = 0 if complete is None else complete + 1
        earlier = [n for n in file_names.attempt_numbers(run_dir) if first <= n < world.attempt]
        done = done_pass(run_dir, earlier, world.size, kind)
    step, attempt = json.loads(comm.broadcast_text(json.dumps(done)))
    return min(step, config.steps - 1), attempt
