"""The runtime_env of a job: packages and a folder."""

from __future__ import annotations

import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from raydist.cluster import ray_private
from raydist.flow import run_job
from raydist.launch import runtime_env
from raydist.reporting.result import Result
from raydist.settings import compose
from raydist.settings.config import Job
from raydist.shared.errors import LaunchError
from tests import programs

SEES = """
import os, pathlib, sys
import beside
print(beside.WORD, os.getcwd(), sys.argv[0], sorted(path.name for path in pathlib.Path().rglob('*')))
"""


def test_a_job_without_packages_or_folder_has_no_runtime_env() -> None:
    assert runtime_env.actor_options(Job()) == {}
    assert runtime_env.root(Job()) == ""
    assert (
        runtime_env.root(Job(working_dir=".", group="inline")) == ""
    )  # its ranks stand here anyway


def test_requirements_are_names_or_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "needed.txt"
    file.write_text("# all of it\n\neinops==0.8.0  # shapes\ntimm\n")
    assert runtime_env.actor_options(Job(pip=[str(file), "rich"])) == {
        "runtime_env": {"pip": ["einops==0.8.0", "timm", "rich"]}
    }


def test_runs_in_the_folder_are_not_sent_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is placed again would send its own checkpoints, and one of half a GB would end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYDIST_RUNS", "out")
    sent: list[Any] = []

    def upload(*given: Any) -> str:
        sent.append(given)
        return "gcs://x"

    monkeypatch.setattr(ray_private, "upload_folder", upload)
    runtime_env.actor_options(Job(working_dir=".", dir="mine/x"))
    (folder, _, excludes) = sent[0]
    assert folder == str(tmp_path)
    after = excludes[excludes.index("!example.env") :]
    assert {"/runs", "/out", "/mine/x"} <= {*after}
    runtime_env.actor_options(Job(working_dir=".", dir=str(tmp_path.parent / "elsewhere")))
    assert not [pattern for pattern in sent[1][2] if "elsewhere" in pattern]


def test_a_python_below_a_path_with_a_space_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts such workers by a shell, without quotes: no worker would ever come."""
    monkeypatch.setattr(sys, "executable", "/a b/python")
    assert runtime_env.actor_options(Job()) == {}
    with pytest.raises(LaunchError, match="for pip= from a path with a space: /a b/python"):
        runtime_env.actor_options(Job(pip=["rich"]))


@pytest.mark.ray
def test_ranks_run_in_a_copy_of_the_folder_without_ignored_files(on_ray: Path) -> None:
    (on_ray / "project" / "sub").mkdir(parents=True)
    (on_ray / "project" / "sub" / "sees.py").write_text(SEES)
    (on_ray / "project" / "sub" / "beside.py").write_text("WORD = 'sent'")
    (on_ray / "project" / ".gitignore").write_text("big\n")
    (on_ray / "project" / "big").write_text("x")
    (on_ray / "project" / "sub" / ".env").write_text("TOKEN=hush")
    words = [
        "script=project/sub/sees.py",
        "working_dir=project",
        "scale=1x2",
        "watch.progress=none",
    ]
    done = run_job(compose.compose([*words, "watch.output=none"], claim=True))
    for rank in range(2):
        sent, folder, argv, *listed = (done.dir / "logs" / f"rank-{rank}.log").read_text().split()
        assert (sent, argv) == ("sent", "sub/sees.py")
        assert Path(folder) != on_ray / "project"
        assert "'sub']" in listed
        assert not any("big" in name or ".env" in name for name in listed)


@pytest.fixture(scope="module")
def small_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray in a virtual environment that is small, and sees the packages of this one.

    For `pip=` Ray copies the whole environment of its node: this one has 7 GB, twice a test.
    """
    import ray
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("small")
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    seen = sysconfig.get_path("purelib")
    (packages / "seen.pth").write_text(f"import site; site.addsitedir({seen!r})\n")
    ray.shutdown()  # of the cluster that tests share
    with pytest.MonkeyPatch.context() as started:
        started.setattr(sys, "executable", str(folder / "bin" / "python"))
        cluster = Cluster(initialize_head=True, head_node_args={**programs.HEAD, "num_cpus": 2})
    with pytest.MonkeyPatch.context() as connected:
        connected.setenv("RAY_ADDRESS", cluster.address)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        yield cluster.address
        ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def project(small_ray: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder of a test on the small Ray."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def install(project: Path, *words: str) -> Result[Any]:
    (project / "uses.py").write_text("import needed\nprint(needed.__file__)")
    return run_job(
        compose.compose(["script=uses.py", "scale=1x1", "watch.progress=none", *words], claim=True)
    )


@pytest.mark.ray
def test_packages_are_installed_for_the_ranks_only(project: Path) -> None:
    package = (
        project / "needed-1-py3-none-any.whl"
    )  # one that is built: pip need not fetch what builds it
    with zipfile.ZipFile(package, "w") as wheel:
        wheel.writestr("needed.py", "")
        wheel.writestr(
            "needed-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: needed\nVersion: 1\n"
        )
        wheel.writestr(
            "needed-1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("needed-1.dist-info/RECORD", "")
    done = install(project, f"pip=[{package}]", "watch.output=none")
    assert "/runtime_resources/pip/" in (done.dir / "logs" / "rank-0.log").read_text()
    assert find_spec("needed") is None


@pytest.mark.ray
def test_a_missing_package_is_named(project: Path) -> None:
    with pytest.raises(LaunchError, match=r"rank 0 on .*no-such-package-of-raydist"):
        install(project, "pip=[--no-index,no-such-package-of-raydist]")  # nobody needs to be asked
