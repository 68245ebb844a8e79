"""A real rank whose disk is slow: rank 0 needs SLOW_S seconds more for every file that it saves."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from hires import worker
from hires.engine import tensorfile


def main() -> int:
    """Runs one rank."""
    write = tensorfile.write

    def slowly(*args) -> Any:
        time.sleep(float(os.environ["SLOW_S"]))
        return write(*args)

    if os.environ["RANK"] == "0":
        tensorfile.write = slowly
    return worker.main()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
