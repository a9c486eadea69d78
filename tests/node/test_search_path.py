"""Which of the driver's folders for modules a rank on another node gets."""

from __future__ import annotations

import os
import secrets
import shutil

import pytest

from raydist.node.fork_launcher import safe_search_path
from tests.rig import requires_root


@pytest.fixture
def shared() -> str:
    return f"/tmp/search-{secrets.token_hex(8)}"


def test_a_folder_that_anybody_could_make_is_left_out(shared: str) -> None:
    """/tmp/project on the driver's node: on this node another user could make it, and own the training."""
    assert safe_search_path(["", shared, f"{shared}/deeper", "/opt/no/such", "/usr/lib"]) == (
        "",
        "/opt/no/such",
        "/usr/lib",
    )


@requires_root
@pytest.mark.root
def test_one_in_tmp_is_used_if_it_is_this_users(shared: str) -> None:
    os.mkdir(shared)
    try:
        assert safe_search_path([f"{shared}/src"]) == (f"{shared}/src",)
        os.chown(shared, 65534, 65534)
        assert safe_search_path([shared, f"{shared}/src"]) == ()
    finally:
        shutil.rmtree(shared)
