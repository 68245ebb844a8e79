"""Does the script for a Slurm of this machine start it once, and leave alone what is not its?"""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.helpers.commands import REPOSITORY


@pytest.fixture
def cluster(tmp_path):
    """Runs the script as who seems to be root, or not; returns exit code and both outputs."""

    def run(*words: object, user: int = 0) -> tuple[int, str, str]:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "id").write_text(f"#!/bin/sh\necho {user}\n")
        (tmp_path / "bin" / "id").chmod(0o755)
        command = ["bash", str(REPOSITORY / "scripts" / "slurm_cluster.sh"), *map(str, words)]
        environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_wrong_words_users_and_names_are_refused(cluster, tmp_path):
    for words in ([], ["begin"], ["start", "--fast"], ["start", "a", "b"]):
        code, _, err = cluster(*words)
        assert code == 2
        assert err.startswith("usage: scripts/slurm_cluster.sh start|stop|status")
    for verb in ("start", "stop"):
        code, out, err = cluster(verb, tmp_path / "x", user=1000)
        assert (code, out, "must run as root" in err) == (1, "", True)
        assert not (tmp_path / "x").exists()
    code, _, err = cluster("start", f"{tmp_path}/a b")  # which Slurm cannot quote
    assert (code, "letters, digits" in err) == (1, True)
    assert cluster("start", f"/tmp/{'x' * 90}")[0] == 1


def test_folder_that_it_did_not_make_is_left_alone_and_nothing_may_run(cluster, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for verb in ("stop", "start"):
        code, _, err = cluster(verb, tmp_path / "mine")
        assert (code, "was not made by this script" in err) == (1, True)
    assert (tmp_path / "mine" / "file").exists()
    code, out, err = cluster("status", tmp_path / "none")
    assert (code, out, "nothing runs in" in err) == (3, "", True)
    assert cluster("stop", tmp_path / "none")[0] == 0
