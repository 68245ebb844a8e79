"""Applies faults of one line to a copy of the sources, and shows that a test catches each.

The files beside this one have rows, by the part of hires that they are in:

    - file: hires/plan/tiling.py
      old: low = first * self.stride - self.padding          # stands once in the file
      new: low = first * self.stride - self.padding + 1
      test: tests/plan/test_tiling.py::test_windows_of_tiles # or a list; it takes seconds

    python tests/faults/run_faults.py                        # all of them: make test-faults
    python tests/faults/run_faults.py plan comm -k padding   # those of two parts with such a text

Tests run in forks of a process that has imported what takes long, and nothing of hires. Each of
``--jobs`` processes has its copy of the sources.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401
import pandas  # noqa: F401
import pytest
import yaml

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # else torch imports a part of hires
import torch.distributed  # noqa: F401

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[1]
TIMEOUT_S, FILE_TIMEOUT_S = 300, 1800
"""Of the tests of one fault, and of those of a file without any."""


@dataclass(frozen=True)
class Fault:
    """One wrong line, and the tests that fail with it."""

    part: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Returns the text of the file with the fault; ValueError: it cannot be applied."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.old!r} stands {count} times in {self.file}")
        return text.replace(self.old, self.new)


def faults(parts: Sequence[str] = (), text: str = "") -> Iterator[Fault]:
    """Yields the faults of some parts, or of all, that have a text in them."""
    for path in sorted(FOLDER.glob("*.yaml")):
        if not parts or path.stem in parts:
            for row in yaml.safe_load(path.read_text(encoding="utf-8")):
                if text in str(row):
                    yield _fault(path.stem, row)


def _fault(part: str, row: dict[str, Any]) -> Fault:
    test = row["test"]
    return Fault(
        part, row["file"], row["old"], row["new"], (test,) if isinstance(test, str) else (*test,)
    )


def copy_of_sources(folder: Path) -> None:
    """Copies the files that git tracks, or would, as they are now."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(words, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for name in filter(None, names.stdout.split("\0")):
        if (REPOSITORY / name).is_file():  # else it was deleted, and that is not committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)


def run_tests(folder: Path, tests: Sequence[str], timeout_s: int = TIMEOUT_S) -> int:
    """Returns pytest's exit code in a copy of the sources, -1 after too long.

    What it printed is in ``FOLDER.out``.
    """
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        os._exit(_in_fork(folder, tests))
    try:
        while time.monotonic() - began < timeout_s:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return -1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # with the ranks that it has left


def _in_fork(folder: Path, tests: Sequence[str]) -> int:
    os.setsid()
    os.chdir(folder)
    out = os.open(f"{folder}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    vars(sys.modules["__main__"]).pop("__file__")  # ranks of multiprocessing need not run it
    os.environ.update(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")
    words = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not slow"]
    code = pytest.main([*words, *tests])
    sys.stdout.flush()
    return int(code)


def own_copy(parent: Path) -> Path:
    """Returns the copy of the sources that this process has alone."""
    folder = parent / str(os.getpid())
    if not folder.is_dir():
        copy_of_sources(folder)
    return folder


def why_red(tests: Sequence[str], parent: Path) -> str:
    """Returns what tests print that fail twice without a fault, or nothing."""
    folder = own_copy(parent)
    for _ in range(2):  # a busy machine may have been too slow once
        if run_tests(folder, tests, FILE_TIMEOUT_S) == 0:
            return ""
    return Path(f"{folder}.out").read_text(encoding="utf-8", errors="replace")


def verdict(fault: Fault, parent: Path) -> tuple[str, float]:
    """Returns ``caught``, or why it is not, and the seconds that took."""
    began, folder = time.monotonic(), own_copy(parent)
    path = folder / fault.file
    try:
        whole = path.read_text(encoding="utf-8")
        path.write_text(fault.applied(whole), encoding="utf-8")
    except (ValueError, OSError) as error:
        return str(error), 0.0
    try:
        code = run_tests(folder, fault.tests)
    finally:
        path.write_text(whole, encoding="utf-8")
    found = {1: "caught", 0: "NOT CAUGHT", -1: f"not done after {TIMEOUT_S} s"}
    return found.get(code, f"pytest ends with {code}"), time.monotonic() - began


def main() -> int:
    """Runs the faults that the command line names; 1: one was not caught."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="names of the files beside this one; default: all")
    parser.add_argument("-k", default="", metavar="TEXT", help="only faults that contain it")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at a time; default: 2")
    args = parser.parse_args()
    chosen, missed = [*faults(args.parts, args.k)], 0
    if not chosen:
        parts = ", ".join(sorted(path.stem for path in FOLDER.glob("*.yaml")))
        parser.error(f"no fault of {args.parts or 'any part'} contains {args.k!r}; parts: {parts}")
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="hires-faults-") as name,
        ProcessPoolExecutor(args.jobs, context) as pool,
    ):
        parent, by_file = Path(name), dict[str, dict[str, None]]()
        for test in (test for fault in chosen for test in fault.tests):
            by_file.setdefault(test.partition("::")[0], {})[test] = None
        red = functools.partial(why_red, parent=parent)
        for out in filter(None, pool.map(red, map(list, by_file.values()))):
            print(f"{out}\nthese tests, which faults name, do not pass without one")
            return 1
        verdicts = pool.map(functools.partial(verdict, parent=parent), chosen)
        for fault, (found, took_s) in zip(chosen, verdicts, strict=True):
            missed += found != "caught"
            took = f"{took_s:.0f} s"
            print(f"{fault.part:10} {fault.file:48} {found:10} {took:>6}  {fault.new}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
