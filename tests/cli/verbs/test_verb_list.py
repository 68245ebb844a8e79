"""Does ``hires list`` show what can be chosen?"""

from __future__ import annotations

import json
import re

import pytest

from hires.cli.compose.choices import ALIASES, conf_dir, config_keys, groups
from hires.cli.main import VERBS


def test_every_file_of_conf_is_listed(hires):
    text = hires("list").out
    for path in conf_dir().glob("*/*.yaml"):
        assert f"\n  {path.stem} " in text, path


@pytest.mark.parametrize("what", ["model", "models"])
def test_one_group_by_its_name_or_plural(hires, what):
    text = hires("list", what).out
    assert text.startswith("model\n")
    assert "resnet50" in text
    assert "parallel" not in text


def test_choices_are_sorted_as_a_person_counts():
    assert [name for name in groups()["model"] if name.startswith("resnet")] == [
        "resnet18", "resnet34", "resnet50", "resnet101", "resnet152",
    ]  # fmt: skip


def test_json_holds_the_same(hires):
    assert json.loads(hires("list", "parallel", "--json").out) == {"parallel": groups()["parallel"]}


def test_keys_come_with_their_defaults(hires):
    text = hires("list", "keys").out
    assert re.search(r"^parallel\.tiles +\[1,1\] ", text, re.MULTILINE)
    assert re.search(r"^data\.shuffle +true ", text, re.MULTILINE)


def test_every_key_has_a_meaning():
    for key in config_keys().values():
        assert key.meaning, key.name


def test_one_key_comes_with_its_choices_and_meaning(hires):
    text = hires("list", "parallel.schedule").out
    assert text.startswith("parallel.schedule\n  default  gpipe\n  values   gpipe, 1f1b")
    assert "meaning  Order of the passes of a pipeline" in text
    assert "parallel.halo.fuse" in hires("list", "parallel.halo").out
    assert hires("list", "parallel.stags").err.endswith("did you mean parallel.stages?\n")


def test_reference_pages_hold_every_verb_with_its_options_and_every_key(hires):
    verbs = hires("list", "verbs", "--markdown").out
    assert all(f"## hires {verb}" in verbs for verb in VERBS)
    assert "| `--max-parallel N` | points that run at once" in verbs
    keys_page = hires("list", "keys", "--markdown").out
    assert all(f"| `{key}` |" in keys_page for key in config_keys())
    assert "| `parallel.halo.overlap` | `auto` | `auto`, `on`, `off` | Whether" in keys_page
    assert hires("list", "operators", "--markdown").out.startswith("# Operators")
    assert hires("list", "models", "--markdown").code == 2


def test_operators_are_listed_with_their_rules(hires):
    [line] = [n for n in hires("list", "operators").out.splitlines() if n.startswith(" conv2d ")]
    assert "window" in line
    assert "may be overwritten" in line
    row = json.loads(hires("list", "operators", "--json").out)["operators"]["conv2d"]
    assert row["tiles"] == "window"
    assert row["shards"] == "samples"
    assert row["flops"] == "2 per output number and weight[0]"


def test_words_of_the_thesis_point_at_keys_that_exist(hires):
    text = hires("list", "aliases").out
    for word, (key, _) in ALIASES.items():
        assert word in text
        assert key.split("=")[0] in config_keys()


def test_config_dir_is_listed_too(hires, tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "hourglass.yaml").write_text("# My U-Net\nname: custom\n")
    assert "hourglass         My U-Net" in hires("list", "models", "--config-dir", "mine").out


def test_folder_of_the_variable_is_listed_unless_an_option_names_another(
    hires, tmp_path, monkeypatch
):
    for name in ("ours", "theirs"):
        (tmp_path / name / "cluster").mkdir(parents=True)
        (tmp_path / name / "cluster" / f"{name}.yaml").write_text("# A site\nname: x\n")
    monkeypatch.setenv("HIRES_CONF", str(tmp_path / "ours"))
    assert "\n  ours " in hires("list", "cluster").out
    text = hires("list", "cluster", "--config-dir", "theirs").out
    assert "\n  theirs " in text
    assert "\n  ours " not in text


def test_keys_are_a_table_of_meaning_and_values_on_any_screen(hires, monkeypatch):
    wide = hires("list", "keys").out.splitlines()
    [row] = [line for line in wide if line.startswith("parallel.stages ")]
    assert "a whole number, 1 or more" in row
    assert row.endswith("Contiguous slices of the network, each on ranks of its own")
    monkeypatch.setenv("COLUMNS", "80")
    narrow = hires("list", "keys").out.splitlines()
    place = next(n for n, line in enumerate(narrow) if line.startswith("parallel.stages "))
    assert narrow[place + 1] == "    Contiguous slices of the network, each on ranks of its own"
    assert max(map(len, narrow)) <= 80


def test_one_key_names_its_alias_and_the_choices_that_set_it(hires):
    text = hires("list", "parallel.stages").out
    assert "  values   a whole number, 1 or more\n" in text
    assert "  alias    split_size\n" in text
    assert "parallel=pp (2)" in text
    facts = json.loads(hires("list", "parallel.stages", "--json").out)["parallel.stages"]
    assert facts["set_by"]["parallel=sp+gems"] == 3
    assert facts["set_by"]["parallel=sp+pp"] == 2  # which takes it from pp
    # The last word of a key is enough, and so is a choice.
    assert hires("list", "stages").out == text
    assert hires("list", "resnet50").out.startswith("model\n  resnet50  ResNet-50")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("resnt50", "resnet50"),
        ("spatial_stags", "spatial_stages"),
        ("opertors", "operators"),
        ("modle", "model"),
        ("nosuch", "choose one of augment, checkpoint, "),
        ("nonsense", "choose one of augment, checkpoint, "),  # it was "did you mean nodes?" alone
    ],
)
def test_unknown_word_is_answered_with_the_nearest(hires, wrong, meant):
    answer = hires("list", wrong)
    assert answer.code == 2
    assert meant in answer.err


def test_long_lists_fold_and_stay_columns_at_80(hires, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for what in ("parallel", "aliases", "verbs", "operators", "parallel.halo"):
        assert max(map(len, hires("list", what).out.splitlines())) <= 80, what
