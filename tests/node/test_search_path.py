"""Code that a rank on another node takes from a path of the driver's: its own user's, or root's."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydist.launch.start_requests import common_request
from raydist.messages.agent import FindUnreachablePaths, StartRank
from raydist.messages.checkup import TryLibraries
from raydist.messages.server import RankSpec
from raydist.node.checkup import LOOKUP_LIMIT_S, Checkup, lookup_time
from raydist.node.fork_launcher import ForkServer, safe_search_path
from raydist.node.path_check import find_unreachable_paths
from raydist.node.rank_spec import FromMpirun, complete_spec
from raydist.settings.config import Job, as_dict
from raydist.shared.arguments import seen_from
from raydist.shared.errors import ConfigError
from raydist.shared.own_path import machine_id, of_others
from tests.rig import requires_root
from tests.waiting import wait_until

OTHER = 65534
"""The uid of another account."""


@pytest.fixture(params=[0o1777, 0o777])
def scratch(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder in which every user can make files, with and without the sticky bit."""
    # tmp_path is in a folder that only this user can enter.
    with tempfile.TemporaryDirectory(dir="/tmp") as outer:
        os.chmod(outer, 0o755)
        folder = Path(outer) / "scratch"
        folder.mkdir()
        folder.chmod(request.param)
        yield folder


def give_away(*paths: Path) -> None:
    for path in paths:
        os.chown(path, OTHER, OTHER, follow_symlinks=False)


