"""Whatever stands in place of a file of a run folder, its readers say so and never do harm.

The files are all that ``file_names`` names. Readers return at once, raise nothing but errors of
hires, and take nothing that is not what was written for what was.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import MeasureConfig
from hires.core.errors import HiresError
from hires.core.ranks import heartbeat, meeting, timeline
from hires.core.ranks.world import World
from hires.core.store import (
    attempts,
    campaign,
    checkpoints,
    ends,
    file_names,
    files,
    frozen,
    message_files,
    network_weights,
    reading,
    records,
    rundir,
)
from hires.core.store.attempts import Attempt
from hires.core.store.campaign import Campaign, ExcludedPoint, PlannedPoint
from hires.core.store.reading import Note
from hires.report.timelines import read_timeline
from tests.helpers import file_faults
from tests.helpers.run_folders import saved_stages

Read = Callable[[Path, list[Note] | None], Any]
WORLD = World(0, 2, 0, 2, "127.0.0.1", 1, 0)


def of_attempt(name: str) -> Read:
    return lambda run, notes: getattr(Attempt(run, 0, notes, strict=notes is None), name)


def plainly(read: Callable[[Path, list[Note] | None], Any], path: str) -> Read:
    return lambda run, notes: read(run / path, notes)


def needed(path: Path, notes: list[Note] | None) -> Any:
    return reading.read_json(path, notes, needed=True)


NOTED: dict[str, Read] = {
    file_names.CAMPAIGN: lambda run, notes: campaign.read(run.parent, notes),
    file_names.CONFIG: plainly(reading.read_yaml, "config.yaml"),
    file_names.ENV: of_attempt("env"),
    file_names.CHOICE: plainly(reading.read_json, "choice.json"),
    file_names.EVALUATION: plainly(reading.read_json, "a0/evaluation.json"),
    file_names.EVENTS: of_attempt("events"),
    file_names.EXIT: of_attempt("exit"),
    file_names.JOB: of_attempt("job"),
    file_names.MESSAGES: lambda run, notes: [*message_files.read(run / "a0", notes)],
    file_names.METRICS: of_attempt("metrics"),
    file_names.PLAN: plainly(needed, "plan.json"),
    file_names.PLANNED: plainly(reading.read_json, "planned.json"),
    file_names.PREDICTION: plainly(reading.read_json, "a0/prediction.json"),
    file_names.RECORD: of_attempt("record"),
    file_names.TIMELINE: lambda run, notes: read_timeline(run / "a0", notes),
    file_names.VERIFY: plainly(reading.read_json, "a0/verify.json"),
    file_names.VERIFY_LINES: plainly(reading.read_lines, "a0/verify.jsonl"),
}
"""Name -> its reader, which notes what is wrong, or raises if it gets no notes."""
OTHERS: dict[str, tuple[Callable[[Path], Any], ...]] = {
    file_names.ALIVE: (lambda run: heartbeat.read_status(run / "a0", 0),),
    file_names.BEGIN_LOCK: (lambda run: files.holder_of(run / ".begin.lock"),),
    file_names.BEST: (checkpoints.read_best,),
    file_names.CONFIG: (records.read_config, frozen.require_unchanged, rundir.open_run),
    file_names.ENV: (lambda run: Attempt(run, 0).damaged,),
    file_names.EVENTS: (lambda run: Attempt(run, 0).launched, lambda run: heartbeat.last_sign(run)),
    file_names.EXIT: (lambda run: Attempt(run, 0).damaged, rundir.done_attempts),
    file_names.FROZEN: (frozen.read, frozen.require_unchanged),
    file_names.JOB: (lambda run: Attempt(run, 0).job_name,),
    file_names.PLAN: (records.read_plan, records.read_world),
    file_names.PLANNED: (attempts.reproduce_line_of,),
    file_names.RECORD: (
        # The attempt's, which is damaged here; `hires run` took an object without a state for one.
        lambda run: (records.read_record(run / "a0") or {"state": ""})["state"],
        lambda run: records.done_attempt(run / "a0"),
    ),
    file_names.SECRET: (lambda run: meeting.with_secret(WORLD, run / "a0"),),
    file_names.SUBMIT_LOCK: (lambda run: files.is_locked(run.parent / ".submit.lock"),),
    file_names.SWEEP_LOCK: (lambda run: campaign.is_locked(run.parent),),
}
"""Name -> further readers, which raise nothing but errors of hires."""
ELSEWHERE = {
    *(file_names.CALIBRATION, file_names.SCALES),  # of plans and of quantised networks
    *(file_names.HANG, file_names.NODES),  # of launchers
    *(file_names.LAUNCH_SCRIPT, file_names.JOB_SCRIPT, file_names.JOB_LOG),
    file_names.LAUNCHER_LOG,
    *(file_names.CANCEL, file_names.PREEMPT, file_names.STOP_SWEEP),  # are there or not
    *(file_names.CHECKPOINTS, file_names.CHECKPOINT),  # in a test of their own
    *(file_names.LOGS, file_names.PREDICTIONS),  # folders
}
PATHS = {
    **dict.fromkeys((file_names.CAMPAIGN, file_names.SWEEP_LOCK, file_names.SUBMIT_LOCK), ".."),
    **dict.fromkeys(
        (file_names.CONFIG, file_names.PLAN, file_names.FROZEN, file_names.PLANNED), "."
    ),
    **dict.fromkeys((file_names.CHOICE, file_names.BEGIN_LOCK), "."),
    file_names.BEST: file_names.CHECKPOINTS,
}
"""Folders of files that do not lie in that of the attempt."""
UNREADABLE = ("pipe", "folder", "link to itself", "endless device", "sparse")
NO_OBJECT = ("empty", "half", "not UTF-8", "nested", "list", "text", "number", "null")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Makes a run folder with every file that any run has."""
    results = tmp_path_factory.mktemp("results")
    config = RunConfig(results=str(results), steps=2, measure=MeasureConfig(warmup=1))
    argv = ["hires", "run"]
    places = [{"rank": rank, "replica": 0, "stage": rank, "tile": [0, 0]} for rank in (0, 1)]
    plan = {"schema": 2, "world": 2, "placement": places, "totals": {"messages": 1}}
    made = rundir.create(config, plan, argv)
    path, attempt = made.path, made.attempt_dir
    records.event(path, 0, "launch_started", pid=1, host="here")
    for rank in (0, 1):
        recorder = timeline.Recorder()
        recorder.begin_step()
        with recorder.span(timeline.FORWARD, "F0"):
            pass
        recorder.write(attempt, rank)
        for step in (0, 1):
            line = {"kind": "step", "rank": rank, "step": step, "step_s": 0.5, "loss": 1.0}
            files.append_line(attempt / file_names.METRICS, line)
    call = ["send", "", "", [], 64, "gloo", "message", 5.0, 5.25, 6.0, 7.0]
    message_files.write(attempt, 0, "c", 0, [call])
    records.finish(made, 0, "done")
    ends.End("done", exit_codes={0: 0}).write(path, 0)
    sweep = {"argv": argv, "time": "2031-01-01T00:00:00+00:00"}
    points = [PlannedPoint(path.name, ["image=8"])]
    campaign.write(path.parent, Campaign("x", [sweep], points, [ExcludedPoint(["a=1"], "why")]))
    (path / file_names.CHOICE).write_text('{"options": [{"layout": "sp", "step_s": 1.0}]}')
    meeting.write_secret(attempt / file_names.SECRET)
    status = {"rank": 0, "step": 1, "action": "F0", "what": "halo", "since_s": 1.0}
    heartbeat.alive_file(attempt, 0).parent.mkdir()
    heartbeat.status_file(attempt, 0).write_text(json.dumps(status))
    for name in (file_names.SWEEP_LOCK, file_names.SUBMIT_LOCK):
        (path.parent / name).write_text('{"pid": 1, "host": "elsewhere"}')
    (path / file_names.BEGIN_LOCK).write_text('{"pid": 1, "host": "elsewhere"}')
    job = {"launcher": "slurm", "job": "77", "index": None}
    values = {file_names.JOB: job, file_names.VERIFY: {"ok": True, "worst": 1e-15}}
    values |= {file_names.EVALUATION: {"top1": 0.5, "samples": [[1, 2]]}}
    values |= {file_names.PREDICTION: {"images": 3}, file_names.VERIFY_LINES: {"rank": 0}}
    for name, held in values.items():
        (attempt / name).write_text(json.dumps(held) + "\n")
    for step in (1, 2):
        saved_stages([{"w": [2, 3]}, {"b": [4]}], path, step)
    checkpoints.write_best(path, checkpoints.Best(2, "top1", 0.5))
    return path


