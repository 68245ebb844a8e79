"""Does ``hires bench layouts`` run for real, and does it refuse what makes no sense?"""

from __future__ import annotations

import json

import pytest

from hires.bench.layouts_bench import main


@pytest.mark.dist
def test_all_rows_run_and_are_right(python, tmp_path):
    folder = tmp_path / "kept"
    small = ["--model", "resnet18", "--image", "32", "--batch", "2", "--microbatches", "2"]
    quick = ["--rounds", "1", "--warmup", "0", "--no-memory", "--json", "--out", str(folder)]
    answer = python("-m", "hires.bench.layouts_bench", *small, *quick)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["ok"]
    for task, wanted in (("train", {"tiles 2x1", "pp 1f1b", "dp"}), ("infer", {"tiles 1x2", "pp"})):
        rows = {row["name"]: row for row in found["tasks"][task]}
        assert wanted < set(rows)
        for row in rows.values():
            assert row["step_s"]["median"] > 0
            assert row["ok"], row
            assert (row["error"] is None) == (row["name"] == "half images")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "layouts.json"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--model", "vgg16"], 2, "vgg16 is unknown"),
        (["--image", "big"], 2, "must be n or HxW"),
        (["--image", "0"], 2, "must be n or HxW"),
        (["--only", "sp,tp"], 2, "--only tp is unknown; choose from sp,pp,dp"),
        (["--rounds", "0"], 2, "--rounds 0 must be at least 1"),
        (["--warmup", "-1"], 2, "must not be negative"),
        (["--model", "resnet18", "--image", "1x8", "--task", "infer"], 3, "use at most 1"),
    ],
)
def test_bad_options_are_told_before_any_rank_starts(words, code, told, monkeypatch, capsys):
    monkeypatch.setattr(
        "hires.bench.layouts_bench.run_ranks", lambda *_: pytest.fail("a rank started")
    )
    assert main(words) == code
    assert told in capsys.readouterr().err
