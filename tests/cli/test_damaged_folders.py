"""Whatever stands in the place of a file of a run folder or checkpoint, every verb that reads it
answers as if the file were whole, or names it; every reader of a file has more faults in
``tests/core/store/test_damaged_files.py``."""

from __future__ import annotations

import functools
import json
import re
import shutil
import stat
from itertools import chain, product
from pathlib import Path

import pytest

from hires.cli.compose_config import Composer
from hires.cli.main import VERBS
from hires.cli.tracing import TorchProcess
from hires.cli.verbs import verb_sweep
from hires.core import errors
from hires.core.store import frozen, provenance
from hires.engine import torch_server
from hires.engine.build import whole_model
from hires.launcher.status import state
from tests.helpers import commands
from tests.helpers.commands import NET, TRAINED, UNSEEN
from tests.helpers.fake_torch import MIB_RANK
from tests.helpers.file_faults import STRUCTURAL
from tests.helpers.hostile import hostile_campaign


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = slice(len(data) // 2, len(data) // 2 + 4)
    data[middle] = bytes(byte ^ 0xFF for byte in data[middle])
    path.write_bytes(data)


KINDS = {"flipped": _flip} | {
    name: STRUCTURAL[name]
    for name in ("missing", "empty", "half", "not UTF-8", "list", "folder", "escapes", "pipe")
}
"""What is done to a file."""
READING = [
    "status", "status net --json", "list runs", "logs RUN", "cancel RUN", "retry RUN",
    *(f"show RUN {o}".rstrip() for o in ("", "--json", "--timeline", "--comm", "--reproduce")),
    "show RUN --trace out/trace.json", "compare RUN other --metric throughput,memory",
    "report --format csv --out out", "export --to csv --out out",
    "export RUN/best --to exported --out out/net.pt2", "weights show RUN/ema",
    "weights export RUN --out out/net.safetensors", "plan NET task=evaluate weights=RUN/ema",
    "run TRAINED", "run TRAINED --again --dry-run", "run TRAINED steps=9 --continue --dry-run",
    "run NET task=evaluate weights=RUN/best --dry-run", "sweep TRAINED --dry-run",
    "run NET steps=9 checkpoint.resume=RUN --dry-run",
]  # fmt: skip
"""Every way in which a verb reads run folders."""
STANDS = {"NET": NET, "TRAINED": TRAINED}
FREE = {(f"rank000{rank}.log", kind) for rank in range(2) for kind in KINDS}
FREE |= {("campaign.json", "missing")}
"""Logs are shown as they are, and a campaign needs no sweep that has planned it."""
APART = {"bench", "tune", "data", "completion", "doctor", "quantize", "verify"}
"""Verbs that read none, or only weights, as ``run`` does."""


@pytest.fixture(scope="session")
def whole(trained: Path, tmp_path_factory) -> Path:
    """A folder of results with a training and an evaluation, and beside them another campaign."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(trained.parents[1], folder / "results")
    words = ("sweep", *NET, "task=evaluate", f"weights={trained}/best", "campaign=net")
    commands.hires(folder, *words)
    shutil.copytree(trained, folder / "results/other" / trained.name)
    return folder / "results"


def places(whole: Path, trained: Path) -> list[list[tuple[Path, Path]]]:
    """Returns a run and a file of it, below the folder of results; those of one kind together.

    Files of an evaluation are those that a training has not. Of one kind are those of several
    ranks, or of several checkpoints.
    """
    files = [file.relative_to(whole) for file in (whole / "net").rglob("*") if file.is_file()]
    found: dict[str, list[tuple[Path, Path]]] = {}
    inside = {file.parts[2:] for file in files if trained.name in file.parts}
    for file in sorted(files):
        run = Path("net", trained.name) if len(file.parts) == 2 else Path(*file.parts[:2])
        if run.name == trained.name or file.parts[2:] not in inside:
            kind = re.sub(r"\d+", "", "/".join(file.parts[2:]))
            found.setdefault(kind, []).append((run, file))
    return [*found.values()]


def make_whole(folder: Path, whole: Path) -> None:
    """Makes a folder equal to another; a copy of it gets and loses only what differs."""
    found: list[dict[Path, tuple[int, ...]]] = [{}, {}]
    for entries, top in zip(found, (folder, whole), strict=True):
        for path in top.rglob("*"):
            facts = path.lstat()
            times = () if stat.S_ISDIR(facts.st_mode) else (facts.st_size, facts.st_mtime_ns)
            entries[path.relative_to(top)] = (facts.st_mode, *times)
    now, wanted = found
    for name in [name for name in now if now[name] != wanted.get(name)]:
        if stat.S_ISDIR(now[name][0]):
            shutil.rmtree(folder / name, ignore_errors=True)
        else:
            (folder / name).unlink(missing_ok=True)  # its folder may have gone before
    folder.mkdir(exist_ok=True)
    for name in [name for name in wanted if now.get(name) != wanted[name]]:
        if stat.S_ISDIR(wanted[name][0]):
            (folder / name).mkdir()
        else:
            shutil.copy2(whole / name, folder / name)


@pytest.fixture
def call(hires, monkeypatch, fake_ranks, caplog):
    """Calls a verb with the answers of the process with torch given in this one.

    Returns its exit code, what it printed as its result or wrote, and all that it said.
    """

    def ask(process, what, question):
        answer = torch_server.reply_to(json.loads(json.dumps(question)))
        if "error" in answer:
            raise getattr(errors, answer["error"]["type"])(answer["error"]["text"])
        return answer

    def memory(process, config, plan):
        return [MIB_RANK.to_dict()] * plan.ranks_per_replica

    def write(config, form, path):
        return {"bytes": len(whole_model(config).state_dict()), "checked_with": None}

    for name, function in (("_ask", ask), ("footprint", memory)):
        monkeypatch.setattr(TorchProcess, name, function)
    monkeypatch.setattr(torch_server, "write_network", write)
    monkeypatch.setattr(verb_sweep, "Composer", functools.cache(Composer))
    monkeypatch.setattr(provenance, "lives", lambda process: False)  # this one made the runs
    monkeypatch.setattr(frozen, "_SETTLE_S", 0.0)
    monkeypatch.setattr(state, "AGAIN_S", 0.0)

    def run(*words: str) -> tuple[tuple[object, ...], str]:
        shutil.rmtree("out", ignore_errors=True)
        Path("out").mkdir()
        caplog.clear()
        answer = hires(*words)
        said = answer.out + answer.err + caplog.text
        assert answer.code in range(5), said
        assert not UNSEEN & {*answer.out + answer.err}
        assert answer.code == 0 or answer.err.strip()
        written = [file.read_text() for file in sorted(Path("out").glob("*.csv"))]
        return (answer.code, answer.out, *written), said

    return run


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("use", READING)
def test_damaged_file_changes_no_answer_or_is_named(use, every, whole, trained, call):
    answers, silent, kinds, place = {}, [], [*KINDS], READING.index(use)

    def answer_of(run: Path, file: Path, kind: str) -> tuple[object, str]:
        make_whole(Path("results"), whole)
        if kind:
            KINDS[kind](Path("results") / file)
        words = [one.replace("RUN", f"results/{run}") for one in use.split()]
        return call(*chain.from_iterable(STANDS.get(word, [word]) for word in words))

    for number, files in enumerate(places(whole, trained)):
        # In turns, every kind of file meets every kind of damage, and each verb some of both.
        turn = [(files[place % len(files)], kinds[(number + place) % len(kinds)])]
        for (run, file), kind in product(files, kinds) if every else turn:
            if run not in answers:
                answers[run], _ = answer_of(run, file, "")
            answer, said = answer_of(run, file, kind)
            if answer != answers[run] and file.name not in said and (file.name, kind) not in FREE:
                silent.append((str(file), kind, said))
    assert silent == []


def test_every_verb_is_called_or_reads_no_run():
    assert {line.split()[0] for line in READING} | APART == {*VERBS}


def test_runs_of_somebody_who_means_harm_are_listed_shown_and_exported(call):
    hostile = hostile_campaign(Path("results"))
    (code, text), _ = call("list", "runs", "--json")
    assert (code, len(json.loads(text)["runs"]) >= len(hostile) - 1) == (0, True)
    assert call("list", "runs", "--where", "loss > 0 or layout == 'sp'", "--sort=-loss")[0][0] == 0
    for run in hostile[:-1]:  # the last one is a pipe, which show waits for
        assert len(call("show", str(run))[1]) < 2_000_000
    (code, _, *tables), _ = call("export", "--to", "csv", "--out", "out")
    assert (code, UNSEEN & {*"".join(tables)}) == (0, set())
