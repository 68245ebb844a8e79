"""Is the run found that a person means?"""

from dataclasses import replace

import pytest

from hires.core.errors import ConfigError
from hires.core.store import find, rundir
from tests.helpers.new_runs import ARGV, PLAN

pytestmark = pytest.mark.timeout(60)


def test_find_by_path_name_campaign_and_hash(config):
    run = rundir.create(config, PLAN, ARGV)
    for name in (str(run.path), run.name, f"default/{run.name}", run.name[-8:], run.name[-8:-3]):
        assert find.find(name, config.results) == run
    with pytest.raises(ConfigError, match="there is no run 'nothing'"):
        find.find("nothing", config.results)
    with pytest.raises(ConfigError, match="there is no run ''"):
        find.find("", config.results)


def test_find_refuses_what_may_be_several(config):
    for seed in (1, 2):
        rundir.create(replace(config, seed=seed), PLAN, ARGV)
    with pytest.raises(ConfigError, match="may be any of 2 runs"):
        find.find("resnet50-224x224", config.results)
