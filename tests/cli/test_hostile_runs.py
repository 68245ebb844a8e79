"""Do the verbs that read many runs survive folders of somebody who means harm?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.helpers.compared_runs import compared_run
from tests.helpers.hostile import hostile_campaign

UNSEEN = set("\x00\x1b\r\u202e\u2028\ud800")


@pytest.fixture
def hostile(hires):
    return hostile_campaign(Path("results"))


def harmless(answer, *codes):
    assert answer.code in codes, answer.err
    assert "Traceback" not in answer.err
    assert not UNSEEN & set(answer.out + answer.err)
    assert len(answer.out) < 2_000_000
    return answer


def test_lists_and_index(hires, hostile):
    count = len(json.loads(harmless(hires("list", "runs", "--json"), 0).out)["runs"])
    assert count >= len(hostile) - 1
    harmless(hires("index"), 0)
    assert (Path("results") / "index.jsonl").stat().st_size < 2_000_000
    again = json.loads(harmless(hires("list", "runs", "--json"), 0).out)
    assert len(again["runs"]) == count
    harmless(hires("list", "runs", "--where", "loss > 0 or layout == 'sp'"), 0)
    for key in ("throughput", "-loss", "model", "image", "state", "data.path"):
        harmless(hires("list", "runs", f"--sort={key}"), 0)
    harmless(hires("list", "runs", "--csv"), 0)


def test_show_trusts_no_record(hires, hostile):
    # A word in the place of the numbers ended in a traceback, and escapes reached the terminal.
    for run in hostile[:-1]:  # the last one is a pipe, which show waits for
        harmless(hires("show", str(run)), 0, 1, 2)
    for key in ("throughput", "memory", "attempt", "resumed", "image", "state"):
        path = hostile[0] / "record.json"
        values = json.loads(path.read_text())
        for odd in ("no", ["\x1b]0;owned\x07"], {"a": 1}):
            path.write_text(json.dumps({**values, key: odd, "layout": "\x1b]0;owned\x07\x1b[31m"}))
            harmless(hires("show", str(hostile[0])), 0)
        path.write_text(json.dumps(values))


def test_compare(hires, hostile):
    campaign = hostile[0].parent
    shutil.copytree(campaign, campaign.with_name("other"), symlinks=True, ignore=_pipes)
    for metrics in ("throughput,step_time", "memory,loss"):
        words = ("compare", campaign.name, "other", "--metric", metrics)
        harmless(hires(*words, "--junit", "x.xml"), 0, 1, 4)
        ElementTree.parse("x.xml")
        told = hires(*words, "--json")
        json.loads(told.out, parse_constant=lambda name: pytest.fail(name))
    words = ("compare", campaign.name, "--metric", "throughput,memory")
    harmless(hires(*words, "--write-reference", "ref.yaml"), 0)
    harmless(hires(*words, "--reference", "ref.yaml"), 0, 1, 4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict.fromkeys(("model", "layout", "reproduce"), "L" * 10_000_000), "no difference"),
        ({"samples": [{"step": 1, "step_s": float("nan")}] * 3}, "B: throughput is missing (it"),
        ({"samples": [{"step": n, "step_s": 1.7e308} for n in (1, 2)]}, "it recorded 1.7e+308"),
        ({"images_per_step": 2**62}, "faster"),
        ({"x": "y" * (65 << 20)}, "more than the 64 MiB that are read"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_compare_tells_of_numbers_and_texts_that_are_none(hires, change, told):
    good = compared_run(Path("results"), [[0.5] * 4], campaign="good")
    bad = compared_run(Path("results"), [[0.5] * 4], campaign="bad")
    for file in (bad / "record.json", bad / "a0" / "record.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    words = ("--metric", "throughput,step_time")
    assert told in harmless(hires("compare", "good", "bad", *words), 0, 1, 4).out
    harmless(hires("compare", "bad", "good", *words), 0, 1, 4)
    answer = harmless(hires("compare", "good", "bad", "--json"), 0, 1, 4)
    json.JSONDecoder(parse_constant=pytest.fail).raw_decode(answer.out)
    harmless(hires("show", str(good), "--diff", str(bad)), 0)


def test_show_and_export(hires, hostile):
    for run in hostile[1:]:
        harmless(hires("show", str(hostile[0]), "--diff", str(run)), 0, 1)
        harmless(hires("show", str(run), "--reproduce"), 0, 1)
    harmless(hires("export", "--to", "csv", "--out", "out"), 0)
    text = Path("out/runs.csv").read_text()
    assert not UNSEEN & set(text)


def _pipes(folder, names):
    """Names what cannot be copied."""
    return [name for name in names if not (Path(folder) / name).is_dir()
            and not (Path(folder) / name).is_file()]  # fmt: skip
