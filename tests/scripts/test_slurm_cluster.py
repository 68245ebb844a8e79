"""Does the script for a Slurm of this machine start it once, and leave alone what is not its?"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "slurm_cluster.sh"


def cluster(*words: str, **environ: str) -> tuple[int, str, str]:
    """Returns exit code, output and error output."""
    done = subprocess.run(
        ["bash", str(SCRIPT), *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def user(tmp_path):
    """The search path of somebody who is not root."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "bin" / "id").chmod(0o755)
    return f"{tmp_path / 'bin'}:{os.environ['PATH']}"


@pytest.fixture
def root(tmp_path):
    """The search path of somebody who seems to be root."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "id").write_text("#!/bin/sh\necho 0\n")
    (tmp_path / "bin" / "id").chmod(0o755)
    return f"{tmp_path / 'bin'}:{os.environ['PATH']}"


@pytest.mark.parametrize("verb", ["start", "stop"])
def test_who_is_not_root_is_told_so(user, tmp_path, verb):
    code, out, err = cluster(verb, str(tmp_path / "x"), PATH=user)
    assert (code, out) == (1, "")
    assert "must run as root" in err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("words", [[], ["begin"], ["start", "--fast"], ["start", "a", "b"]])
def test_wrong_words_are_answered_with_the_usage(words):
    code, _, err = cluster(*words)
    assert code == 2
    assert err.startswith("usage: scripts/slurm_cluster.sh start|stop|status")


def test_folder_whose_name_slurm_cannot_quote_is_refused(tmp_path):
    code, _, err = cluster("start", f"{tmp_path}/a b")
    assert code == 1
    assert "letters, digits" in err
    assert cluster("start", f"/tmp/{'x' * 90}")[0] == 1


def test_folder_that_it_did_not_make_is_left_alone(root, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for verb in ("stop", "start"):
        code, _, err = cluster(verb, str(tmp_path / "mine"), PATH=root)
        assert code == 1
        assert "was not made by this script" in err
    assert (tmp_path / "mine" / "file").exists()


def test_status_of_nothing_exits_3(tmp_path):
    code, out, err = cluster("status", str(tmp_path / "none"))
    assert (code, out) == (3, "")
    assert "nothing runs in" in err


def test_stop_of_nothing_is_fine(root, tmp_path):
    assert cluster("stop", str(tmp_path / "none"), PATH=root)[0] == 0
