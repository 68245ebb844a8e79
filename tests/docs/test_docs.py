"""The commands of the README and of the pages work, and the site and its pages of code build."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hires.cli.compose.choices import groups
from hires.cli.compose.overrides import checked
from hires.cli.main import VERBS
from tests.helpers.commands import hires as run_hires
from tests.helpers.library_page import run_script, script
from tests.helpers.ranks import run_ranks
from tests.helpers.shard_jobs import documented_engine, plain_steps_of_documented_engine

ROOT = Path(__file__).resolve().parents[2]
ONLY_IN_TESTS = ", `simulated`"
"""A device that conftest adds."""


def commands_of(*pages: Path) -> list[str]:
    """Returns the command lines of the blocks of shell of some pages."""
    blocks = [
        block
        for page in pages
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]
    return [*dict.fromkeys(filter(None, (x.strip() for b in blocks for x in b.splitlines())))]


@pytest.mark.dist
def test_commands_of_the_readme_run_one_after_the_other(tmp_path):
    """On a smaller network and image, and in fewer points."""
    small = {"model=resnet18": "model=preact_resnet model.n=1", "image=512": "image=64"}
    small |= {"precision=fp32,bf16": "precision=fp32", "image=64,96": "image=32 steps=3"}
    small |= {"batch=4": "batch=2 steps=3", "image=[75,61]": "image=[45,31]"}
    ran = []
    for command in commands_of(ROOT / "README.md"):
        words = shlex.split(command, comments=True)
        if words[0] == "hires":
            verb, *rest = (part for word in words[1:] for part in small.get(word, word).split())
            run_hires(tmp_path, verb, *rest)
            ran.append(verb)
    assert ran == ["plan", "run", "verify", "sweep", "report"]
    records = [json.loads(path.read_text()) for path in tmp_path.glob("results/*/*/record.json")]
    assert sorted(record["layout"] for record in records) == ["sp", "sp", "sp+gems"]
    assert {record["state"] for record in records} == {"done"}
    assert "sp+gems" in (tmp_path / "report/tables/throughput.csv").read_text()


def test_commands_of_the_pages_are_of_verbs_options_and_choices_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages, others = sorted((ROOT / "docs").glob("*.md")), set()
    for command in commands_of(ROOT / "README.md", *pages):
        program, *words = shlex.split(command, comments=True)
        if program != "hires":
            others.add(program)
            if program == "make":
                done = subprocess.run(["make", *words, "-n"], cwd=ROOT, capture_output=True)
                assert done.returncode == 0, command
            continue
        verb, *rest = words
        assert verb in VERBS, command
        if verb == "bench":
            continue  # its names have options of their own
        if "--results" in rest:
            Path(rest[rest.index("--results") + 1]).mkdir(parents=True, exist_ok=True)
        args = importlib.import_module(f"hires.cli.verbs.verb_{verb}").PARSER.read(rest)
        if verb in ("run", "plan", "verify", "sweep", "quantize"):
            words = [
                word for word in args.overrides if not word.startswith(("experiment=", "out="))
            ]
            # Of the values of a sweep the first one.
            words = [re.sub(r"=range\(.*", "=1", word) for word in words]
            checked([re.split(r",(?![^\[{]*[\]}])", word)[0] for word in words], groups())
    assert others == {"make", "python3", ".venv/bin/pip"}


@pytest.mark.parametrize("page", ["keys", "verbs", "libraries", "operators"])
def test_page_from_the_code_is_up_to_date(hires, page):
    answer = hires("list", page, "--markdown")
    assert answer.code == 0
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert answer.out.replace(ONLY_IN_TESTS, "") == text, f"make docs writes docs/{page}.md again"


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
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def plain(text: str) -> str:
    """Returns the script of the library's page without hires and DDP, on whole images."""
    text = re.sub(r"^model = (hires|Distributed).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^mesh = .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^rows, cols = .*\n", "rows = cols = slice(None)\n", text, flags=re.MULTILINE)
    saved = "torch.save(model.state_dict(), 'plain.pt')"
    text = re.sub(r"^torch\.save.*$", saved, text, flags=re.MULTILINE)
    assert "hires." not in text
    return text


@pytest.mark.dist
def test_script_of_the_library_trains_exactly_as_the_plain_module(tmp_path):
    double = "import torch\n\ntorch.set_default_dtype(torch.float64)\n"
    text = script().replace("import torch\n", double, 1)
    assert all(word in text for word in ("dtype=torch.bfloat16", "AdamW", "clip_grad_norm_"))
    text = text.replace("dtype=torch.bfloat16", "enabled=False")
    run_ranks(run_script, 2, text, str(tmp_path))
    run_ranks(run_script, 1, plain(text), str(tmp_path))
    ours, theirs = (
        torch.load(tmp_path / name, weights_only=True) for name in ("model.pt", "plain.pt")
    )
    assert [*ours] == [*theirs]
    for name, tensor in theirs.items():
        largest = max(1, float(tensor.abs().max()))
        assert float((ours[name] - tensor).abs().max()) <= 1e-10 * largest, name


@pytest.mark.dist
def test_engine_of_the_docs_steps_as_plain_torch():
    loss, parameters = plain_steps_of_documented_engine()
    held = set()
    for found, own in run_ranks(documented_engine, 2):
        assert found == pytest.approx(loss, rel=1e-10)
        for name, value in own.items():
            assert abs(value - parameters[name]).max() < 1e-10, name
            held.add(name)
    assert held == {*parameters}
