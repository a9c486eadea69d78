"""The folder of the checkpoints is on a slow file system: a restart does not wait for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.reporting.result import Result
from raydist.shared import kinds
from raydist.worker.torch_private import connects_anew
from tests import faults
from tests.checkpoints import differences, state_on_disk
from tests.faults import Fault, kill
from tests.rig import requires_root
from tests.scenarios.test_restart_run import events, losses
from tests.slow_folder import FUSEPY, SLOW_FOLDER
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.slow,
    requires_root,
    pytest.mark.skipif(not Path(FUSEPY).exists(), reason="there is no fusepy (python3-fusepy)"),
]
SAVED, LATER = 32, 48
"""The step of a checkpoint, after which a rank is killed; and one by which all places in memory
were used again."""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A slow folder; while there is a file `hold` beside it, no checkpoint can be written there."""
    monkeypatch.chdir(tmp_path)
    folder, behind = tmp_path / "slow", tmp_path / "behind"
    folder.mkdir()
    behind.mkdir()
    words = (SLOW_FOLDER, behind, folder, tmp_path / "hold")
    with subprocess.Popen(["/usr/bin/python3", "-I", *map(str, words)]) as server:
        wait_until(lambda: os.path.ismount(folder))
        yield folder
        subprocess.run(["umount", "--lazy", folder], check=True)
        server.wait(120)


def train(storage: Path, *words: str, struck: tuple[Fault, ...] = (), on_event: Any) -> Result[Any]:
    return raydist.run(
        faults.training,
        "scale=1x2",
        "group=inline",
        "backend=gloo",
        "watch.progress=none",
        "train.epochs=4",
        "data.batch_size=8",
        f"checkpoint.every={SAVED}",
        "snapshot.every=1",
        f"storage={storage}",
        *words,
        struck=struck,
        on_event=on_event,
    )


def checkpoint(done: Result[Any], step: int) -> dict[str, Any]:
    assert isinstance(done.checkpoint, Path)
    return state_on_disk(done.checkpoint.parent / f"step-{step:08d}")


IN_PLACE = pytest.param(
    "fsdp", "on", 1, marks=pytest.mark.skipif(not connects_anew(), reason="this torch cannot")
)


@pytest.mark.parametrize(("parallel", "in_place", "rank"), [("ddp", "off", 0), IN_PLACE])
def test_a_restart_does_not_wait_for_a_checkpoint(
    slow: Path, tmp_path: Path, parallel: str, in_place: str, rank: int
) -> None:
    """It is written while the next attempt trains, and has the state that it was to have."""
    hold = tmp_path / "hold"
    hold.touch()
    noted: list[kinds.Event] = []

    def note(event: kinds.Event) -> None:
        noted.append(event)
        if isinstance(event, kinds.Report) and (event.step or 0) >= LATER:
            hold.unlink(missing_ok=True)

    words = (f"parallel={parallel}", f"restart.in_place={in_place}")
    done = train(slow, *words, struck=(kill(rank, SAVED + 1),), on_event=note)
    assert [event["step"] for event in events(done, "restarted")] == [SAVED + 2]
    saved = [event["step"] for event in events(done, "saved")]
    assert saved == [SAVED, 2 * SAVED]
    order = [each.kind for each in noted if each.kind in ("restarted", "saved")]
    assert order == ["restarted", "saved", "saved"]
    alone = train(tmp_path / "fast", *words, on_event=None)
    assert (done.values, losses(done)) == (alone.values, losses(alone))
    assert differences(checkpoint(done, SAVED), checkpoint(alone, SAVED)) == []
