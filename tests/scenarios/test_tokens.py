"""Ray's token authentication, where the cluster and the command disagree about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import Program, separate_ray

pytestmark = pytest.mark.ray


@pytest.fixture
def without_tokens() -> Iterator[str]:
    """The address of a Ray that was started without token authentication."""
    with separate_ray(env={"RAY_AUTH_MODE": "disabled"}) as address:
        yield address


def test_a_cluster_without_tokens_is_named(
    tmp_path: Path, without_tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("job=synthetic", "train.steps=2", "scale=1x1")
    refused = Program(tmp_path, *words, address=without_tokens)
    assert refused.wait() == 1, refused.screen
    assert f"error: the Ray at {without_tokens} was started with RAY_AUTH_MODE=disabled" in (
        refused.screen
    )
    assert "Traceback" not in refused.screen
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # as the message says
    alike = Program(tmp_path, *words, address=without_tokens, alone=True)
    assert alike.wait() == 0, alike.screen
