"""Every config key is documented where it is defined: the pages of keys are made from it."""

from __future__ import annotations

import pytest

from hires.cli.compose.choices import ConfigKey, config_keys


@pytest.mark.parametrize("key", config_keys().values(), ids=config_keys())
def test_every_key_has_a_sentence(key: ConfigKey):
    assert key.meaning.endswith("."), "the docstring under the field is missing or no sentence"
    assert len(key.meaning) >= 12
    assert key.meaning[0].isupper() or key.meaning[0] in "`[0123456789"


@pytest.mark.parametrize(
    "key", [k for k in config_keys().values() if k.choices], ids=lambda k: k.name
)
def test_every_choice_is_named_or_explained(key: ConfigKey):
    explained = [name for name in key.choices if f"`{name}`" in key.meaning]
    assert len(explained) >= len(key.choices) - 1, f"{key.name} leaves out choices of {key.choices}"


def test_keys_of_times_and_sizes_name_their_unit():
    units = {"_s": "econds", ".minutes": "minutes", ".memory": "its unit", ".limit": "its unit"}
    for key in config_keys().values():
        if key.name.endswith("_per_s"):  # a rate
            assert "a second" in key.meaning or "per second" in key.meaning, key.name
            continue
        for ending, unit in units.items():
            assert not key.name.endswith(ending) or unit in key.meaning, key.name
