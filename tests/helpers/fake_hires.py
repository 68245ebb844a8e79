"""The command line of hires without torch: ``python -m tests.helpers.fake_hires GRAPH WORDS...``.

The network is the one in the file GRAPH, and ranks are those of ``fake_rank``. Everything else is
what a user starts, in a process of its own.
"""

import functools
import json
import sys
from pathlib import Path

from hires.cli import execution, planning
from hires.cli.main import main
from hires.launcher.kinds import this_machine
from hires.launcher.ranks import spawn
from hires.plan.graph import Graph
from tests.helpers.fake_torch import fake_torch

if __name__ == "__main__":
    spawn.MODULES[:] = ["tests.helpers.fake_rank"]
    graph = Graph.from_dict(json.loads(Path(sys.argv[1]).read_text()))
    planning.TorchProcess = fake_torch(lambda config: graph)
    this_machine.launch = functools.partial(this_machine.launch, module="tests.helpers.fake_rank")
    queue = functools.partial(execution.LocalQueue, module="tests.helpers.fake_rank")
    execution.LocalQueue = queue
    sys.exit(main(sys.argv[2:]))
