"""The secret of a run's ranks is read only where no other user could know or have made it."""

from __future__ import annotations

import pytest

from hires.core.errors import CommError
from hires.core.ranks import meeting
from hires.core.ranks.world import World
from hires.core.store import file_names


def test_secret_that_others_may_read_is_not_believed(tmp_path):
    world, path = World(0, 2, 0, 2, "127.0.0.1", 1, 0), tmp_path / file_names.SECRET
    meeting.write_secret(path)
    assert len(meeting.with_secret(world, tmp_path).secret) >= meeting.FEWEST_LETTERS
    for mode in (0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(CommError, match="alone, of mode 600"):
            meeting.with_secret(world, tmp_path)
    path.rename(tmp_path / "other")
    path.symlink_to("other")
    with pytest.raises(CommError, match="cannot be read from"):
        meeting.with_secret(world, tmp_path)
