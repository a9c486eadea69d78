"""The folder for compiled code: the user's own, where code may run, or none."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from raydist.network.names import CACHE_FOLDER
from raydist.node import cache_folder

VARIABLES = {"TRITON_CACHE_DIR": f"{CACHE_FOLDER}/triton", "RANK": "0"}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    places = [tmp_path / "disk", tmp_path / "home/.cache/compiled"]
    monkeypatch.setattr(cache_folder, "candidates", lambda: places)
    return places


def test_it_is_made_for_this_user_alone(places: list[Path]) -> None:
    for _ in range(2):  # and used again
        assert cache_folder.fill_in(VARIABLES) == {
            "TRITON_CACHE_DIR": f"{places[0]}/triton",
            "RANK": "0",
        }
    assert stat.S_IMODE(places[0].stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["open to others", "link", "file", "of another user"])
def test_a_folder_that_another_user_may_own_is_not_used(
    places: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    match how:
        case "open to others":
            places[0].mkdir()
            places[0].chmod(0o770)
        case "link":
            (tmp_path / "theirs").mkdir(mode=0o700)
            places[0].symlink_to(tmp_path / "theirs")
        case "file":
            places[0].touch()
        case _ if os.getuid() == 0:
            places[0].mkdir(mode=0o700)
            os.chown(places[0], 12345, 12345)
        case _:
            pytest.skip("only root can give a folder away")
    assert cache_folder.fill_in(VARIABLES)["TRITON_CACHE_DIR"] == f"{places[1]}/triton"


def test_where_code_may_not_run_nothing_is_set(
    places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert cache_folder.fill_in(VARIABLES) == {"RANK": "0"}
    assert cache_folder.fill_in({"RANK": "0"}) == {"RANK": "0"}


def test_without_a_home_there_is_the_folder_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert len(cache_folder.candidates()) == 2
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # in no password database
    assert cache_folder.candidates() == [Path(f"/var/tmp/raydist-{2**31 - 2}-compiled")]
