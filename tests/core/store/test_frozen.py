"""A run holds what it was planned from, and an edit of it is seen before it runs."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hires.core.errors import EditedError
from hires.core.store import frozen, records, rundir
from hires.core.store.frozen import DataContent, RunInputs, SourceFile
from tests.helpers.new_runs import ARGV, PLAN


def source(path: Path, text: str) -> SourceFile:
    path.write_text(text)
    return SourceFile(path.name, str(path), hashlib.sha256(text.encode()).hexdigest())


@pytest.fixture(autouse=True)
def at_once(monkeypatch) -> None:
    monkeypatch.setattr(frozen, "_SETTLE_S", 0.0)


@pytest.fixture
def net(tmp_path) -> Path:
    return tmp_path / "net.py"


def test_other_source_is_another_run_wherever_it_lies(config, net, tmp_path):
    before = RunInputs((source(net, "relu"),))
    after = RunInputs((source(net, "gelu"),))
    (tmp_path / "moved").mkdir()
    moved = RunInputs((source(tmp_path / "moved" / "net.py", "relu"),))
    names = [rundir.run_path(config, one).name for one in (before, after, moved)]
    assert names[0] == names[2] != names[1]
    assert names[0] != rundir.run_path(config).name


def test_each_input_beside_the_config_makes_another_run(config):
    inputs = [RunInputs(data=DataContent(f"{n}" * 64, 3, 100)) for n in (1, 2)]
    inputs += [RunInputs(**{name: "0123"}) for name in ("table", "weights", "scales", "loss")]
    paths = [rundir.run_path(config, one) for one in (RunInputs(), *inputs)]
    assert paths[0] == rundir.run_path(config) == rundir.create(config, PLAN, ARGV).path
    assert len({*paths}) == 7


def test_what_was_frozen_is_read_back(config, net):
    inputs = RunInputs((source(net, "relu"),), DataContent("1" * 64, 3, 100))
    run = rundir.create(config, PLAN, ARGV, inputs)
    held = frozen.read(run)
    assert held is not None
    assert held.inputs == inputs
    longer = frozen.frozen_of(replace(config, steps=500), {}, inputs)
    assert longer.config != held.config
    assert longer.continues(held)
    assert not frozen.frozen_of(replace(config, seed=1), {}, inputs).continues(held)
    assert not frozen.frozen_of(config, {}, RunInputs()).continues(held)


@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "net.py"])
def test_edit_after_the_run_was_planned_is_named(config, net, name):
    run = rundir.create(config, PLAN, ARGV, RunInputs((source(net, "relu"),)))
    frozen.require_unchanged(run)
    file = net if name == "net.py" else run.path / name
    text = file.read_text()
    file.write_text(text + "\n")
    with pytest.raises(EditedError, match=rf"{name} .*`hires run parallel=sp`"):
        frozen.require_unchanged(run)
    with pytest.raises(EditedError):  # a retry would run it under the old name
        rundir.refreeze(run.path, records.read_config(run))
    file.write_text(text)
    frozen.require_unchanged(run)


@pytest.mark.parametrize("writes", range(4))
def test_process_killed_while_it_replaces_the_files_is_mended_by_the_same_command(
    config, monkeypatch, writes
):
    run = rundir.create(config, PLAN, ARGV)
    other = replace(config, comm=replace(config.comm, timeout_s=600))
    write, left = rundir.write_atomically, [writes]

    def killed(path, text, **keys):
        if path.parent == run.path:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        write(path, text, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(rundir, "write_atomically", killed)
        with contextlib.suppress(KeyboardInterrupt):
            rundir.create(other, {**PLAN, "more": 1}, ARGV)
    rundir.create(other, {**PLAN, "more": 1}, ARGV)
    frozen.require_unchanged(run)
    assert records.read_config(run).comm.timeout_s == 600  # a key that changes nothing


def test_file_shown_late_was_not_edited_and_one_too_large_was(config, monkeypatch):
    run = rundir.create(config, PLAN, ARGV)
    plan = run.path / "plan.json"
    new = plan.read_text()
    plan.write_text("old")
    with monkeypatch.context() as patch:  # a file server shows what another node has replaced
        patch.setattr(frozen.time, "sleep", lambda _: plan.write_text(new))
        frozen.require_unchanged(run)
    with (run.path / "config.yaml").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(EditedError):
        frozen.require_unchanged(run)


def test_ranks_read_files_only_if_their_times_have_changed(config, net, monkeypatch):
    source(net, "relu")
    file = frozen.source_file("net.py", net)
    run = rundir.create(config, PLAN, ARGV, RunInputs((file,)))
    read, sha256_of = [], frozen.sha256_of
    monkeypatch.setattr(frozen, "sha256_of", lambda p, *n: read.append(p.name) or sha256_of(p, *n))
    frozen.require_unchanged(run, by_time=True)
    assert "net.py" not in read
    os.utime(net, ns=(0, 0))
    frozen.require_unchanged(run, by_time=True)
    assert "net.py" in read
    net.write_text("gelu")
    with pytest.raises(EditedError, match=r"net\.py of the network has changed"):
        frozen.require_unchanged(run, by_time=True)
