"""Is a calibration kept by machine and version, and refused if it is another's or damaged?"""

from __future__ import annotations

import dataclasses

import pytest

from hires.core.errors import ConfigError
from hires.core.store.cache import sealed
from hires.plan.simulation import machine_calibration as kept
from hires.plan.simulation.machine_calibration import Machine, keep_calibration, load_calibration
from tests.helpers.calibrations import CALIBRATION


@pytest.fixture
def here(tmp_path, monkeypatch):
    """This machine, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HIRES_CACHE", raising=False)
    return dataclasses.replace(CALIBRATION, machine=kept.this_machine())


def test_what_is_kept_is_loaded_again(here):
    assert load_calibration() is None
    path = keep_calibration(here)
    assert path is not None
    loaded = load_calibration()
    assert loaded is not None
    assert loaded.to_dict() == here.to_dict()
    assert loaded.source.startswith("measured here on 2031-02-03 (5 samples, ")


def test_without_a_calibration_the_defaults_say_so(here):
    source = kept.calibration_or_defaults().source
    assert source == "defaults, not measured here: run hires doctor --calibrate"
    assert kept.calibration_or_defaults().samples == []


def test_calibration_of_another_machine_is_left_aside_and_named(here):
    keep_calibration(dataclasses.replace(here, machine=here.machine._replace(cpu="another")))
    source = kept.calibration_or_defaults().source
    assert source.startswith("defaults, not measured here (1 kept, of another machine or version)")


def test_cache_that_is_off_keeps_nothing(here, monkeypatch):
    monkeypatch.setenv("HIRES_CACHE", "off")
    assert keep_calibration(here) is None
    assert load_calibration() is None


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"cpu": "another"}, "cpu another (here "),
        ({"torch": "1.0"}, "torch 1.0 (here "),
        ({"hires": "0"}, "hires 0 (here "),
    ],
)
def test_file_of_another_machine_or_version_is_refused(here, facts, text):
    other = here.to_dict()
    other["machine"] |= facts
    file = keep_calibration(here)
    assert file is not None
    file.write_text(sealed(other, file.name))  # as a copied cache would have it
    with pytest.raises(ConfigError) as refused:
        load_calibration()
    assert text in str(refused.value)
    assert "hires doctor --calibrate" in str(refused.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace("measured", "measure", 1) + " ",
        lambda text: text.replace('"gather_s": 1', '"gather_s": 2') + "\n",
        lambda text: "[" * 200_000,
    ],
)
def test_damaged_file_is_refused(here, damage):
    path = keep_calibration(here)
    assert path is not None
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match="hires doctor --calibrate"):
        load_calibration()


def test_edit_of_hires_leaves_the_file_where_it_is():
    machine = Machine("a cpu", 2, "2.13", "0.1")
    assert kept.kept_file(machine) == kept.kept_file(machine)
    assert kept.kept_file(machine) != kept.kept_file(machine._replace(cores=4))
