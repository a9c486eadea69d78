"""Where the ranks meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydist.launch.rendezvous import rendezvous_file
from raydist.settings.config import Job


@pytest.mark.parametrize("attempt", [0, 1])
def test_the_file_of_a_run_that_was_killed_is_not_met_again(tmp_path: Path, attempt: int) -> None:
    """The next run in the folder would look for the addresses of ranks that are gone."""
    job = Job(dir=str(tmp_path / "run"), init_method="file")
    file = rendezvous_file(job, attempt)
    assert file is not None
    file.write_bytes(b"addresses")
    assert rendezvous_file(job, attempt) == file
    assert not file.exists()
