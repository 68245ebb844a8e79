"""Does ``hires show`` draw and export what the ranks of a run did?"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from hires.core.ranks.timeline import FORWARD, OPTIMISER, Recorder
from hires.core.store import message_entries
from hires.core.store.message_entries import ENTRY
from hires.core.store.message_sums import summed
from hires.plan.plan import Plan
from tests.cli.conftest import SMALL
from tests.helpers.report_runs import message_line
from tests.helpers.run_folders import saved_stages

pytestmark = pytest.mark.usefixtures("traced")


@pytest.fixture
def run(hires, fake_ranks) -> Path:
    """A finished run, whose ranks have kept no time line."""
    assert hires("run", *SMALL, "parallel=sp").code == 0
    [config] = Path("results").glob("*/*/config.yaml")
    return config.parent


@pytest.fixture
def timed(run) -> Path:
    """A finished run with the time line of two ranks."""
    for rank in range(2):
        recorder = Recorder()
        recorder.begin_step()
        for kind, action in ((FORWARD, "F0"), ("backward", "B0"), (OPTIMISER, "")):
            with recorder.span(kind, action):
                pass
        recorder.write(run / "a0", rank)
    return run


def test_options_of_libraries_are_shown(hires, run):
    assert "comm.options: " not in hires("show", str(run)).out
    file = run / "config.yaml"
    values = yaml.safe_load(file.read_text())
    values["comm"]["options"] = {"eager_bytes": 65536}
    file.write_text(yaml.safe_dump(values))
    assert "comm.options: eager_bytes=65536\n" in hires("show", str(run)).out


def test_trace_is_written(hires, timed):
    answer = hires("show", str(timed), "--trace", "trace.json")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("trace.json: 6 spans; open it in https://ui.perfetto.dev")
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {"F0", "B0", "optimiser"}


def test_time_line_is_drawn_planned_and_measured(hires, timed):
    answer = hires("show", timed.name, "--timeline")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("planned, every pass equally long\n  rank 0: F0f")
    assert "\nmeasured, step 0: " in answer.out
    assert answer.out.count("  rank 1: ") == 2
    assert "Throughput" not in answer.out


@pytest.mark.parametrize("option", [["--timeline"], ["--trace", "trace.json"]])
def test_run_without_a_time_line_is_refused(hires, run, option):
    answer = hires("show", str(run), *option)
    assert answer.code == 1
    assert "timeline.jsonl holds no timeline" in answer.err
    assert not Path("trace.json").exists()


def test_drawing_is_no_json(hires, timed):
    answer = hires("show", str(timed), "--timeline", "--json")
    assert answer.code == 2
    assert "--trace FILE" in answer.err + answer.out


def test_folder_is_no_trace(hires, timed):
    answer = hires("show", str(timed), "--trace", str(timed))
    assert answer.code == 2
    assert "is a folder" in answer.err


@pytest.fixture
def logged(run) -> Path:
    """A finished run of two ranks with the messages of its plan."""
    plan = Plan.from_dict(json.loads((run / "plan.json").read_text()))
    record = json.loads((run / "record.json").read_text())
    record["comm"] = summed(message_line(plan, rank, 2, 0.25) for rank in range(plan.world))
    (run / "record.json").write_text(json.dumps(record))
    return run


def test_messages_are_shown_beside_those_of_the_plan(hires, logged, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    answer = hires("show", logged.name, "--comm")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert lines[1].startswith("communication of steps 2 to 3 on 2 ranks: ")
    assert lines[2] == "calls and bytes are those of the plan"
    assert all(len(line) <= 80 for line in lines[1:])
    words = ("By operation and kind", "By operation and size", "By backend", "By rank")
    assert [line for line in lines if line in words] == list(words)
    assert re.search(r"^ send +halo +(\d+) +\1 ", answer.out, re.MULTILINE)


def test_messages_as_json(hires, logged):
    values = json.loads(hires("show", str(logged), "--comm", "--json").out)
    assert (values["first_step"], values["steps"], values["ranks"]) == (2, 2, 2)
    assert values["differs_from_plan"] == []
    assert {row["backend"] for row in values["by_backend"]} == {"gloo", "shm", "cma"}


def test_single_messages_are_written_as_csv(hires, logged):
    answer = hires("show", str(logged), "--messages", "messages.csv")
    assert answer.code == 1
    assert "comm.log=full" in answer.err
    header = {
        "clock": "here",
        "dropped": 1,
        "operations": ["send"],
        "ways": {"0": ["gloo", "message"]},
    }
    header["events"] = {"4": ["halo", "F0", [1]]}
    entry = ENTRY.pack(0, 0, 4, 64, 5.0, 5.25, 6.0, 7.0)
    for rank in range(2):
        message_entries.write(logged / "a0", rank, header, entry)
    answer = hires("show", str(logged), "--messages", "messages.csv")
    assert answer.code == 0, answer.err
    assert (
        answer.out == "messages.csv: 2 messages of 2 ranks; 2 earlier ones were too many to keep\n"
    )
    lines = Path("messages.csv").read_text().splitlines()
    assert lines[0].startswith("rank,operation,kind,action,ranks,num_bytes,backend,algorithm,")
    assert lines[2] == "1,send,halo,F0,1,64,gloo,message,0.0,0.25,1.0,2.0"
    (logged / "a0" / "messages" / "rank0001.messages").write_text("{}")
    assert "rank0001.messages: damaged" in hires("show", str(logged), "--messages", "m.csv").err


def test_run_without_a_log_of_messages_is_refused(hires, run):
    answer = hires("show", str(run), "--comm")
    assert answer.code == 1
    assert "holds no log of messages" in answer.err
    assert hires("show", str(run), "--comm", "--timeline").code == 2


def save(run: Path, step: int) -> Path:
    """Writes a checkpoint of one small file."""
    return saved_stages([{"w": [492]}], run, step)


def test_checkpoints_are_mentioned_and_damage_to_them_too(hires, run):
    assert "checkpoints:" not in hires("show", str(run)).out
    save(run, 2)
    (save(run, 3) / "stage00.safetensors").unlink()
    answer = hires("show", str(run))
    assert answer.code == 0
    assert "checkpoints: step000002 (2.0 KiB, attempt a0)\n" in answer.out
    assert "step000003 is damaged: stage00.safetensors is missing" in answer.out


def test_run_without_a_record_mentions_its_checkpoints(hires, run):
    save(run, 2)
    (run / "record.json").unlink()
    assert "; checkpoints: step000002 (" in hires("show", str(run)).err


def test_run_that_went_on_says_where(hires, run):
    record = json.loads((run / "record.json").read_text())
    record["resumed"] = {"step": 2, "checkpoint": "step000002", "attempt": 0}
    (run / "record.json").write_text(json.dumps(record))
    told = "it went on at step 2 from step000002 of attempt a0\n"
    assert told in hires("show", str(run)).out
    record["resumed"] = {"step": 2, "checkpoint": "/other/step000002", "attempt": None}
    (run / "record.json").write_text(json.dumps(record))
    assert "it went on at step 2 from /other/step000002\n" in hires("show", str(run)).out


def test_run_of_several_attempts_says_that_the_last_one_is_shown(hires, run):
    assert "complete attempts" not in hires("show", str(run)).out
    shutil.copytree(run / "a0", run / "a1")
    record = json.loads((run / "a1" / "record.json").read_text())
    for sample in record["samples"]:
        sample["step_s"] *= 2
    (run / "a1" / "record.json").write_text(json.dumps({**record, "attempt": 1}))
    told = "over 2 complete attempts, which `hires compare` and --diff take, is 4.00 img/s"
    assert told in hires("show", str(run)).out


def test_tables_placement_and_time_line_are_shown(hires, timed):
    answer = hires("show", str(timed))
    assert answer.code == 0, answer.err
    parts = ("Throughput", "Memory", "again: hires run", "placement (ranks)\n  stage 0\n  [ 0 ]")
    places = [answer.out.index(part) for part in (*parts, "time line of a step", "measured, step")]
    assert places == sorted(places)


def test_what_cannot_be_shown_is_told(hires, run):
    assert "no time line was recorded" in hires("show", str(run)).out
    (run / "plan.json").write_text('{"world": "x"}')
    answer = hires("show", str(run))
    assert answer.code == 0
    assert "plan.json: cannot be read" in answer.out
    assert "Throughput" in answer.out


def test_reproduce_prints_the_line_and_what_differs_now(hires, run):
    answer = hires("show", str(run), "--reproduce")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[0] == f"hires run {' '.join(SMALL)} parallel=sp"
    assert "commit, versions and machine are as they were" in answer.out
    record = json.loads((run / "record.json").read_text())
    record["provenance"] |= {"git": "0123456789abcdef", "torch": "1.0", "host": "elsewhere"}
    record["reproduce"] = "hires run 'image=[3,4]'; touch made $(touch made)"
    (run / "record.json").write_text(json.dumps(record))
    answer = hires("show", str(run), "--reproduce")
    words = shlex.split(answer.out.splitlines()[0])
    assert words == ["hires", "run", "image=[3,4];", "touch", "made", "$(touch", "made)"]
    assert "'image=[3,4];'" in answer.out
    assert "'$(touch'" in answer.out
    table = [line.split()[0] for line in answer.out.splitlines() if line.startswith(" ")]
    told = [word for word in table if word.isalpha() and word != "then"]
    assert told == ["commit", "torch", "host"]
    assert "git checkout 0123456789abcdef" in answer.out
    made = json.loads(hires("show", str(run), "--reproduce", "--json").out)
    assert [change["what"] for change in made["changed"]] == ["commit", "torch", "host"]


def test_reproduce_of_a_run_that_knows_nothing(hires, run):
    (run / "record.json").write_text("{}")
    (run / "a0" / "env.json").write_text("[]")
    answer = hires("show", str(run), "--reproduce")
    assert (answer.code, answer.out) == (0, "no line is recorded that makes it again\n")


def test_line_that_is_no_shell_line_is_one_word(hires, run):
    record = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps({**record, "reproduce": "hires 'run; x"}))
    line = hires("show", str(run), "--reproduce").out.splitlines()[0]
    assert shlex.split(line) == ["hires 'run; x"]


def test_diff_of_two_runs(hires, run):
    assert hires("run", *SMALL, "parallel=sp", "seed=7").code == 0
    [other] = [
        path.parent for path in Path("results").glob("*/*/config.yaml") if path.parent != run
    ]
    answer = hires("show", str(run), "--diff", other.name)
    assert answer.code == 0, answer.err
    assert re.search(r"^ seed +0 +7$", answer.out, re.MULTILINE)
    assert "parallel.tiles" not in answer.out
    assert "Code, versions and machine: no difference" in answer.out
    assert re.search(r"throughput \[img/s\] +5.3333 +5.3333 +[+]0.0$", answer.out, re.MULTILINE)
    told = json.loads(hires("show", str(run), "--diff", other.name, "--json").out)
    assert told["config"] == [{"what": "seed", "a": "0", "b": "7"}]
    assert told["numbers"][0]["a"] == pytest.approx(16 / 3)


@pytest.mark.parametrize(
    "words", [["--reproduce", "--timeline"], ["--reproduce", "--diff", "x"], ["--diff", "nothing"]]
)
def test_mistakes_with_diff_and_reproduce(hires, run, words):
    assert hires("show", str(run), *words).code == 2


def test_name_that_is_no_run_ends_with_2_and_a_campaign_is_called_one(hires, run):
    (run.parent / f"{run.name}x").mkdir()
    shutil.copy(run / "config.yaml", run.parent / f"{run.name}x")
    for name, told in (("nosuch", "there is no run"), ("resnet18", "may be any of 2 runs")):
        answer = hires("show", name)
        assert (answer.code, told in answer.err) == (2, True)
    for name in ("default", "results/default"):
        answer = hires("show", name)
        assert answer.code == 2
        assert "is a campaign of 2 runs" in answer.err
        assert f"one of them, as default/{run.name}; `hires list runs --camp" in answer.err


def test_file_that_cannot_be_written_is_a_mistake_and_no_failed_run(hires, timed):
    assert hires("show", str(timed), "--trace", "none/trace.json").code == 2
    Path("file").touch()
    assert hires("report", "--out", "file/out").code == 2
    assert hires("export", "--to", "csv", "--out", "file/out").code == 2


def test_help_has_an_example(hires, capsys):
    with pytest.raises(SystemExit):
        hires("show", "--help")
    assert "--trace trace.json" in capsys.readouterr().out
