"""Command lines of hires that run in the process of the tests, whose warm process starts ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hires.cli.main import main
from hires.plan.graph import Graph

REPOSITORY = Path(__file__).resolve().parents[2]

SMALL = ("model=resnet18", "image=32", "batch=4", "steps=3", "measure.warmup=1")
"""Overrides of a run whose network is traced once for all verbs (``tests/cli/conftest.py``)."""
NET = ("model=unet", "model.levels=2", "model.width=4", "model.channels=1", "image=16")
NET += ("data=digits", "batch=4")
TRAINED = (*NET, "data.validation=0.005", "steps=4", "validate.every=1", "augment.flip=both")
TRAINED += ("optimizer.ema=0.9", "parallel=sp", "campaign=net", "comm.log=full")
"""Overrides of a real training with evaluations and averaged weights, the run ``trained``."""
HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x9b2J\u202etxt.exe\u2066\u200b\x00\r\ud800\u2028"
UNSEEN = set("\x1b\x07\x9b\u202e\u2066\u200b\x00\r\ud800\u2028")
"""Characters of HOSTILE that no terminal may get."""


def hires(folder: Path, *words: str, code: int | None = 0) -> tuple[str, str]:
    """Returns what a command line prints in a folder; its exit code must be ``code``, if any."""
    out, err = io.StringIO(), io.StringIO()
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder), streams[0], streams[1]:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        ended = main(words)
    assert code is None or ended == code, (ended, out.getvalue(), err.getvalue())
    return out.getvalue(), err.getvalue()


def fake_hires(
    graph: Graph, ranks: dict[str, str], *words: str, folder: Path | None = None
) -> subprocess.Popen[str]:
    """Starts hires in a process of its own, with a traced network and fake ranks."""
    folder = folder or Path.cwd()
    (folder / "graph.json").write_text(json.dumps(graph.to_dict()))
    variables = {"PYTHONPATH": str(REPOSITORY), "HIRES_FAKE_RANKS": json.dumps(ranks)}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.fake_hires", "graph.json", *words],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stand_in(folder: Path, name: str, shell: str) -> None:
    """Writes a program of a cluster, as ``sbatch``, that runs a line of shell instead."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{shell}\n")
    (folder / name).chmod(0o755)


def tables_of(text: str) -> list[str]:
    """Returns the lines of an output that are no sentence with a path or a command in it."""
    return [line for line in text.splitlines() if "/" not in line and "hires " not in line]
