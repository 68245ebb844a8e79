"""What is told when a config does not become a plan."""

from __future__ import annotations

import pytest

from hires.cli import prepare
from hires.core.config import RunConfig, from_dict
from hires.core.errors import ConfigError


class Refusing:
    """A process that can trace no network."""

    def __enter__(self) -> Refusing:
        return self

    def __exit__(self, *details: object) -> None:
        pass

    def trace(self, config: RunConfig) -> None:
        raise ConfigError("the network takes no such image")


def test_network_that_cannot_be_traced_hides_no_wrong_number(monkeypatch):
    monkeypatch.setattr(prepare, "TorchProcess", Refusing)
    layout = {"replicas": 200, "tiles": [1, 40], "microbatches": 3}
    with pytest.raises(ConfigError) as caught:
        prepare.planned(from_dict({"image": 32, "batch": 200, "parallel": layout}))
    for words in ("takes no such image; ", "[batch]", "[parallel.tiles]", "[launcher.max_ranks]"):
        assert words in str(caught.value)
