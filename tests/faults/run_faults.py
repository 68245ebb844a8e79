"""Applies faults of one line to a copy of the sources, and shows that a test catches each.

The files beside this one have rows, by the part of hires that they are in:

    - file: hires/plan/tiling.py
      old: low = first * self.stride - self.padding          # stands once in the file
      new: low = first * self.stride - self.padding + 1
      test: tests/plan/test_tiling.py::test_windows_of_tiles # or a list; it takes seconds

    python tests/faults/run_faults.py                        # all of them: make test-faults
    python tests/faults/run_faults.py plan comm -k padding   # those of two parts with such a text
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[1]
TIMEOUT_S, ALL_TIMEOUT_S = 300, 3600
"""Of the tests of one fault, and of those of all."""


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


def run_tests(folder: Path, tests: Sequence[str], timeout_s: int = TIMEOUT_S) -> tuple[int, str]:
    """Returns pytest's exit code in a copy of the sources, and what it printed."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*words, "-m", "not slow", *tests],
            cwd=folder,
            env=environ,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return -1, f"not done after {timeout_s} s"
    return done.returncode, done.stdout + done.stderr


def verdict(fault: Fault, folder: Path) -> str:
    """Returns ``caught``, or why it is not."""
    path = folder / fault.file
    whole = path.read_text(encoding="utf-8")
    try:
        path.write_text(fault.applied(whole), encoding="utf-8")
    except (ValueError, OSError) as error:
        return str(error)
    try:
        code, _ = run_tests(folder, fault.tests)
    finally:
        path.write_text(whole, encoding="utf-8")
    if code == 1:
        return "caught"
    return "NOT CAUGHT" if code == 0 else f"pytest ends with {code}"


def main() -> int:
    """Runs the faults that the command line names; 1: one was not caught."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="names of the files beside this one; default: all")
    parser.add_argument("-k", default="", metavar="TEXT", help="only faults that contain it")
    args = parser.parse_args()
    chosen, missed = [*faults(args.parts, args.k)], 0
    if not chosen:
        parts = ", ".join(sorted(path.stem for path in FOLDER.glob("*.yaml")))
        parser.error(f"no fault of {args.parts or 'any part'} contains {args.k!r}; parts: {parts}")
    with tempfile.TemporaryDirectory(prefix="hires-faults-") as name:
        folder = Path(name)
        copy_of_sources(folder)
        named = [*dict.fromkeys(test for fault in chosen for test in fault.tests)]
        code, out = run_tests(folder, named, ALL_TIMEOUT_S) if named else (0, "")
        if code:
            print(f"{out}\nthe tests that the faults name do not all pass without a fault")
            return 1
        for fault in chosen:
            began = time.monotonic()
            found = verdict(fault, folder)
            missed += found != "caught"
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{fault.part:10} {fault.file:48} {found:10} {took:>6}  {fault.new}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
