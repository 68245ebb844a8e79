"""What another user could have written is never executed, and new folders are for one user."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hires.core.errors import ConfigError
from hires.core.programs import module_command
from hires.core.store import files, rundir, trust
from tests.helpers.commands import hires
from tests.helpers.new_runs import ARGV, PLAN

STRANGER = 65534
needs_users = pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")
NETWORK = """
from pathlib import Path
from torch import nn
Path({witness!r}).write_text("executed")
def build():
    return nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""
KEYS = ("model=custom", "model.target=planted:build", "model.classes=10", "image=16", "batch=2")


@pytest.fixture(autouse=True)
def _own_variables(monkeypatch):
    monkeypatch.delenv(trust.TRUST, raising=False)
    monkeypatch.delenv(trust.SHARED, raising=False)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """Returns a run that can be executed again; its network leaves the file ``witness``."""
    monkeypatch.syspath_prepend(tmp_path)
    witness = tmp_path / "witness"
    (tmp_path / "planted.py").write_text(NETWORK.format(witness=str(witness)))
    saved = "checkpoint.at_end=always"
    hires(tmp_path, "run", *KEYS, "steps=1", "measure.warmup=0", "task=train", saved)
    [config] = tmp_path.glob("results/*/*/config.yaml")
    witness.unlink()
    return config.parent


@needs_users
def test_every_way_into_a_run_folder_is_refused(tmp_path):
    openings = (
        lambda run: run.chmod(0o777),
        lambda run: (run.chmod(0o775), os.chown(run, -1, STRANGER)),
        lambda run: (run / "config.yaml").chmod(0o666),
        lambda run: os.chown(run, STRANGER, -1),
    )
    for number, opening in enumerate(openings):
        folder = tmp_path / f"run{number}"
        folder.mkdir(0o755)
        (folder / "config.yaml").touch(0o644)
        trust.refuse_untrusted(folder)
        opening(folder)
        with pytest.raises(ConfigError, match="--trust-owner"):
            trust.refuse_untrusted(folder)


def test_folder_that_others_may_write_to_is_read_and_never_executed(run, tmp_path):
    run.chmod(0o777)
    witness, before = tmp_path / "witness", {*run.iterdir()}
    name = f"default/{run.name}"
    saved = ("steps=1", "measure.warmup=0", "task=train", "checkpoint.at_end=always")
    for words in (
        ("run", *KEYS, *saved, "--again"),
        ("retry", name, "--state", "done"),
        ("export", name, "--to", "exported"),
    ):
        _, err = hires(tmp_path, *words, code=None)
        assert "--trust-owner" in err
        assert str(run) in err
        if words[0] == "run":  # a command that names the network itself traces it
            witness.unlink(missing_ok=True)
    for module in ("hires.launcher", "hires.worker"):
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "HIRES_ATTEMPT": "0"}
        done = subprocess.run(
            module_command(module, str(run)),
            env={**os.environ, **rank},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode != 0
        assert "--trust-owner" in done.stdout + done.stderr
    assert not witness.exists()
    assert {*run.iterdir()} == before
    hires(tmp_path, "show", name)
    hires(tmp_path, "export", name, "--to", "exported", "--trust-owner")
    assert witness.exists()


@pytest.mark.parametrize(("mode", "is_refused"), [(0o700, False), (0o775, False), (0o757, True)])
def test_private_group_of_the_owner_may_write(tmp_path, mode, is_refused):
    user = pwd.getpwuid(os.geteuid())
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    if mode & 0o020 and trust._name(grp.getgrgid, user.pw_gid) != user.pw_name:
        pytest.skip("this user has no private group")
    os.chown(folder, -1, user.pw_gid)
    if is_refused:
        with pytest.raises(ConfigError, match="every user"):
            trust.refuse_untrusted(folder)
    else:
        trust.refuse_untrusted(folder)


def test_cache_that_others_may_write_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_dir() == tmp_path / "hires"
    for folder in (tmp_path / "hires", tmp_path):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match=r"every user.*XDG_CACHE_HOME"):
            files.cache_dir()
        folder.chmod(0o1777 if folder == tmp_path else 0o755)
    assert files.cache_dir() == tmp_path / "hires"


def test_variable_that_is_zero_trusts_nobody(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    for variable in ("0", ""):
        monkeypatch.setenv(trust.TRUST, variable)
        with pytest.raises(ConfigError):
            trust.refuse_untrusted(tmp_path)
    monkeypatch.setenv(trust.TRUST, "1")
    trust.refuse_untrusted(tmp_path)


def test_new_folders_are_for_one_user_unless_shared(hires, config, monkeypatch):
    mask = os.umask(0o002)
    try:
        for shared, mode in (("1", 0o775), ("0", 0o755)):
            monkeypatch.setenv(trust.SHARED, shared)
            hires("status")
            run = rundir.create(replace(config, campaign=f"shared{shared}"), PLAN, ARGV).path
            assert stat.S_IMODE(run.stat().st_mode) == mode
    finally:
        os.umask(mask)
