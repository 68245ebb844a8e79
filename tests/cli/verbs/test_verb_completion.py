"""Do the shells offer what can follow?"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hires.cli.compose.choices import groups
from hires.cli.main import VERBS, main


@pytest.mark.parametrize("verb", VERBS)
def test_options_are_those_of_the_verbs_own_help(verb, capsys, hires):
    words = [verb, "make", "--help"] if verb == "data" else [verb, "--help"]
    with contextlib.suppress(SystemExit):
        main(words)
    text = capsys.readouterr().out.split("examples:")[0].partition("options:")[2]
    named = {line.strip() for line in text.splitlines() if line.strip().startswith("-")}
    expected = {
        option for line in named for option in re.findall(r"--[a-z-]+", line.split("  ")[0])
    }
    assert expected | {"--help"} == set(offered(hires, verb, "--"))


def offered(hires, *words: str) -> list[str]:
    answer = hires("_complete", *words)
    assert (answer.code, answer.err) == (0, "")
    return answer.out.split()


def test_verbs_come_first(hires):
    assert offered(hires) == sorted(VERBS)
    assert offered(hires, "") == sorted(VERBS)
    assert offered(hires, "ver") == ["verify"]


def test_keys_and_groups(hires):
    assert offered(hires, "run", "paral")[-1] == "parallel="
    assert "parallel.tiles=" in offered(hires, "plan", "batch=4", "paral")


def test_values_of_a_group(hires):
    assert offered(hires, "run", "parallel=sp+l") == [
        "parallel=sp+lp",
        "parallel=sp+lp+dp",
        "parallel=sp+lp+local_dp",
    ]
    assert offered(hires, "run", "parallel.schedule=") == [
        "parallel.schedule=1f1b",
        "parallel.schedule=gems",
        "parallel.schedule=gems_1f1b",
        "parallel.schedule=gpipe",
    ]


def test_options_and_positionals(hires):
    assert offered(hires, "run", "--ag") == ["--again"]
    assert offered(hires, "list", "mod") == ["model"]
    assert offered(hires, "data", "") == ["check", "make"]
    assert offered(hires, "nonsense", "x") == []


def test_runs_of_this_folder(hires):
    Path("results/default/one-0123abcd").mkdir(parents=True)
    Path("results/default/one-0123abcd/config.yaml").touch()
    assert offered(hires, "show", "") == ["results/default/one-0123abcd"]


def test_campaigns_runs_and_what_options_of_retry_take(hires):
    Path("results/mine/one-0123abcd").mkdir(parents=True)
    Path("results/mine/one-0123abcd/config.yaml").touch()
    for verb in ("status", "retry", "cancel"):
        assert offered(hires, verb, "") == ["mine", "results/mine/one-0123abcd"]
    assert offered(hires, "status", "mine", "res") == ["results/mine/one-0123abcd"]
    assert offered(hires, "logs", "") == ["results/mine/one-0123abcd"]
    assert offered(hires, "retry", "--state", "f") == ["failed"]
    assert "comm.timeout_s=" in offered(hires, "retry", "--set", "comm")


def test_what_verbs_of_results_take(hires):
    Path("results/mine/one-0123abcd").mkdir(parents=True)
    Path("results/mine/one-0123abcd/config.yaml").touch()
    for verb in ("compare", "export"):
        assert offered(hires, verb, "mine", "") == ["mine", "results/mine/one-0123abcd"]
    assert offered(hires, "compare", "--metric", "m") == ["memory"]
    assert offered(hires, "export", "--to", "") == ["csv", "exported", "mlflow", "onnx"]
    assert offered(hires, "show", "x", "--diff", "") == ["results/mine/one-0123abcd"]
    assert offered(hires, "list", "runs", "--campaign", "") == ["mine"]
    assert "runs" in offered(hires, "list", "")
    assert offered(hires, "compare", "--jun") == ["--junit"]


@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("hires ver", ["verify"]),
        # What follows the =, where bash breaks words.
        ("hires run parallel=sp+lp+", ["sp+lp+dp", "sp+lp+local_dp"]),
        ("hires run model.targ", ["model.target="]),
        ("hires run ", None),
    ],
)
def test_bash_script_completes_in_a_real_bash(python, tmp_path, line, replies):
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "hires"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hires "$@"\n')
    command.chmod(0o755)
    (tmp_path / "script").write_text(python("-m", "hires", "completion", "bash").out)
    ask = (
        f'PATH={folder}:$PATH; . {tmp_path}/script; compopt() {{ :; }}; COMP_LINE="{line}"; '
        f'COMP_POINT={len(line)}; _hires; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    if replies is None:
        assert {f"{group}=" for group in groups()} <= set(done.stdout.split())
    else:
        assert done.stdout.split() == replies


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script_that_asks_hires(hires, shell):
    assert "_complete" in hires("completion", shell).out
