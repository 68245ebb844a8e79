"""The commands of the README and of the pages work, and the site builds with its own pages."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hires.cli.choices import groups
from hires.cli.main import VERBS, parser_of
from hires.cli.overrides import checked
from tests.helpers.commands import REPOSITORY
from tests.helpers.commands import hires as run_hires
from tests.helpers.library_page import (
    documented_engine,
    plain_steps_of_documented_engine,
    run_script,
    script,
)
from tests.helpers.ranks import run_ranks

README = REPOSITORY / "README.md"


def commands_of(*pages: Path) -> list[str]:
    """Returns the command lines of the blocks of shell of some pages."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    return [*dict.fromkeys(filter(None, map(str.strip, lines)))]


@pytest.mark.dist
def test_commands_of_the_readme_run_one_after_the_other(tmp_path):
    """On a smaller network and image, for fewer epochs."""
    small = {
        "model=resnet18": "model=preact_resnet model.depth=11",
        "image=512": "image=32",
        "epochs=10": "epochs=1",
    }
    for folder in ("photos", "new/images"):
        words = ("--classes", "2", "--count", "16", "--size", "40x36")
        run_hires(tmp_path, "data", "make", folder, *words)
    ran = []
    for command in commands_of(README):
        words = shlex.split(command, comments=True)
        if words[0] == "hires":
            runs = [path.parent.name for path in tmp_path.glob("results/mine/*/record.json")]
            words = [word.replace("RUN", *runs) if "RUN" in word else word for word in words[1:]]
            verb, *rest = (part for word in words for part in small.get(word, word).split())
            run_hires(tmp_path, verb, *rest)
            ran.append(verb)
    assert ran == ["data", "plan", "run", "run", "report"]
    records = [json.loads(path.read_text()) for path in tmp_path.glob("results/*/*/record.json")]
    assert [(record["layout"], record["state"]) for record in records] == [("sp", "done")] * 2
    [table] = tmp_path.glob("results/default/*/a0/predictions.csv")
    assert len(table.read_text().splitlines()) == 1 + 16
    assert "sp" in (tmp_path / "report/tables/throughput.csv").read_text()


def test_commands_of_the_pages_are_of_verbs_options_and_choices_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    others = set()
    for command in commands_of(README, *sorted((REPOSITORY / "docs").glob("*.md"))):
        program, *words = shlex.split(command, comments=True)
        if program != "hires":
            others.add(program)
            continue
        verb, *rest = words
        assert verb in VERBS, command
        if "--results" in rest:
            Path(rest[rest.index("--results") + 1]).mkdir(parents=True, exist_ok=True)
        args = parser_of(verb, rest).read(rest)
        if verb in ("run", "plan", "verify", "sweep", "quantize"):
            words = [one for one in args.overrides if not one.startswith("experiment=")]
            # Of the values of a sweep the first one.
            words = [re.sub(r"=range\(.*", "=1", word) for word in words]
            checked([re.split(r",(?![^\[{]*[\]}])", word)[0] for word in words], groups())
    assert others == {"make", "sh", "TORCH=cuda", "pip", "python3"}


def test_site_builds_without_a_warning(tmp_path):
    """Strict: a page without a place, a link or an anchor that leads nowhere ends the build."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    done = subprocess.run(
        [*command, str(tmp_path / "site")],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', index)
    readme, inside = (
        page.read_text(encoding="utf-8") for page in (README, REPOSITORY / "docs/architecture.md")
    )
    paths = re.findall(r"`((?:hires|conf|docs|tests|scripts|launch)/[^` ]+)`", inside)
    for path in [*re.findall(r"\]\(([^)#]+)\)", readme), *paths]:
        assert (REPOSITORY / path).exists(), path


def plain(text: str) -> str:
    """Returns the script of the library's page without hires and DDP, on whole images."""
    for line, other in (
        (r"(model = (hires|Distributed)|mesh = ).*\n", ""),
        (r"rows, cols = .*\n", "rows = cols = slice(None)\n"),
        (r"torch\.save.*$", "torch.save(model.state_dict(), 'plain.pt')"),
    ):
        text = re.sub(f"^{line}", other, text, flags=re.MULTILINE)
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
    found, expected = (
        torch.load(tmp_path / name, weights_only=True) for name in ("model.pt", "plain.pt")
    )
    assert [*found] == [*expected]
    for name, tensor in expected.items():
        largest = max(1, float(tensor.abs().max()))
        assert float((found[name] - tensor).abs().max()) <= 1e-10 * largest, name


@pytest.mark.dist
def test_engine_of_the_docs_steps_as_plain_torch():
    loss, parameters = plain_steps_of_documented_engine()
    names = set()
    for found, own in run_ranks(documented_engine, 2):
        assert found == pytest.approx(loss, rel=1e-10)
        for name, value in own.items():
            assert abs(value - parameters[name]).max() < 1e-10, name
            names.add(name)
    assert names == {*parameters}
