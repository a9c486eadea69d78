"""A real sweep with `storage=`: what is in the store while it runs, watched from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raydist.state.object_store import environment
from raydist.sweeps import upload
from raydist.tools import watch
from tests.programs import Program
from tests.stores import SECRET, store
from tests.waiting import wait_until
from tests.watch.test_web_mirror import exported

pytestmark = pytest.mark.ray
PATIENCE_S = 240.0
JOB = """
import os, time
import raydist

def job(config, factor: float = 0.0):
    for step in range(1, 11):
        raydist.report(step=step, loss=factor / step)
    while not os.path.exists(f"go-{factor:g}"):
        time.sleep(0.05)
"""


def test_a_sweep_that_goes_on_can_be_watched_from_its_store(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB.replace("go-", f"{tmp_path}/go-"))
    with store() as server:
        variables = "".join(f"{name}={value}\n" for name, value in server.env.items())
        (tmp_path / "store.env").write_text(variables)

        def summary() -> Any:
            return json.loads(server.files("sweeps/one/sweep.json")["sweeps/one/sweep.json"])

        def states() -> list[str]:
            files = server.files("sweeps/one/sweep.json")
            return [trial["state"] for trial in summary()["trials"]] if files else []

        program = Program(
            tmp_path,
            "job=job.py",
            "job.args.factor=1,2",
            "scale=1x1",
            "backend=gloo",
            "sweep.parallel=1",
            "sweep.objective=min:loss",
            f"hydra.sweep.dir={tmp_path}/one",
            "storage=s3://bucket/sweeps",
            "env_file=store.env",
            address=ray_address,
            module="raydist.tools.sweep",
        )
        (tmp_path / "go-1").touch()
        wait_until(lambda: states() == ["finished", "running"], "it in the store", PATIENCE_S)
        with environment(server.env):
            assert watch.main(["s3://bucket/sweeps/one", "--export", "during.html"]) == 0
        (tmp_path / "go-2").touch()
        assert program.wait(PATIENCE_S) == 0, program.screen
        assert states() == ["finished", "finished"]
        assert summary()["state"] == "finished"
        files = server.files("sweeps/one/")
        assert {f"sweeps/one/{name}" for name in upload.RECORDS[:-1]} <= files.keys()
        assert not [name for name, content in files.items() if SECRET.encode() in content]
        with environment(server.env):
            assert watch.main(["s3://bucket/sweeps/one", "--export", "after/"]) == 0
    during = exported(Path("during.html"))
    assert [trial["state"] for trial in during["sweep"]["trials"]] == ["finished", "running"]
    assert during["curves"]["loss"].keys() == {"0"}  # the other's events come when it has ended
    for number in range(2):
        trial = exported(Path(f"after/runs/{number}.html"))
        assert trial["sections"]["state"]["status"] == "finished"
        assert trial["sections"]["curves"]["loss"][1][0] == [*range(1, 11)]
