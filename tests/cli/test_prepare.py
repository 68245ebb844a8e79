"""What the front end adds to a plan: does the launcher have as many ranks?"""

from __future__ import annotations

import pytest

from hires.cli.prepare import offered
from hires.core.config import from_dict


@pytest.mark.parametrize(
    ("replicas", "world", "expected"),
    [
        (40, 160, "use parallel.replicas=16, or allow them with launcher.max_ranks=160"),
        (1, 100, "use fewer tiles, stages or replicas, or allow them with launcher.max_ranks=100"),
    ],
)
def test_world_that_the_machine_does_not_offer_is_refused(replicas, world, expected):
    config = from_dict({"batch": 640, "parallel": {"replicas": replicas}})
    [finding] = offered(config, world)
    assert (finding.severity, finding.key) == ("error", "launcher.max_ranks")
    assert finding.text.endswith(expected)


def test_replicas_that_fit_divide_the_batch_too():
    config = from_dict({"batch": 100, "parallel": {"replicas": 100}})
    assert "use parallel.replicas=50" in offered(config, 100)[0].text


def test_world_that_fits_is_no_finding():
    assert offered(from_dict({}), 64) == []
