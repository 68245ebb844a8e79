"""Does every command of the README and the docs work, and is what they say still so?"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hires.cli.compose.choices import groups
from hires.cli.main import INTERRUPTED, VERBS, main
from hires.core.errors import PREEMPTED, REGRESSION, ConfigError, PlanError, RunError
from tests.helpers.compared_runs import compared_run
from tests.helpers.run_folders import begin, done, make_run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))}
COMMANDS = {
    command: page
    for page, text in {**PAGES, "README.md": README}.items()
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for command in (line.strip() for line in block.splitlines())
    if command
}


def rows_of(page: str) -> dict[str, str]:
    """Returns the first two cells of each row of the tables of a page."""
    return dict(re.findall(r"^\| `?(\w+)[^|]*\| (.*) \|$", PAGES[page], re.MULTILINE))


def test_there_are_commands_on_most_pages():
    assert len(COMMANDS) > 40
    assert len(set(COMMANDS.values())) > 12


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("hires ")])
def test_hires_command_is_accepted(hires, command):
    _, verb, *rest = shlex.split(command, comments=True)
    if verb == "quantize":  # else it is refused, which --cfg does not show
        images = ("data=", "quant.data.name=", "quant.calibration=noise")
        assert any(word.startswith(images) for word in rest)
    if verb in ("run", "plan", "verify", "sweep", "quantize"):
        answer = hires(verb, *rest, "--cfg", "job")
    elif rest[:1] == ["--calibrate"]:  # a network, which takes minutes to measure
        answer = hires("plan", *rest[1:], "--cfg", "job")
    elif verb in ("doctor", "bench"):  # seconds to hours: their own tests run them
        assert rest in (
            [],
            ["--gpu"],
            ["layouts"],
            ["launcher=slurm", "--nodes", "2"],
        )
        answer = hires("--help")
    elif verb == "weights" or {"onnx", "exported", "mlflow"} & {
        *rest
    }:  # of a user's, or an extra's
        parser = importlib.import_module(f"hires.cli.verbs.verb_{verb}").PARSER
        parser.read(rest)
        return
    elif verb in ("status", "logs", "retry", "cancel", "report"):
        run = make_run(Path("results"))
        begin(run)
        done(run)
        answer = hires(verb, *rest)
    elif verb in ("compare", "show", "list", "index", "export"):
        write_campaigns()
        answer = hires(verb, *rest)
    elif verb == "data":
        answer = hires("data", "make", rest[1], "--count", "4", "--size", "16")
        if rest[0] == "check":
            answer = hires(verb, *rest)
    else:
        answer = hires(verb, *rest)
    assert answer.code == 0, answer.err


def write_campaigns() -> None:
    """Makes two campaigns and their references, and runs by the names that the pages use."""
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
    others = {c.split()[0] for c in COMMANDS if c.split()[0] not in ("hires", "make")}
    assert others == {"python3", ".venv/bin/pip"}
    assert (ROOT / "constraints.txt").is_file()


def test_readme_fits_on_a_few_screens():
    assert len(README.splitlines()) <= 150


def test_figures_are_lines_of_the_results():
    section = README.partition("\n## Measured\n")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.endswith("/README.md) |")]
    results = (ROOT / "results/README.md").read_text(encoding="utf-8").splitlines()
    assert len(rows) >= 5
    assert not [row for row in rows if row.replace("](results/", "](") not in results]
    for path in re.findall(r"\]\((results/[^)]*)\)", section):
        assert (ROOT / path).is_file()
    folders = {path.parts[-2] for path in ROOT.glob("results/*/README.md")}
    assert len(folders) <= 8


def test_every_verb_has_its_row():
    assert set(VERBS) <= set(rows_of("commands.md"))


def test_exit_codes_are_those_of_the_errors():
    rows = rows_of("commands.md")
    assert "run failed" in rows[str(RunError.exit_code)]
    assert "bad config" in rows[str(ConfigError.exit_code)]
    assert "infeasible plan" in rows[str(PlanError.exit_code)]
    assert rows[str(INTERRUPTED)] == "interrupted"
    assert "became worse" in rows[str(REGRESSION)]
    assert "SIGUSR2" in rows[str(PREEMPTED)]


def test_every_layout_is_explained():
    for layout in groups()["parallel"]:
        assert f"`{layout}`" in PAGES["layouts.md"]


def test_every_model_is_listed():
    first = {name.rstrip("0123456789") for name in groups()["model"]}
    for model in first:
        assert f"`{model}" in PAGES["networks.md"]


@pytest.mark.parametrize("page", ["keys", "verbs", "libraries", "operators"])
def test_page_from_the_code_is_up_to_date(hires, page):
    answer = hires("list", page, "--markdown")
    assert answer.code == 0
    assert answer.out == PAGES[f"{page}.md"], f"make docs writes docs/{page}.md again"


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_site_builds_without_a_warning(tmp_path):
    """Strict: a page without a place, a link or an anchor that leads nowhere ends the build."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', index)
