from pathlib import Path

import pytest

from hires.core.config.run_config import RunConfig


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Returns the default config, whose results lie in an empty folder."""
    return RunConfig(results=str(tmp_path / "results"))
