import shutil
import subprocess
from datetime import datetime, timedelta

import pytest

import hires
from hires.core.store import provenance


def test_collect_has_everything_without_torch():
    facts = provenance.collect()
    assert facts["hires"] == hires.__version__
    assert facts["python"].startswith("3.")
    assert facts["hardware"]["cores"] >= 1
    assert facts["hardware"]["memory"] > 2**28
    assert facts["hardware"]["cpu"]


def test_now_is_utc_and_reads_back():
    assert datetime.fromisoformat(provenance.now()).utcoffset() == timedelta(0)


def git(folder, *args):
    who = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *args], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_git_commit_is_of_this_code_only(tmp_path):
    """A virtual environment inside another repository must not lend that one's commit."""
    package = tmp_path / "pkg"
    installed = tmp_path / ".venv/lib/pkg"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "x.py").write_text("")
    assert provenance._git_commit(package) is None
    git(tmp_path, "init")
    git(tmp_path, "add", "pkg")
    git(tmp_path, "commit", "-m", "one")
    provenance._git_commit.cache_clear()
    commit = provenance._git_commit(package)
    assert commit is not None
    assert len(commit) == 40
    assert provenance._git_commit(installed) is None
    (package / "x.py").write_text("edited")
    provenance._git_commit.cache_clear()
    assert provenance._git_commit(package) == f"{commit}-dirty"
