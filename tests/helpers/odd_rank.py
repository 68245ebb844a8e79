"""A real rank with a fault: disk and hook are ``slow``, or parameters ``wrong``, as ODD says."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from hires import worker
from hires.engine import tensorfile
from hires.engine.rank_engine import RankEngine


def main() -> int:
    """Runs one rank."""
    build, write, rank = worker.build_rank, tensorfile.write, os.environ["RANK"]

    def changed(*args, **options) -> RankEngine:
        engine = build(*args, **options)
        first = next(iter(engine.modules[0].parameters.values()))
        if (os.environ["ODD"], rank) == ("wrong", "1"):
            first.data.mul_(1.001)
        if (os.environ["ODD"], rank) == ("slow", "0"):
            first.register_post_accumulate_grad_hook(lambda _: doze(engine))
        return engine

    def slowly(*args) -> Any:
        time.sleep(4.0 if rank == "0" else 0.0)
        return write(*args)

    worker.build_rank, tensorfile.write = changed, slowly
    return worker.main()


def doze(engine: RankEngine) -> None:
    """Sleeps in the backward pass of the third step."""
    if engine.recorder.steps[-1].step == 2:
        time.sleep(60)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
