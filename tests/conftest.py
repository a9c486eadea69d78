"""Shared fixtures: one local Ray cluster for the whole session, and a check that nothing is left
behind."""

from __future__ import annotations

import gc
import os
import resource
import secrets
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from raydist.cluster import ray_private
from raydist.launch import warm_server
from tests import durations, programs
from tests.leftovers import Session

ROOT = Path(__file__).parent.parent
CPUS = 4
"""CPUs of the cluster that tests share."""
# On a busy machine an example may take longer than hypothesis's 0.2 s.
hypothesis.settings.register_profile("raydist", deadline=None)
hypothesis.settings.load_profile("raydist")
SESSION = pytest.StashKey[Session]()
LEFT = pytest.StashKey[list[str]]()
KEPT = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "seconds to wait at the end of a session for leftovers to disappear (%(default)s)"
    parser.addoption("--left-within", type=float, default=60.0, help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Set the environment of all tests. With pytest-xdist each worker has a separate one, and the
    first process runs no tests."""
    config.stash[LEFT], config.stash[KEPT] = [], []
    if config.getoption("numprocesses", None):
        return
    session = config.stash[SESSION] = Session()
    os.environ |= {
        "HOME": str(session.folder / "home"),
        "TMPDIR": str(session.folder),
        # Ray's token authentication stays on, with a separate token: never the one in ~/.ray.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # as deploy/node/environment.sh and a Ray of raydist's own have it
        "PIP_NO_CACHE_DIR": "1",  # it would stay in that home
        "RUNTIME_ENV_RETRY_TIMES": "1",  # a third attempt does not find a missing package either
        "RAYDIST_KEEP_WARM_S": "0",  # no fork server outlives its run
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
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:  # inherited from a shell, or nohup
            signal.signal(number, handler)
    tempfile.tempdir = str(session.folder)
    chosen = None if hasattr(config, "workerinput") else config.option.basetemp
    config.option.basetemp = chosen or session.folder / "t"


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of tests/slow.txt.

    Run the slowest files first on each worker of pytest-xdist: hosts, Ray, ranks. Quick
    tests fill the end.
    """
    slow = durations.slow()
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
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


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what has not begun when the time is over that .ci/run has."""
    if time.time() > float(os.environ.get("RAYDIST_TEST_UNTIL", "inf")):
        pytest.skip("not run: the time for tests is over (RAYDIST_TEST_UNTIL)")


def pytest_collection_finish(session: pytest.Session) -> None:
    os.chdir(
        session.config.stash[SESSION].folder / "cwd"
    )  # files that tests write there do not land in the checkout


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note the leftovers once the fixtures of a test have ended, also after a Ctrl-C in it."""
    try:
        return (yield)
    finally:
        item.config.stash[SESSION].note(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report an error if anything is left once the last fixture has ended."""
    config = session.config
    left, kept = config.stash[LEFT], config.stash[KEPT]
    if (own := config.stash.get(SESSION, None)) is not None:
        os.chdir(config.invocation_params.dir)
        warm_server.end_all()
        programs.end_servers()
        sys.last_value = sys.last_traceback = (
            None  # the traceback of a failed test holds its programs and folders
        )
        gc.collect()
        own.keep = bool(session.testsfailed)
        left += own.leftovers(config.option.left_within)
        kept += [str(folder) for folder in (own.folder / "t",) if own.keep and folder.exists()]
    if hasattr(config, "workerinput"):  # the first process reports it
        vars(config)["workeroutput"] |= {"left": left, "kept": kept}
    elif left:
        text = "the tests have left behind\n  " + "\n  ".join(left)
        report = pytest.TestReport(
            "leftovers", ("", None, "all tests"), {}, "failed", text, "teardown"
        )
        config.hook.pytest_runtest_logreport(report=report)
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the leftovers that a worker of pytest-xdist has reported."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[LEFT] += output.get("left", [])
    node.config.stash[KEPT] += output.get("kept", [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for folder in config.stash[KEPT]:
        terminalreporter.write_line(
            f"the folders of these tests are in {folder} until the next session"
        )


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """The address of a Ray cluster of one node with 4 CPUs; programs of a test get it as
    RAY_ADDRESS."""
    import ray
    from ray.cluster_utils import Cluster

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (limit, limit)
    )  # as ray.init does: workers inherit the limit of this process
    # a Cluster has no GPUs unless told, also where the machine has some
    have = {"num_cpus": CPUS, "num_gpus": ray_private.count_gpus()}
    with pytest.MonkeyPatch.context() as of_ray:
        # The node's limit for all runs: it is the programs that keep a server for the next one.
        of_ray.setenv("RAYDIST_KEEP_WARM_S", programs.KEEP_WARM_S)
        cluster = Cluster(initialize_head=True, head_node_args={**programs.HEAD, **have})
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def on_ray(ray_address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Connect this process to the cluster and change to an empty folder; return the folder."""
    import ray

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    if not ray.is_initialized():
        ray.init(address=ray_address, logging_level="ERROR", log_to_driver=False)
    return tmp_path


@pytest.fixture
def python(tmp_path: Path) -> list[str]:
    """The command that runs a module in this environment."""
    return [sys.executable, "-m"]
