#!/usr/bin/env python3
"""Checks everything of hires that needs a GPU, from a checkout, with nothing installed but torch.

    python3 scripts/gpu_check.py --out results/gpu/NAME      on a machine with an NVIDIA GPU
    python3 scripts/gpu_check.py --only runs --runs DIR      runs that were frozen elsewhere, there
    python3 scripts/gpu_check.py --device simulated          a rehearsal of the script itself

Needs torch 2.11 or newer, built for CUDA, with numpy and safetensors; neither a network nor an
installation. It is ``hires bench gpu``: hires/bench/gpu_bench.py describes its sections.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

NEEDED = ("torch", "numpy", "safetensors")
TORCH = (2, 11)


def main() -> int:
    """Returns the exit code: 0 all passed, 1 a check failed, 2 it cannot run here."""
    root = str(Path(__file__).resolve().parents[1])
    # The ranks that the check starts are processes of their own, which find hires there, too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    sys.path[0] = root
    try:
        for name in NEEDED:
            __import__(name)
    except ModuleNotFoundError as error:
        print(f"{error}; install {', '.join(NEEDED)}", file=sys.stderr)
        return 2
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < TORCH:
        needed = ".".join(map(str, TORCH))
        print(f"torch {torch.__version__} is too old; install {needed} or newer", file=sys.stderr)
        return 2
    from hires.bench.gpu_bench import BENCHMARK

    return BENCHMARK.main(sys.argv[1:], "python3 scripts/gpu_check.py")


if __name__ == "__main__":
    sys.exit(main())
