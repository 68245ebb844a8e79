"""A real rank that is wrong: rank 1 begins with other parameters than everybody else."""

from __future__ import annotations

import os
import sys

from hires import worker
from hires.engine.build import RankEngine


def main() -> int:
    """Runs one rank."""
    build = worker.build_rank

    def wrongly(*args, **options) -> RankEngine:
        engine = build(*args, **options)
        if os.environ["RANK"] == "1":
            next(iter(engine.parameters.values())).data.mul_(1.001)
        return engine

    worker.build_rank = wrongly
    return worker.main()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
