"""Does hires.report.load find what a path, a pattern or a name means, and name what it does not?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import hires
from hires.core.errors import ConfigError
from tests.helpers.report_runs import report_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reports.md"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Returns the runs of two campaigns, and a third one that has only plans."""
    monkeypatch.chdir(tmp_path)
    results = Path("results")
    sizes = [("fig2.4", 16), ("fig2.4", 32), ("fig2.5", 48)]
    runs = [report_run(results, campaign=name, image=[size] * 2) for name, size in sizes]
    planned = {"points": [], "excluded": [{"overrides": ["image=9"], "reason": "too small"}]}
    for name in ("fig2.5", "planned"):
        (results / name).mkdir(exist_ok=True)
        (results / name / "campaign.json").write_text(json.dumps(planned))
    return [run.absolute() for run in runs]


def names(*given, **options):
    return [run.path for run in hires.report.load(*given, **options).run_list]


def test_paths_patterns_and_names_stand_for_their_runs(made, tmp_path):
    first, second, other = made
    short = first.name.rpartition("-")[2]
    for both in ("fig2.4", "results/fig2.4", tmp_path / "results/fig2.4", "fig2.4/", "*2.4"):
        assert names(both) == [*sorted([first, second])], both
    every = [*sorted([first, second]), other]
    for pattern in ("results", None, "results/fig2*", "fig2*", f"{tmp_path}/res*/fig*"):
        assert names(pattern) == every, pattern
    for one in (first, str(first), short, first.name, f"fig2.4/{first.name}", [short, first]):
        assert names(one) == [first], one
    assert names([other, "fig2.4"]) == [other, *sorted([first, second])]
    assert names(["fig2.5/*", "fig2*"]) == [other, *sorted([first, second])]
    assert names([]) == []


def test_names_are_of_the_folder_of_results_that_is_given(made, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    assert names("fig2.5", results=tmp_path / "results") == [made[2]]
    assert names("*5", results=tmp_path / "results") == [made[2]]
    with pytest.raises(ConfigError, match="there is no campaign under results/ at all"):
        names("fig2.5")


def test_campaigns_bring_what_they_planned(made):
    assert list(hires.report.load("fig2*").planned["campaign"]) == ["fig2.5"]
    assert list(hires.report.load().planned["campaign"]) == ["fig2.5", "planned"]
    assert hires.report.load(made[2]).planned.empty
    found = hires.report.load("planned")
    assert (len(found.runs), len(found.planned)) == (0, 1)


def test_run_without_a_config_is_loaded_with_a_note(made):
    (made[0] / "config.yaml").unlink()
    found = hires.report.load(made[0])
    assert len(found.runs) == 1
    assert found.all_notes()


WRONG = {
    "nowhere": r"'nowhere' is no campaign and no run: the campaigns under results/ are fig2.4, fig",
    "": r"'' is no campaign and no run",
    "fig3*": r"'fig3\*' matches no folder with runs in .*, nor below results/, whose campaigns",
    "empty": r"'empty' has no run in it; give the folder of a run, of a campaign or of all results",
    "emp*": r"'emp\*' matches no folder with runs",
}


@pytest.mark.parametrize("value", WRONG)
def test_value_without_runs_is_refused(made, value):
    Path("empty").mkdir()
    for given in (value, [made[0], value]):
        with pytest.raises(ConfigError, match=WRONG[value]):
            hires.report.load(given)


@pytest.mark.parametrize("value", [3, [3], [[]]])
def test_other_values_are_refused(made, value):
    with pytest.raises(TypeError, match=r"runs are paths, patterns or names, as 'results/fig2\*'"):
        hires.report.load(value)


def test_example_of_the_docs_works(made, capsys):
    [text] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(text, "reports.md", "exec"), {})
    assert "img_per_s_median" in capsys.readouterr().out
