"""A real rank in which a hook of the network goes to sleep: rank SLEEPY, at its third step."""

from __future__ import annotations

import os
import sys
import time

from hires import worker
from hires.engine.build import RankEngine


def main() -> int:
    """Runs one rank."""
    build = worker.build_rank

    def with_hook(*args, **options) -> RankEngine:
        engine = build(*args, **options)
        if os.environ["RANK"] == os.environ["SLEEPY"]:
            first = next(iter(engine.modules[0].parameters.values()))
            first.register_post_accumulate_grad_hook(lambda _: doze(engine))
        return engine

    worker.build_rank = with_hook
    return worker.main()


def doze(engine: RankEngine) -> None:
    """Sleeps in the backward pass."""
    if engine.recorder.steps[-1].step == 2:
        time.sleep(60)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
