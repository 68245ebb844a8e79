"""The command line of hires without torch: ``python -m tests.helpers.fake_hires GRAPH WORDS...``.

The network is the one in the file GRAPH, and ranks are those of ``fake_rank``. Everything else is
what a user starts, in a process of its own.
"""

import contextlib
import functools
import json
import sys
from pathlib import Path

from hires.cli import planning
from hires.cli.main import main
from hires.cli.sweep import execution
from hires.launcher.kinds import this_machine
from hires.launcher.ranks import spawn
from hires.plan.graph import Graph
from hires.plan.memory import RankMemory


class Process(contextlib.nullcontext):
    def trace(self, config):
        return Graph.from_dict(json.loads(Path(sys.argv[1]).read_text()))

    def footprint(self, config, plan):
        return [RankMemory(1, 1, 1, 1, 1).to_dict()] * plan.ranks_per_replica

    def start(self):
        pass

    def __enter__(self):
        return self


if __name__ == "__main__":
    spawn.MODULES[:] = ["hires.launcher.local.local_launcher", "tests.helpers.fake_rank"]
    planning.TorchProcess = Process
    this_machine.launch = functools.partial(this_machine.launch, module="tests.helpers.fake_rank")
    queue = functools.partial(execution.LocalQueue, module="tests.helpers.fake_rank")
    execution.LocalQueue = queue
    sys.exit(main(sys.argv[2:]))
