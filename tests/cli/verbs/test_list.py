"""``hires list`` shows every choice, key, alias and operator that there is."""

from __future__ import annotations

import json

from hires.cli.compose.choices import ALIASES, config_keys, groups


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
    for wrong, meant in (
        (["parallel.stags"], "did you mean parallel.stages?"),
        (["nonsense"], "choose one of augment, cluster, "),
        (["model", "--where", "batch > 3"], "hires list runs --where"),
        (["models", "--markdown"], "markdown"),
    ):
        answer = hires("list", *wrong)
        assert (answer.code, meant in answer.err) == (2, True)
