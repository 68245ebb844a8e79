"""Checks hires on a machine with an NVIDIA GPU, and prints one table.

    .venv/bin/python scripts/gpu_check.py [FOLDER]       what each part printed is kept in FOLDER

Parts: the tests marked ``gpu`` (the rows of parity beside one process, by NCCL where each rank has
a GPU, else by gloo), and layouts and precisions beside other libraries. A part that fails does not
end the others.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.plan.hardware import require_gpus

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1200
PARTS = {
    "tests": ("-m", "pytest", "-m", "gpu", "-q", "-n", "0", "tests"),
    "layouts": ("-m", "hires", "bench", "layouts", "device=cuda", "model=resnet50"),
    "precision": ("-m", "hires", "bench", "precision", "device=cuda", "model=resnet50"),
}


def main() -> int:
    """Runs all parts; returns 1 if one failed or there is no GPU."""
    try:
        require_gpus(RunConfig(device="cuda"))
    except RunError as error:
        print(error)
        return error.exit_code
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "gpu-check")
    folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for name, words in PARTS.items():
        began_s, output = time.monotonic(), folder / f"{name}.txt"
        with output.open("w", encoding="utf-8") as file:
            try:
                command = [sys.executable, *words]
                how = {"cwd": ROOT, "stdout": file, "stderr": file, "timeout": LIMIT_S}
                code = subprocess.run(command, check=False, **how).returncode
            except subprocess.TimeoutExpired:
                code = 124
        failed |= code != 0
        state = "ok" if code == 0 else f"FAILED ({code})"
        last = output.read_text(encoding="utf-8").strip().rpartition("\n")[2]
        print(f"{name:10} {state:14} {time.monotonic() - began_s:6.0f} s  {output}: {last}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
