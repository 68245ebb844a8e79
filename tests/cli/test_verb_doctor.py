"""Does ``hires doctor`` say what is wrong and what would help?"""

from __future__ import annotations

import json

import pytest

from hires.cli import doctor_checks
from hires.cli.doctor_checks import Check

CHECKS = [Check("torch", "ok", "2.13"), Check("gloo", "fail", "no answer", "open the firewall")]


def test_failing_check_exits_1_with_its_remedy(hires, monkeypatch):
    monkeypatch.setattr("hires.cli.verb_doctor.all_checks", lambda: CHECKS)
    answer = hires("doctor")
    assert answer.code == 1
    assert answer.out == (
        "ok    torch     2.13\nfail  gloo      no answer\n                -> open the firewall\n"
    )


def test_json(hires, monkeypatch):
    monkeypatch.setattr("hires.cli.verb_doctor.all_checks", lambda: CHECKS[:1])
    answer = hires("doctor", "--json")
    assert answer.code == 0
    assert json.loads(answer.out)["ok"] is True


def test_cheap_checks_pass_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cheap = ("_python", "_packages", "_config", "_results", "_slurm")
    assert [getattr(doctor_checks, name)().state for name in cheap] == ["ok"] * len(cheap)


def test_package_that_is_missing_is_named(monkeypatch):
    def version(name):
        if name == "tifffile":
            raise doctor_checks.metadata.PackageNotFoundError
        return "1"

    monkeypatch.setattr(doctor_checks.metadata, "version", version)
    check = doctor_checks._packages()
    assert (check.state, check.text) == ("fail", "tifffile missing")


def test_torch_that_cannot_be_imported_is_one_line(monkeypatch):
    monkeypatch.setattr(doctor_checks, "_TORCH", "raise ImportError('libtorch.so is broken')")
    check = doctor_checks._torch()
    assert check.state == "fail"
    assert check.text == "ImportError: libtorch.so is broken"
    assert check.remedy


@pytest.mark.dist
def test_two_processes_can_talk():
    assert doctor_checks._gloo().state == "ok"
