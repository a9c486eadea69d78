"""Fixtures: the compiled libraries, and machines with fake GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_gpu import FakeGpus, Gpu, build

Machine = Callable[..., FakeGpus]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled libraries."""
    return build(tmp_path_factory.mktemp("fake-gpu"))


@pytest.fixture
def machine(tmp_path: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make this machine one with fake GPUs, for all programs that the test starts."""

    def make(count: int, gpu: Gpu | None = None) -> FakeGpus:
        made = FakeGpus(tmp_path, libraries, count, gpu)
        for name, value in made.env().items():
            monkeypatch.setenv(name, value)
        return made

    return make


@pytest.fixture(scope="session")
def shared(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> FakeGpus:
    return FakeGpus(tmp_path_factory.mktemp("machine"), libraries, 4)


@pytest.fixture
def four(shared: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """Make this machine one with four fake GPUs.

    It is the same one in each test, so that programs share a fork server, which imports torch.
    """
    shared.repair()
    for name, value in shared.env().items():
        monkeypatch.setenv(name, value)
    return shared
