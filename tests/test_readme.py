"""Does every command in the README work, and is what it says still so?"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from hires.cli.compose.choices import groups, keys
from hires.cli.main import INTERRUPTED, VERBS, main
from hires.core.errors import PREEMPTED, REGRESSION, ConfigError, PlanError, RunError
from tests.helpers.compared_runs import compared_run
from tests.helpers.run_folders import begin, done, make_run

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    command
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for command in (line.strip() for line in block.splitlines())
    if command
]


def test_there_are_commands():
    assert len(COMMANDS) > 12


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("hires ")])
def test_hires_command_is_accepted(hires, command):
    _, verb, *rest = shlex.split(command, comments=True)
    if verb in ("run", "plan", "verify", "sweep"):
        answer = hires(verb, *rest, "--cfg", "job")
    elif verb in ("doctor", "bench"):  # seconds to hours: their own tests run them
        assert rest in ([], ["layouts"], ["launcher=slurm", "--nodes", "2"])
        answer = hires("--help")
    elif verb in ("status", "logs", "retry", "cancel", "report"):
        run = make_run(Path("results"))
        begin(run)
        done(run)
        answer = hires(verb, *rest)
    elif verb in ("compare", "show", "list", "index", "export"):
        written_campaigns()
        answer = hires(verb, *rest)
    elif verb == "data":
        answer = hires(verb, *rest, "--count", "4", "--size", "16")
    else:
        answer = hires(verb, *rest)
    assert answer.code == 0, answer.err


def written_campaigns() -> None:
    """Makes two campaigns and their references, and runs by the names that the README has."""
    for campaign, name in (("before", "0123abcd"), ("after", "4567cdef")):
        run = compared_run(Path("results"), [[0.5, 0.5, 0.5]] * 3, campaign=campaign)
        run.rename(run.with_name(f"resnet50-{name}"))
    write = ["--write-reference", "results/reference.yaml"]
    assert main(["compare", "before", *write]) == 0


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_command_has_its_rule(command):
    words = shlex.split(command, comments=True)
    done = subprocess.run(
        [*words, "-n", "VENV=.venv"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_other_commands_are_the_two_that_install():
    others = [c.split()[0] for c in COMMANDS if c.split()[0] not in ("hires", "make")]
    assert others == ["python3", ".venv/bin/pip"]
    assert (ROOT / "constraints.txt").is_file()


def test_figures_are_those_of_the_results():
    section = TEXT.partition("\n## Measured\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .* \| (.*) \| \[.*\]\((results/.*)\) \|$", section, re.MULTILINE)
    assert len(rows) >= 5
    for told, path in rows:
        figures = re.findall(r"\d+(?:\.\d+)?", told)
        assert figures
        known = set(re.findall(r"\d+(?:\.\d+)?", (ROOT / path).read_text(encoding="utf-8")))
        assert known >= set(figures), path


def test_every_verb_has_its_row():
    rows = re.findall(r"^\| `(\w+)[^`]*` \|", TEXT, re.MULTILINE)
    assert set(VERBS) <= set(rows)


def test_exit_codes_are_those_of_the_errors():
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", TEXT, re.MULTILINE))
    assert "run failed" in rows[str(RunError.exit_code)]
    assert "bad config" in rows[str(ConfigError.exit_code)]
    assert "infeasible plan" in rows[str(PlanError.exit_code)]
    assert rows[str(INTERRUPTED)] == "interrupted"
    assert "became worse" in rows[str(REGRESSION)]
    assert "SIGUSR2" in rows[str(PREEMPTED)]


def test_every_layout_and_top_key_is_named():
    for layout in groups()["parallel"]:
        assert f"`{layout}`" in TEXT
    for key in {key.split(".")[0] for key in keys()}:
        assert f"`{key}`" in TEXT


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (
            target.startswith(("https://hydra.cc/", "https://ui.perfetto.dev"))
            or (ROOT / target).exists()
        )
