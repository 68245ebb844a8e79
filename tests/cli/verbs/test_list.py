"""``hires list`` shows every choice, key, alias and operator that there is."""

from __future__ import annotations

import json

import pytest

from hires.cli.compose.choices import ALIASES, config_keys, groups
from hires.cli.main import VERBS


def test_every_file_key_and_alias_is_listed(hires):
    text = hires("list").out
    for group, names in groups().items():
        assert f"\n{group}\n" in f"\n{text}"
        assert all(f"\n  {name} " in text for name in names), group
    assert all(key.meaning for key in config_keys().values())
    text = hires("list", "aliases").out
    for word, (key, _) in ALIASES.items():
        assert word in text
        assert key.split("=")[0] in config_keys()
    assert [name for name in groups()["model"] if name.startswith("resnet")] == [
        "resnet18", "resnet34", "resnet50", "resnet101", "resnet152",
    ]  # fmt: skip


def test_reference_pages_hold_every_verb_with_its_options_and_every_key(hires):
    verbs = hires("list", "verbs", "--markdown").out
    assert all(f"## hires {verb}" in verbs for verb in VERBS)
    assert "| `--max-parallel N` | points that run at once" in verbs
    keys_page = hires("list", "keys", "--markdown").out
    assert all(f"| `{key}` |" in keys_page for key in config_keys())
    assert "| `parallel.halo.overlap` | `auto` | `auto`, `on`, `off` | Whether" in keys_page
    assert hires("list", "operators", "--markdown").out.startswith("# Operators")
    assert hires("list", "models", "--markdown").code == 2


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
        (["parallel.stags"], "did you mean parallel.stages?"),
        (["nonsense"], "choose one of augment, cluster, "),  # it was "did you mean nodes?" alone
        (["model", "--where", "batch > 3"], "hires list runs --where"),
    ],
)
def test_unknown_word_is_answered_with_the_nearest(hires, wrong, meant):
    answer = hires("list", *wrong)
    assert (answer.code, meant in answer.err) == (2, True)