def path_of(run: Path, name: str) -> Path:
    if name == file_names.MESSAGES:
        return file_names.rank_messages(run / "a0", 0)
    if name == file_names.TIMELINE:
        return file_names.rank_lines(run / "a0", name, 0)
    if name == file_names.ALIVE:
        return heartbeat.status_file(run / "a0", 0)
    return run / PATHS.get(name, "a0") / name


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Large files are refused earlier, and nothing is waited for."""
    for name, most in file_names.MAX_BYTES.items():
        monkeypatch.setitem(file_names.MAX_BYTES, name, min(most, 4 * file_names.MIB))
    monkeypatch.setattr(frozen, "_SETTLE_S", 0.0)
    monkeypatch.setattr(meeting, "_SEEN_S", 0.0)


@contextlib.contextmanager
def restored(path: Path) -> Iterator[None]:
    """Puts a file back as it was."""
    data, mode = path.read_bytes(), path.stat().st_mode
    try:
        yield
    finally:
        file_faults.STRUCTURAL["missing"](path)
        path.write_bytes(data)
        path.chmod(mode)


def test_every_file_of_a_run_folder_has_a_reader_here(run):
    constants = (value for key, value in vars(file_names).items() if key.isupper())
    names = {value for value in constants if isinstance(value, str)}
    assert names == {*NOTED, *OTHERS} | ELSEWHERE
    for name in {*NOTED, *OTHERS}:
        assert path_of(run, name).is_file()
    for name, read in NOTED.items():
        notes: list[Note] = []
        assert read(run, None), name
        assert read(run, notes), name
        assert notes == []


@pytest.mark.parametrize("name", sorted({*NOTED, *OTHERS}))
def test_readers_of_a_damaged_file_say_so_and_go_on(run, name):
    path = path_of(run, name)
    for fault, damage in file_faults.STRUCTURAL.items():
        with restored(path):
            damage(path)
            certain = fault in UNREADABLE or (fault in NO_OBJECT and path.suffix == ".json")
            read_all(run, name, is_noted=certain)
    values = file_faults.values_of(path)
    if values is None:
        return
    for place in file_faults.places_in(values, 3 if path.suffix == ".yaml" else 20):
        for odd in file_faults.ODD_VALUES.values():
            with restored(path):
                file_faults.write_values(path, file_faults.with_value(values, place, odd))
                read_all(run, name)


def read_all(run: Path, name: str, is_noted: bool = False) -> None:
    """Reads a file in every way; with ``is_noted`` it must be found to be damaged."""
    if name in NOTED:
        notes: list[Note] = []
        NOTED[name](run, notes)
        for note in notes:
            assert note.where.isprintable()
            assert note.text.isprintable()
        with pytest.raises(HiresError) if is_noted else contextlib.suppress(HiresError):
            NOTED[name](run, None)
        assert notes or not is_noted
    for read in OTHERS.get(name, ()):
        with contextlib.suppress(HiresError):
            read(run)


def test_changed_message_is_no_message(run):
    path = path_of(run, file_names.MESSAGES)
    with restored(path):
        path.write_bytes(path.read_bytes().replace(b"5.25", b"5.35"))
        with pytest.raises(HiresError, match=r"rank0000\.messages"):
            list(message_files.read(run / "a0"))


def test_reader_that_goes_on_names_the_file_in_the_log(run, caplog):
    path = path_of(run, file_names.BEST)
    with restored(path):
        path.write_text("[]")
        assert checkpoints.read_best(run) is None
        assert f"checkpoints/{file_names.BEST}: damaged" in caplog.text


def test_no_damaged_checkpoint_is_taken_for_a_whole_one(run, caplog):
    before, last = (checkpoints.place(run, step) for step in (1, 2))
    assert [one.step for one in checkpoints.whole_checkpoints(run)[0]] == [2, 1]
    assert network_weights.find_weights(str(run)).path == last
    for path in sorted(last.iterdir()):
        data = path.read_bytes()
        for place in (0, 9, len(data) // 2, len(data) - 1):
            changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            with restored(path):
                path.write_bytes(changed)
                assert network_weights.find_weights(str(run)).path == before, (path.name, place)
        for fault, damage in file_faults.STRUCTURAL.items():
            with restored(path):
                damage(path)
                assert [one.step for one in checkpoints.whole_checkpoints(run)[0]] == [1], fault
                assert network_weights.find_weights(str(run)).path == before, (path.name, fault)
                with pytest.raises(HiresError, match="step000002"):
                    network_weights.find_weights(str(last))
        assert f"step000002 is damaged: {path.name}" in caplog.text
        caplog.clear()
    manifest = last / checkpoints.MANIFEST
    values = file_faults.values_of(manifest)
    for place in file_faults.places_in(values):
        for odd in file_faults.ODD_VALUES.values():
            with restored(manifest):
                file_faults.write_values(manifest, file_faults.with_value(values, place, odd))
                whole, damaged = checkpoints.whole_checkpoints(run)
                same = json.loads(manifest.read_text()) == values
                assert ([one.step for one in whole], len(damaged)) == (
                    ([2, 1], 0) if same else ([1], 1)
                )
