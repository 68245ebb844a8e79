"""Are real runs indexed, listed, compared, shown and exported as they were?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hires.core.store import run_index
from tests.helpers import commands

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
TINY = ("model=preact_resnet", "model.n=1", "image=64", "batch=4", "steps=4", "measure.warmup=2")


def hires(folder: Path, *words: str, code: int | None = 0) -> str:
    return commands.hires(folder, *words, code=code)[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two layouts twice, each point repeated."""
    folder = tmp_path_factory.mktemp("runs")
    for campaign in ("before", "after"):
        words = ("parallel=single,sp", f"campaign={campaign}", "--repeat", "2")
        hires(folder, "sweep", *TINY, *words)
    return folder


@pytest.mark.slow
def test_every_attempt_is_in_the_index_and_lists_need_no_folder(runs):
    lines = [
        json.loads(line) for line in (runs / "results" / run_index.FILE).read_text().splitlines()
    ]
    assert len(lines) == 8
    before = json.loads(hires(runs, "list", "runs", "--json"))
    hires(runs, "index")
    assert json.loads(hires(runs, "list", "runs", "--json")) == before
    kept = json.loads(
        hires(runs, "list", "runs", "--json", "--where", "parallel == 'sp' and throughput > 0")
    )["runs"]
    assert [row["campaign"] for row in kept] == ["after", "before"]


@pytest.mark.slow
def test_equal_losses_and_memory_are_equal_and_repeats_are_drawn(runs):
    told = json.loads(hires(runs, "compare", "before", "after", "--metric", "loss", "--json"))
    assert [point["status"] for point in told["points"]] == ["same", "same"]
    assert [point["interval"] for point in told["points"]] == [[1, 1], [1, 1]]
    text = hires(runs, "compare", "before", "after", "--tolerance", "90%", code=None)
    assert text.count("2 and 2 repeats") == 2
    hires(runs, "compare", "before", "after", "--metric", "memory", "--tolerance", "20%")


def test_reference_of_a_campaign_holds_for_it(runs):
    hires(runs, "compare", "before", "--write-reference", "ref.yaml", "--metric", "loss,memory")
    hires(runs, "compare", "before", "--reference", "ref.yaml")


def test_show_of_a_real_run(runs):
    [single] = runs.glob("results/before/*-single-*")
    [tiled] = runs.glob("results/before/*-sp-*")
    text = hires(runs, "show", str(tiled))
    assert "placement (ranks)\n  stage 0\n  [ 0 ]\n  [ 1 ]" in text
    assert "measured, step 3" in text
    line = hires(runs, "show", str(single), "--reproduce").splitlines()[0]
    assert line == f"hires run {' '.join(TINY)} parallel=single campaign=before"
    told = json.loads(hires(runs, "show", str(single), "--diff", str(tiled), "--json"))
    assert {entry["what"] for entry in told["config"]} == {
        "parallel.name", "parallel.tiles", "parallel.spatial_stages",
    }  # fmt: skip
    assert told["origin"] == []