@pytest.mark.parametrize(
    ("driver", "node", "stays"),
    [
        ("", "", False),
        ("/x", "/y", False),
        (".", "", True),
        ("{}/", "/y", True),
        (":/x", "", True),
        ("{}/tools/..", "", True),
        ("", "{}", True),
    ],
)
@pytest.mark.parametrize("working_dir", ["", "."])
def test_the_current_folder_stays_if_pythonpath_names_it(
    driver: str,
    node: str,
    stays: bool,
    working_dir: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`PYTHONPATH=. raydist train script=tools/train.py`, where tools/train.py imports from here.

    A Ray that was started before does not have the variable.
    """
    project = tmp_path / "project"
    (project / "tools").mkdir(parents=True)
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", ["", str(project), "/lib"])
    monkeypatch.setenv("PYTHONPATH", driver.format(project))
    job = Job(script="tools/train.py", working_dir=working_dir)
    request = common_request(job, has_call=False, keep=False, saving=False)
    if working_dir:  # Ray's copy of the folder, in which the agent runs
        project = project.rename(tmp_path / "copy")
        monkeypatch.chdir(project)
        monkeypatch.setattr(sys, "path", [str(project), "/lib"])
    monkeypatch.setenv("PYTHONPATH", node.format(project))
    spec = complete_spec(request, tmp_path, FromMpirun())
    assert "/lib" in spec.sys_path
    assert ("" in spec.sys_path or str(project) in spec.sys_path) == stays


def test_a_folder_that_anybody_could_make_is_left_out(scratch: Path) -> None:
    """/tmp/project on the driver's node: on this node another user could make it, and own the
    training."""
    shared = str(scratch / "project")
    assert safe_search_path(
        ["", shared, f"{shared}/deeper", "/opt/no/such", "/usr/lib", "/tmp/no/such"]
    ) == (
        "",
        "/opt/no/such",
        "/usr/lib",
    )


def test_a_folder_into_which_anybody_may_put_modules_is_left_out(scratch: Path) -> None:
    """A driver in /tmp: another user's /tmp/numpy.py was imported on the other nodes."""
    (project := scratch / "project").mkdir()
    folder = str(scratch)
    assert safe_search_path([folder, str(project), "", "project"], folder) == (
        str(project),
        "project",
    )
    assert safe_search_path([folder, ""], folder, own=True) == (folder, "")
    scratch.parent.chmod(0o700)
    assert safe_search_path([folder]) == (folder,)  # nobody else can enter it


@requires_root
@pytest.mark.root
def test_one_in_tmp_is_used_if_it_is_this_users(scratch: Path) -> None:
    (shared := scratch / "project").mkdir()
    assert safe_search_path([f"{shared}/src"]) == (f"{shared}/src",)
    give_away(shared)
    assert safe_search_path([str(shared), f"{shared}/src"]) == ()


@requires_root
@pytest.mark.root
def test_links_are_followed_and_other_owners_elsewhere_do_not_count(
    tmp_path: Path, scratch: Path
) -> None:
    (theirs := scratch / "theirs").mkdir()
    (image := tmp_path / "image").mkdir()
    (link := scratch / "link").symlink_to(image)
    (tmp_path / "to-theirs").symlink_to(theirs)
    give_away(theirs, image)
    assert of_others(link) is None  # the files of an image, a share or a project belong to anybody
    assert of_others(tmp_path / "to-theirs" / "src") == theirs
    give_away(link)
    assert of_others(link / "src") == link


def spec(
    cwd: Path, *, script: str = "", target: str = "", driver: str = "another machine"
) -> RankSpec:
    """Return the description of a rank of this node from a driver on `driver`, started in the
    folder `cwd`."""
    program = seen_from(str(cwd), script)
    job = json.dumps({**as_dict(Job()), "job": {"target": target or "math:sqrt", "args": {}}})
    request = StartRank(
        rank=0, env={}, job=job, argv=(program,), script=program, cwd=str(cwd), sys_path=(str(cwd),),
        nccl_aloud=False, nccl_strict=False, driver=driver,
    )  # fmt: skip
    return complete_spec(request, Path("/nowhere"), FromMpirun())


def test_a_rank_does_not_get_the_webhook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIST_NOTIFY_WEBHOOK", "https://hooks.slack.com/secret")
    assert "RAYDIST_NOTIFY_WEBHOOK" not in spec(tmp_path, script="train.py").env


@requires_root
@pytest.mark.root
def test_no_code_of_another_user_of_the_node_runs(scratch: Path, tmp_path: Path) -> None:
    (project := scratch / "project").mkdir()
    (train := project / "train.py").touch()
    assert spec(project, script=str(train)).cwd == str(project)
    give_away(project)
    refused = (
        rf"^{project} on .* belongs to uid {OTHER}, and every user .*; set working_dir=\. to send"
    )
    with pytest.raises(ConfigError, match=refused):
        spec(project, script=str(train))
    for code in (
        {"script": str(train)},
        {"target": f"{train}:train"},
        {"script": str(project / "run.sh")},
    ):
        with pytest.raises(ConfigError, match=refused):
            spec(tmp_path, **code)
    # on the machine where the person has typed the command, the files are those that the person has
    # seen
    assert spec(project, script=str(train), driver=machine_id()).script == "train.py"


def test_a_job_beside_which_anybody_may_put_modules_is_refused(
    scratch: Path, tmp_path: Path
) -> None:
    (train := scratch / "train.py").touch()
    (run := scratch / "run.sh").touch()
    (tmp_path / "link.py").symlink_to(train)
    refused = rf"^every user of .* may write to {scratch}, .*; set working_dir=\. to send"
    for cwd, code in (
        (tmp_path, {"script": str(train)}),
        (tmp_path, {"script": "link.py"}),
        (tmp_path, {"target": f"{train}:train"}),
        (scratch, {"script": "-m train"}),
    ):
        with pytest.raises(ConfigError, match=refused):
            spec(cwd, **code)
    assert spec(scratch, target="package.module:train").sys_path[:1] != (str(scratch),)
    assert spec(tmp_path, script=str(run)).script == str(run)  # it imports nothing
    own = spec(scratch, target=f"{train}:train", driver=machine_id())
    assert own.sys_path[0] == str(scratch)


def test_no_process_of_a_node_imports_from_a_folder_that_is_open_to_all(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's workers are in the folder of `ray start`, such as /tmp: `python -m` began there."""
    ran = tmp_path / "ran"
    (scratch / "raydist").mkdir()
    (scratch / "raydist" / "__init__.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    (scratch / "socket.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    monkeypatch.chdir(scratch)
    find = FindUnreachablePaths({"storage": "s4://bucket/x"}, {})
    missing = asyncio.run(find_unreachable_paths(find))
    assert "runs cannot be stored at s4://" in missing["storage"]
    assert asyncio.run(Checkup().handle(TryLibraries((), {}))) == {}
    assert lookup_time("127.0.0.1", {}) < LOOKUP_LIMIT_S
    ForkServer.launch(tmp_path / "f", "fork", 1).end()
    assert not ran.exists()


def test_the_server_of_a_run_imports_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("open(__file__ + '.ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    server = ForkServer.launch(tmp_path / "f", "fork", 1, modules=("beside",))
    wait_until((tmp_path / "beside.py.ran").exists)
    server.end()


def test_a_file_that_anybody_could_put_there_is_not_waited_for(
    scratch: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{scratch}/train\.py on .* does not exist, and every user"
    ):
        spec(tmp_path, target=f"{scratch}/train.py:train")
    assert spec(scratch / "gone", script="-m package.module").cwd == os.getcwd()
    assert spec(tmp_path, script="sleep").argv == ("sleep",)
    assert spec(tmp_path, target="package.module:train").cwd == str(tmp_path)
