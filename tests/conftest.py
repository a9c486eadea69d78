"""What tests share: one local Ray cluster for the whole run, and a check that nothing is left
behind."""

from __future__ import annotations

import gc
import os
import resource
import secrets
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from raydist.launch import warm_server
from tests import programs
from tests.leftovers import Session

ROOT = Path(__file__).parent.parent
CPUS = 4
"""Of the cluster that tests share."""
SESSION = pytest.StashKey[Session]()
LEFT = pytest.StashKey[list[str]]()
KEPT = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "seconds that the end of a session waits for what its tests left to go (%(default)s)"
    parser.addoption("--left-within", type=float, default=60.0, help=told)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """The environment of all tests. With pytest-xdist each worker has one, and the first process
    runs no tests."""
    config.stash[LEFT], config.stash[KEPT] = [], []
    if config.getoption("numprocesses", None):
        return
    session = config.stash[SESSION] = Session()
    os.environ |= {
        "HOME": str(session.folder / "home"),
        "TMPDIR": str(session.folder),
        # Ray's token authentication stays on, with a token of the tests' own: never the person's
        # ~/.ray.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_DEDUP_LOGS": "0",
        "PIP_NO_CACHE_DIR": "1",  # it would stay in that home
        "RUNTIME_ENV_RETRY_TIMES": "1",  # a package that is not there is not there at a third try
        "RAYDIST_KEEP_WARM_S": "0",  # nothing is left behind
        "RAYDIST_LEDGER": str(
            session.folder / "nodes.json"
        ),  # what a test does to a node is nothing to remember
    }
    for name in (
        "RAY_ADDRESS",
        "PYTHONDONTWRITEBYTECODE",
    ):  # with the second each process would compile all of raydist
        os.environ.pop(name, None)
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if (
            signal.getsignal(number) is signal.SIG_IGN
        ):  # as a shell's background job has it, and all that it starts
            signal.signal(number, handler)
    tempfile.tempdir = str(session.folder)
    chosen = None if hasattr(config, "workerinput") else config.option.basetemp
    config.option.basetemp = chosen or session.folder / "t"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers of pytest-xdist begin with what takes longest: hosts, Ray, ranks. What takes no time
    fills the end."""
    if not hasattr(config, "workerinput"):
        return
    marks: dict[Path, set[str]] = defaultdict(set)
    for item in items:
        marks[item.path] |= {item.path.parent.name, *(mark.name for mark in item.iter_markers())}
    items.sort(
        key=lambda item: [
            name not in marks[item.path] for name in ("root", "ray", "worker", "training")
        ]
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    os.chdir(
        session.config.stash[SESSION].folder / "cwd"
    )  # a file that a test drops is not the checkout's


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """After the fixtures of each test have ended, and after a Ctrl-C in it."""
    try:
        return (yield)
    finally:
        item.config.stash[SESSION].note(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The last fixture has ended, whatever ended the tests: an error, if anything is left of
    them."""
    config = session.config
    left, kept = config.stash[LEFT], config.stash[KEPT]
    if (own := config.stash.get(SESSION, None)) is not None:
        os.chdir(config.invocation_params.dir)
        warm_server.end_all()
        programs.end_servers()
        sys.last_value = sys.last_traceback = (
            None  # a test that failed has its programs and folders in there
        )
        gc.collect()
        own.keep = bool(session.testsfailed)
        left += own.left(config.option.left_within)
        kept += [str(folder) for folder in (own.folder / "t",) if own.keep and folder.exists()]
    if hasattr(config, "workerinput"):  # the first process reports it
        vars(config)["workeroutput"] |= {"left": left, "kept": kept}
    elif left:
        told = "the tests have left behind\n  " + "\n  ".join(left)
        report = pytest.TestReport(
            "leftovers", ("", None, "all tests"), {}, "failed", told, "teardown"
        )
        config.hook.pytest_runtest_logreport(report=report)
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended."""
    found = getattr(node, "workeroutput", {})
    node.config.stash[LEFT] += found.get("left", [])
    node.config.stash[KEPT] += found.get("kept", [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for folder in config.stash[KEPT]:
        terminalreporter.write_line(
            f"the folders of these tests are in {folder} until the next session"
        )


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray cluster of one node with 4 CPUs, whose address programs of a test get as
    RAY_ADDRESS."""
    import ray
    from ray.cluster_utils import Cluster

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, most)
    )  # as ray.init does: slots and this process have one limit
    cluster = Cluster(initialize_head=True, head_node_args={**programs.HEAD, "num_cpus": CPUS})
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def on_ray(ray_address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process connected to the cluster, in an empty folder of its own."""
    import ray

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    if not ray.is_initialized():
        ray.init(address=ray_address, logging_level="ERROR", log_to_driver=False)
    return tmp_path


@pytest.fixture
def python(tmp_path: Path) -> list[str]:
    """The command that runs a module of this environment."""
    return [sys.executable, "-m"]
