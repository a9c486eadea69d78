"""The agent of one rank alone: a real fork server and real ranks, in this process's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import pytest

from raydist.messages.agent import (
    Close,
    Examine,
    Flush,
    GetNews,
    GetValue,
    IsOpen,
    KeepCall,
    Open,
    Opened,
    ProcessId,
    RankActivity,
    RankEnd,
    RankNews,
    RankValue,
    RecordedError,
    StartRank,
    StopRank,
    WarmServer,
)
from raydist.messages.request import Request
from raydist.messages.server import (
    ImportModules,
    OpenStore,
    RankSpec,
    ServerMessage,
    SignalProcess,
    Warm,
    WriteCheckpoint,
)
from raydist.messages.writer import WriteShards
from raydist.network.facts import Facts
from raydist.node import probe, processes, rank_process, rank_spec
from raydist.node.agent import RankAgent
from raydist.node.fork_client import ForkClient
from raydist.node.fork_launcher import ForkServer, heritage, node_folder
from raydist.node.output_file import OutputFile
from raydist.node.processes import recorded_error
from raydist.recovery.hang_verdict import LAUNCH, RankState
from raydist.settings.config import Backend, Job, as_dict
from raydist.shared.errors import LaunchError
from raydist.shared.kinds import EventJson
from raydist.state.snapshot_layout import LAST_SLOT
from raydist.state.write import SaveRequest
from tests.leftovers import alive, ended
from tests.node.test_fork_server import GATED, Line
from tests.waiting import wait_until

Result = TypeVar("Result")
TIMEOUT_S = 150.0
MODULES = ("torch", "raydist.worker.backends.ddp", "cloudpickle")


def open_request(run: str, modules: tuple[str, ...] = (), lead: bool = True) -> Open:
    """Return the request for an agent on this machine."""
    return Open(
        run=run, start="fork", modules=modules, env={}, interface=None, threads=1, mpirun="auto", secret="",
        rank=0, node_id="this-node", node_ip="127.0.0.1", lead=lead, store="tcp" if lead else None,
    )  # fmt: skip


def start_request(rank: int) -> StartRank:
    """Return the request for a rank that calls the function that its node has."""
    return StartRank(
        rank=rank, env={"CUDA_VISIBLE_DEVICES": ""}, job=json.dumps(as_dict(Job(backend=Backend(name="gloo")))),
        argv=("job",), script="", cwd="/", sys_path=tuple(sys.path), nccl_aloud=False, nccl_strict=False,
        call=True,
    )  # fmt: skip


async def keep_call(agent: RankAgent, job: Callable[[], Any]) -> None:
    """Have the node keep the function that its ranks call."""
    (agent.folder / rank_spec.CALL).unlink(
        missing_ok=True
    )  # of another test: a run has one function
    await agent.handle(KeepCall(cloudpickle.dumps((job, (), {}))))


async def start(agent: RankAgent, job: Callable[[], Any], rank: int = 0) -> int:
    """Start a rank that calls a function, alone in its process group; its pid."""
    await keep_call(agent, job)
    process: ProcessId = await agent.handle(start_request(rank))
    return process.pid


def program_request(*argv: str) -> StartRank:
    """Return the request for a rank that runs a program."""
    return StartRank(
        rank=0, env={}, job=json.dumps(as_dict(Job())), argv=argv, script=argv[0], cwd="/", sys_path=tuple(sys.path),
        nccl_aloud=False, nccl_strict=False,
    )  # fmt: skip


@dataclass
class History:
    """All news of a rank."""

    events: list[EventJson] = field(default_factory=list)
    log: bytes = b""
    end: RankEnd | None = None

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]


async def follow(agent: RankAgent, until: str = "") -> History:
    """Return the news of a rank until an event of this kind, or until its end."""
    history = History()
    while history.end is None and until not in history.kinds():
        news = await agent.handle(GetNews(0.05))
        history.events += news.events
        history.log += news.log
        history.end = news.end
    return history


class Node:
    """A fork server that the first agent of a node has started, for the agents of all tests."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.run_name = os.urandom(4).hex()
        self.lead = RankAgent()
        self.opened: Opened = self.run(self.lead.handle(open_request(self.run_name, MODULES)))

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(asyncio.wait_for(work, TIMEOUT_S))

    def agent(self) -> RankAgent:
        """Return a further agent of this node, open."""
        agent = RankAgent()
        self.run(agent.handle(open_request(self.run_name, lead=False)))
        return agent

    def close(self) -> None:
        self.run(self.lead.handle(Close()))
        self.loop.close()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    one = Node()
    yield one
    one.close()


@pytest.fixture
def agent(node: Node) -> Iterator[RankAgent]:
    one = node.agent()
    yield one
    node.run(one.handle(Close()))


# Opening


def test_the_first_agent_reads_facts_and_opens_a_store(node: Node) -> None:
    assert node.opened.facts is not None
    assert node.opened.facts.address == "127.0.0.1"
    assert node.opened.ports is not None
    assert dict(node.opened.warm.failed) == {}
    assert node.opened.store is not None
    socket.create_connection(("127.0.0.1", node.opened.store.port)).close()


def test_another_agent_of_the_node_shares_its_server(node: Node, agent: RankAgent) -> None:
    assert agent.folder == node.lead.folder
    assert node.run(agent.handle(IsOpen()))


def test_all_agents_wait_while_the_drivers_server_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first gave up after 3000 looks, 30 s, where a cold network file system takes
    minutes."""
    gate, looks, sleep = tmp_path / "gate", 0, asyncio.sleep
    (tmp_path / "raydist_gated.py").write_text(GATED.format(str(gate)))
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer.launch(tmp_path / "f", "fork", 1, modules=("raydist_gated",))

    async def look_again(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 4000:
            gate.touch()
        await sleep(0 if looks < 4000 else seconds)

    async def main() -> set[Path]:
        agents = [RankAgent(), RankAgent()]
        request = replace(
            open_request(os.urandom(4).hex()),
            warm_server=WarmServer(str(server.folder), heritage()),
            installed=(),
        )
        opening = [
            agent.handle(replace(request, rank=rank, lead=not rank))
            for rank, agent in enumerate(agents)
        ]
        await asyncio.wait_for(asyncio.gather(*opening), TIMEOUT_S)
        folders = {agent.folder for agent in agents}
        for agent in agents:
            await agent.handle(Close())
        return folders

    monkeypatch.setattr(asyncio, "sleep", look_again)
    assert len(asyncio.run(main())) == 1
    assert server.end()


def test_an_agent_that_waits_for_the_first_one_can_be_closed() -> None:
    """The first one failed: others looked for its server until their time was over."""

    async def main() -> bool:
        agent = RankAgent()
        opening = asyncio.create_task(agent.handle(open_request("none", lead=False)))
        await asyncio.sleep(0)
        await agent.handle(Close())
        await asyncio.wait({opening})
        return opening.cancelled()

    assert asyncio.run(main())


def test_a_server_stays_no_longer_than_the_admin_of_its_node_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run lifted the limit; with a limit shorter than the reading of the machine's facts,
    the server ended before the agent had connected."""
    monkeypatch.setenv("RAYDIST_KEEP_WARM_S", "0.2")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    read_facts = probe.read_facts

    def read_slowly(**known: Any) -> Facts:
        time.sleep(2.0)  # longer than the server takes to begin and to end
        return read_facts(**known)

    monkeypatch.setattr(probe, "read_facts", read_slowly)

    async def main() -> int:
        agent = RankAgent()
        opened: Opened = await agent.handle(
            replace(open_request(os.urandom(4).hex()), keep_s=300.0)
        )
        await agent.handle(Close())
        return opened.warm.pid

    assert ended(asyncio.run(main()))


# A rank and its news


def test_a_job_runs_to_its_end_and_returns_a_value(node: Node, agent: RankAgent) -> None:
    def job() -> int:
        import raydist

        raydist.report(step=3, loss=0.5)
        print("hello")
        return 42

    pid = node.run(start(agent, job))
    history = node.run(follow(agent))
    assert history.kinds() == ["joined", "report"]
    assert history.events[0]["pid"] == pid
    assert history.events[1]["values"] == {"loss": 0.5}
    assert history.log.endswith(b"hello\n")  # torch 2.8's gloo prints before
    assert history.end is not None
    assert (history.end.code, history.end.signal, history.end.step, history.end.phase) == (
        0,
        0,
        3,
        "end",
    )
    value = node.run(agent.handle(GetValue()))
    assert value.value is not None
    assert cloudpickle.loads(value.value) == 42
    assert value.error is None


def test_a_rank_whose_cpus_were_taken_away_runs_on_others(node: Node, agent: RankAgent) -> None:
    """A kubelet and a batch system change the CPUs of a container after they were read."""

    async def go() -> History:
        await agent.handle(KeepCall(cloudpickle.dumps((os.getpid, (), {}))))
        await agent.handle(replace(start_request(0), cpus=(1023,)))
        return await follow(agent)

    history = node.run(go())
    assert history.end is not None
    assert history.end.code == 0
    (warning,) = [each for each in history.events if each["kind"] == "warning"]
    assert warning["text"].startswith("the rank is not bound to the CPUs 1023, ")


def test_an_exception_is_an_event_and_a_pickle(node: Node, agent: RankAgent) -> None:
    def job() -> None:
        raise ValueError("no such layer")

    node.run(start(agent, job))
    history = node.run(follow(agent))
    (raised,) = (event for event in history.events if event["kind"] == "raised")
    assert (raised["type"], raised["message"], raised["step"]) == ("ValueError", "no such layer", 0)
    assert history.end is not None
    assert history.end.code == 1
    value = node.run(agent.handle(GetValue()))
    assert value.value is None
    assert value.error is not None
    assert repr(cloudpickle.loads(value.error)) == "ValueError('no such layer')"


def test_only_the_newest_report_of_another_rank_than_0_is_kept(
    node: Node, agent: RankAgent
) -> None:
    def job() -> None:
        import raydist

        for step in range(1, 10):
            raydist.report(step=step)

    async def run_and_read() -> list[EventJson]:
        await start(agent, job, rank=1)
        while await agent.handle(Examine()) is not None:
            pass
        return (await follow(agent)).events

    reports = [event["step"] for event in node.run(run_and_read()) if event["kind"] == "report"]
    assert reports == [9]


# Examining a rank


def test_a_rank_is_examined_while_it_runs(node: Node, agent: RankAgent) -> None:
    def stuck() -> None:
        import raydist

        raydist.report(step=1)
        time.sleep(300)

    async def run_and_examine() -> tuple[int, RankActivity | None]:
        pid = await start(agent, stuck)
        await follow(agent, until="report")
        return pid, await agent.handle(Examine())

    pid, activity = node.run(run_and_examine())
    assert activity is not None
    assert (activity.pid, activity.state) == (pid, "S")
    assert activity.busy < 0.5
    others, main = activity.stack.split("Current thread")
    assert "in stuck" in main
    assert (
        "in of_all_threads" in others
    )  # by the rank's own thread: a signal handler may crash a rank


def test_a_rank_whose_native_code_keeps_the_gil_shows_its_main_thread(
    node: Node, agent: RankAgent
) -> None:
    def stuck() -> None:
        import ctypes

        ctypes.PyDLL(None).sleep(300)

    async def run_and_examine() -> str:
        await start(agent, stuck)
        await follow(agent, until="joined")
        while True:
            activity: RankActivity | None = await agent.handle(Examine())
            assert activity is not None
            if (
                "in of_all_threads" not in activity.stack
            ):  # else the rank has not come to the job yet
                return activity.stack

    stack = node.run(run_and_examine())
    assert "in stuck" in stack


@pytest.mark.parametrize("quick", [True, False])
def test_a_rank_that_gets_no_cpu_is_given_time_to_answer(
    quick: bool,
    node: Node,
    agent: RankAgent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It seemed to have a thread that keeps the GIL."""

    def late() -> None:
        import ctypes

        (tmp_path / "begun").touch()
        ctypes.PyDLL(None).sleep(2)  # no CPU is used, and nobody answers
        time.sleep(300)

    async def run_and_examine() -> RankActivity | None:
        await start(agent, late)
        await follow(agent, until="joined")
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
        found: RankActivity | None = await agent.handle(Examine(quick))
        return found

    monkeypatch.setattr(rank_process, "wants_cpu", lambda pid: True)
    monkeypatch.setattr(rank_process, "process_state", lambda pid: ("R", 0.0))
    monkeypatch.setattr(rank_process, "ANSWER_S", 60.0)
    activity = node.run(run_and_examine())
    assert activity is not None
    assert activity.way == "thread"


async def stack_of(agent: RankAgent, function: str) -> RankState:
    """Return what a rank does once its main thread is in a function."""
    while True:
        activity: RankActivity | None = await agent.handle(Examine())
        assert activity is not None
        state = RankState(0, "a", stack=activity.stack)
        if any(frame["name"] == function for frame in state.frames):
            return state


def test_the_frames_of_raydist_itself_are_told_from_those_of_a_job(
    node: Node, agent: RankAgent, tmp_path: Path
) -> None:
    """Rules about hangs name files and functions of raydist, which may be renamed."""

    def wait_in_the_job() -> None:
        time.sleep(300)

    def return_from_the_job() -> None:
        from raydist.worker import context

        def wait_for_the_others() -> None:
            time.sleep(300)

        context.current().final_waits.append(wait_for_the_others)

    async def examine() -> list[RankState]:
        await start(agent, wait_in_the_job)
        states = [await stack_of(agent, "wait_in_the_job")]
        await start(agent, return_from_the_job)
        states.append(await stack_of(agent, "wait_for_the_others"))
        await agent.handle(program_request(str(script)))
        states.append(await stack_of(agent, "wait_in_the_program"))
        return states

    script = tmp_path / "train.py"
    script.write_text(
        "import time\ndef wait_in_the_program(): time.sleep(300)\nwait_in_the_program()\n"
    )
    states = node.run(examine())
    assert [state.left for state in states] == [False, True, False]
    for state in (states[0], states[2]):
        own = [LAUNCH.search(frame["file"]) is None for frame in state.frames]
        assert own == sorted(own, reverse=True)  # the job's frames, then those that lead to it
        assert own.count(True) <= 2 < own.count(False)


def test_a_rank_that_has_ended_is_not_examined(node: Node, agent: RankAgent) -> None:
    assert node.run(agent.handle(Examine())) is None
    node.run(start(agent, lambda: None))
    node.run(follow(agent))
    assert node.run(agent.handle(Examine())) is None


# Stopping a rank


@pytest.mark.parametrize(("grace", "number"), [(30.0, signal.SIGTERM), (0.0, signal.SIGKILL)])
def test_a_rank_is_stopped(
    node: Node, agent: RankAgent, grace: float, number: signal.Signals
) -> None:
    async def run_and_stop() -> RankEnd | None:
        await start(agent, lambda: time.sleep(300))
        await follow(agent, until="joined")
        await agent.handle(StopRank(grace))
        return (await follow(agent)).end

    end = node.run(run_and_stop())
    assert end is not None
    assert (end.code, end.signal, end.stop_requested) == (0, number, True)
    assert end.why == ""  # the driver knows who stopped it


def test_a_rank_that_failed_before_it_was_to_stop_was_not_told_to(
    node: Node, agent: RankAgent
) -> None:
    def fail() -> None:
        import raydist

        raydist.report(step=1)
        raise ValueError

    async def run_and_stop() -> RankEnd | None:
        await start(agent, fail)
        await follow(agent, until="raised")
        await agent.handle(StopRank(0.0))
        return (await follow(agent)).end

    end = node.run(run_and_stop())
    assert end is not None
    assert not end.stop_requested


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(
    node: Node, agent: RankAgent
) -> None:
    def stubborn() -> None:
        import raydist

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raydist.report(step=1)
        time.sleep(300)

    async def run_and_stop() -> tuple[float, RankEnd | None]:
        await start(agent, stubborn)
        await follow(agent, until="report")
        began = time.monotonic()
        await agent.handle(StopRank(0.5))
        return time.monotonic() - began, (await follow(agent)).end

    waited_s, end = node.run(run_and_stop())
    assert end is not None
    assert end.signal == signal.SIGKILL
    assert 0.5 <= waited_s < 5


def test_an_agent_without_a_rank_has_nothing_to_stop(node: Node, agent: RankAgent) -> None:
    node.run(agent.handle(StopRank(30.0)))


def test_a_rank_that_another_process_kills(node: Node, agent: RankAgent) -> None:
    def job() -> None:
        import raydist
        from raydist.worker import context

        raydist.report(step=7)
        context.phase("backward")
        context.current().flush()
        os.kill(os.getpid(), signal.SIGKILL)

    node.run(start(agent, job))
    history = node.run(follow(agent))
    end = history.end
    assert end is not None
    assert (end.code, end.signal, end.step, end.phase) == (0, signal.SIGKILL, 7, "backward")
    assert (end.oom, end.lost, end.by_mpirun) == ("", "", False)
    assert [event["step"] for event in history.events if event["kind"] == "report"] == [7]
    assert node.run(agent.handle(GetValue())) == RankValue()


# Further attempts


def test_an_agent_starts_a_second_attempt_under_another_rank(node: Node, agent: RankAgent) -> None:
    def fail() -> None:
        raise ValueError("first attempt")

    node.run(start(agent, fail, rank=1))
    first = node.run(follow(agent)).end
    pid = node.run(start(agent, lambda: "second", rank=0))
    history = node.run(follow(agent))
    assert first is not None
    assert first.code == 1
    assert history.kinds() == ["joined"]
    assert history.events[0]["pid"] == pid
    assert history.end is not None
    assert history.end.code == 0
    value = node.run(agent.handle(GetValue()))
    assert value.value is not None
    assert cloudpickle.loads(value.value) == "second"
    assert value.error is None


def test_an_agent_that_cannot_read_the_news_ends_its_rank_and_starts_another(
    node: Node, agent: RankAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver took the error for the loss of the agent."""

    def fail(file: OutputFile, most: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    async def lose_the_disk() -> tuple[bool, RankEnd | None, History]:
        first = await start(agent, report_and_sleep)
        await follow(agent, until="report")
        with monkeypatch.context() as disk:
            disk.setattr(OutputFile, "read", fail)
            end = (await follow(agent)).end
        assert await agent.handle(IsOpen())
        first_is_alive = alive(first)
        await start(agent, lambda: None)
        return first_is_alive, end, await follow(agent)

    first_is_alive, end, second = node.run(lose_the_disk())
    assert not first_is_alive
    assert end is not None
    assert end.error is not None
    assert (end.code, end.step, end.stop_requested, end.error.type) == (1, 1, False, "OSError")
    assert "its agent can't read its messages: [Errno 5]" in end.error.message
    assert end.error.traceback.startswith("Traceback")
    assert second.end is not None
    assert (second.end.code, second.end.error) == (0, None)


def report_and_sleep() -> None:
    import raydist

    raydist.report(step=1)
    time.sleep(300)


def test_a_start_ends_a_process_whose_agent_was_taken_for_lost(
    node: Node, agent: RankAgent
) -> None:
    """The driver stopped no lost rank: two processes shared a GPU, and the first one's end was told
    as the second's."""

    async def start_twice() -> tuple[bool, int, History]:
        first = await start(agent, report_and_sleep)
        await follow(agent, until="report")
        second = await start(agent, lambda: time.sleep(0.2))
        return alive(first), second, await follow(agent)

    first_is_alive, second, history = node.run(start_twice())
    assert not first_is_alive
    assert [event["pid"] for event in history.events if event["kind"] == "joined"] == [second]
    assert history.end is not None
    assert (history.end.code, history.end.signal, history.end.stop_requested) == (0, 0, False)


def test_a_rank_that_is_stopped_while_it_is_forked_ends(node: Node, agent: RankAgent) -> None:
    """It ran, and its healthy node was replaced."""

    async def stop_at_once() -> bool:
        await keep_call(agent, lambda: time.sleep(300))
        starting = asyncio.create_task(agent.handle(start_request(0)))
        await asyncio.sleep(0)
        await agent.handle(StopRank(0.0))
        await starting
        return await agent.handle(IsOpen())  # type: ignore[no-any-return]

    assert node.run(stop_at_once())


def test_of_two_starts_at_a_time_the_second_one_remains(node: Node, agent: RankAgent) -> None:
    """Two processes shared the memory, the log and the GPU."""

    async def start_twice() -> tuple[bool, bool]:
        await keep_call(agent, lambda: time.sleep(300))
        requests = [agent.handle(start_request(0)) for _ in range(2)]
        first, second = await asyncio.gather(*requests)
        found = alive(first.pid), alive(second.pid)
        await agent.handle(StopRank(0.0))
        return found

    assert node.run(start_twice()) == (False, True)


def test_a_rank_starts_while_a_writer_waits_for_the_disk(
    node: Node, agent: RankAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart ended the run if another node than that of rank 0 was slow to write its shards."""
    disk: list[int] = []
    specs: list[RankSpec] = []
    send = ForkClient.send

    def hold_writers(
        self: ForkClient, message: Any, descriptors: Sequence[int] = (), *rest: Any
    ) -> None:
        if isinstance(message, WriteShards | WriteCheckpoint):
            disk.append(os.dup(descriptors[0]))
            return
        if isinstance(message, RankSpec):
            specs.append(message)
        send(self, message, descriptors, *rest)

    async def restart(request: Request[Any]) -> tuple[bool, bool]:
        """Start a rank while this is written; return whether that and the state's lock remain."""
        writing = asyncio.create_task(agent.handle(request))
        await asyncio.sleep(0)
        await start(agent, lambda: None)
        unwritten = not writing.done()
        os.close(disk.pop())
        await asyncio.wait({writing})
        return unwritten, specs[-1].saving

    node.run(start(agent, lambda: None))
    node.run(follow(agent))
    monkeypatch.setattr(ForkClient, "send", hold_writers)
    # the driver decides about a lock that spans several nodes: here it has given it up
    assert node.run(restart(WriteShards(7, "mark", 1, (0,), "/nowhere"))) == (True, False)
    assert node.run(restart(Flush())) == (True, True)


@pytest.mark.parametrize("kept", [False, True])
def test_an_agent_says_whether_its_node_had_a_state(
    node: Node, tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver took the empty reply of a node that had just joined for a state on the disk, and
    so it did if the writer was killed."""

    def keep() -> None:
        import torch

        from raydist.state.snapshot import SnapshotBuffer
        from raydist.worker import context

        memory = context.current().memory
        assert memory is not None
        state = SnapshotBuffer(memory[0])
        folder = str(tmp_path / "checkpoints")
        state.fill_request(LAST_SLOT, SaveRequest(0, {}, {}, 1, folder, str(tmp_path), 3, None))
        own = {"random": torch.zeros(1, dtype=torch.uint8), "loss": 0.5, "world_size": 1}
        state.write(5, {"own": own, "model": torch.ones(2)})

    agent = node.agent()
    node.run(start(agent, keep if kept else lambda: None))
    node.run(follow(agent))
    for on_disk in (False, True):
        flushed = node.run(agent.handle(Flush()))
        assert flushed.had_state == kept
        saved = [event for event in flushed.events if event["kind"] == "saved"]
        assert len(saved) == (kept and not on_disk)
        assert (tmp_path / "checkpoints" / "step-00000005").exists() == kept
    with monkeypatch.context() as killed:
        killed.setattr(ForkClient, "send", lose_a_writer)
        with pytest.raises(OSError, match="was killed") if kept else contextlib.nullcontext():
            node.run(agent.handle(Flush()))
    node.run(agent.handle(Close()))


send = ForkClient.send


def lose_a_writer(
    server: ForkClient, message: ServerMessage, descriptors: Sequence[int] = (), number: int = 0
) -> None:
    """Send a message; a writer is killed before it sends anything."""
    if not isinstance(message, WriteCheckpoint):
        send(server, message, descriptors, number)


def test_what_still_waits_for_an_attempt_gets_nothing_of_the_next_one(
    node: Node, agent: RankAgent
) -> None:
    """The end of a rank that was taken for lost had the heartbeat of the next process: step 0."""

    def hold_the_channel() -> None:
        import raydist

        child = os.fork()
        if not child:
            os.setsid()
            time.sleep(300)
            os._exit(0)
        while os.getsid(child) != child:  # in the session of the rank it would end with it
            time.sleep(0.01)
        raydist.report(step=1, child=child)
        time.sleep(300)

    async def start_twice() -> tuple[int, RankNews, int, History]:
        await start(agent, hold_the_channel)
        report = (await follow(agent, until="report")).events[-1]
        waiting = asyncio.create_task(agent.handle(GetNews(TIMEOUT_S)))
        await asyncio.sleep(0)
        second = await start(agent, lambda: None)
        return int(report["values"]["child"]), await waiting, second, await follow(agent)

    child, news, second, history = node.run(start_twice())
    os.kill(child, signal.SIGKILL)
    assert news.end is not None
    assert (news.end.signal, news.end.step, news.events) == (signal.SIGKILL, 1, [])
    assert [event["pid"] for event in history.events if event["kind"] == "joined"] == [second]
    assert history.end is not None
    assert (history.end.code, history.end.signal) == (0, 0)


def test_an_agent_whose_process_cannot_be_killed_is_not_open(
    node: Node, agent: RankAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a dead disk: SIGKILL has no effect."""
    pid = node.run(start(agent, report_and_sleep))
    node.run(follow(agent, until="report"))
    with monkeypatch.context() as kernel:
        kernel.setattr("raydist.node.rank_process.STOP_S", 0.2)
        kernel.setattr("raydist.node.rank_process.DYING_S", 0.2)
        send = ForkClient.send

        def send_no_signal(self: ForkClient, message: Any, *rest: Any) -> None:
            if not isinstance(message, SignalProcess):
                send(self, message, *rest)

        kernel.setattr(ForkClient, "send", send_no_signal)
        kernel.setattr(ForkClient, "quiet", lambda self, after=0.0: 0.0)  # its server answers
        with pytest.raises(LaunchError, match=rf"process {pid} .* did not end after SIGKILL"):
            node.run(start(agent, lambda: None))
        assert not node.run(agent.handle(IsOpen()))
    node.run(agent.handle(StopRank(0.0)))
    assert node.run(agent.handle(IsOpen()))


@pytest.fixture
def earlier() -> Iterator[subprocess.Popen[bytes]]:
    """A process that an agent has left which is gone."""
    process = subprocess.Popen(["sleep", "300"])
    yield process
    process.kill()
    process.wait()


def start_after(node: Node, agent: RankAgent, *left: ProcessId) -> int:
    """Start a rank once these processes have ended; its pid."""

    async def go() -> ProcessId:
        await agent.handle(KeepCall(cloudpickle.dumps((os.getpid, (), {}))))
        return await agent.handle(  # type: ignore[no-any-return]
            replace(start_request(0), after=left)
        )

    return node.run(go()).pid


def test_a_rank_starts_once_that_of_a_lost_agent_has_ended(
    node: Node, agent: RankAgent, earlier: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes shared a GPU: the old one takes seconds to release its memory."""

    def kill_late(pid: int, number: int) -> bool:
        threading.Timer(0.5, os.kill, (pid, number)).start()
        return True

    monkeypatch.setattr(processes, "kill", kill_late)
    start_after(node, agent, processes.identify(earlier.pid))
    assert earlier.poll() == -signal.SIGKILL


def test_a_rank_of_a_lost_agent_that_cannot_be_killed_is_an_error(
    node: Node, agent: RankAgent, earlier: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "kill", lambda pid, number: True)
    monkeypatch.setattr("raydist.node.rank_process.DYING_S", 0.2)
    with pytest.raises(LaunchError, match=rf"process {earlier.pid} .* did not end after SIGKILL"):
        start_after(node, agent, processes.identify(earlier.pid))


def test_another_process_with_the_pid_of_a_rank_is_left_alone(
    node: Node, agent: RankAgent, earlier: subprocess.Popen[bytes]
) -> None:
    start_after(node, agent, ProcessId(earlier.pid, 1), ProcessId(earlier.pid, 0))
    assert earlier.poll() is None


# Stores, closing, lost and stopped fork servers


def test_a_store_replaces_the_one_before(node: Node) -> None:
    first = node.run(node.lead.handle(OpenStore("tcp", "127.0.0.1")))
    second = node.run(node.lead.handle(OpenStore("tcp", "127.0.0.1")))
    socket.create_connection(("127.0.0.1", second.port)).close()

    def refused() -> bool:
        try:
            socket.create_connection(("127.0.0.1", first.port)).close()
        except ConnectionRefusedError:
            return True
        return False

    wait_until(refused, "the first store has stopped listening")


def test_an_agent_that_closes_ends_its_rank_and_another_takes_its_place(node: Node) -> None:
    first = RankAgent()
    assert not node.run(first.handle(IsOpen()))
    node.run(first.handle(open_request(node.run_name, lead=False)))
    pid = node.run(start(first, lambda: time.sleep(300)))
    node.run(follow(first, until="joined"))
    node.run(first.handle(Close()))
    assert not alive(pid)
    assert not node.run(first.handle(IsOpen()))
    second = node.agent()
    node.run(start(second, lambda: None))
    end = node.run(follow(second)).end
    assert end is not None
    assert end.code == 0
    node.run(second.handle(Close()))


def test_an_unknown_request_is_refused(node: Node, agent: RankAgent) -> None:
    with pytest.raises(TypeError):
        node.run(agent.handle(Request[None]()))


def test_the_children_of_a_rank_that_has_died_end_before_the_next_one_starts(
    node: Node, agent: RankAgent
) -> None:
    """That of a wrapper script kept the GPU if the fork server had died, too."""
    script = "sleep 300 >/dev/null 2>&1 & echo $!; read -r _"
    with subprocess.Popen(["sh", "-c", script], stdin=-1, stdout=-1, start_new_session=True) as sh:
        assert sh.stdin is not None
        assert sh.stdout is not None
        child, rank = int(sh.stdout.readline()), processes.identify(sh.pid)
        sh.communicate(b"end\n")
    assert alive(child)
    start_after(node, agent, rank)
    assert ended(child)


def test_a_program_is_lost_with_its_fork_server(tmp_path: Path) -> None:
    """And so is the child of a wrapper script: it kept the GPU."""
    child = tmp_path / "child"
    wrapper = program_request("sh", "-c", f"sleep 300 & echo $! >{child}; wait")

    async def lose() -> tuple[int, RankEnd | None, bool]:
        agent = RankAgent()
        await agent.handle(open_request(os.urandom(4).hex()))
        try:
            pid, _ = await agent.handle(wrapper)
            await follow(agent, until="joined")
            await asyncio.to_thread(wait_until, lambda: child.exists() and child.read_text())
            server = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(server, signal.SIGKILL)
            end = (await follow(agent)).end
            return pid, end, await agent.handle(IsOpen())
        finally:
            await agent.close()

    pid, end, is_open = asyncio.run(asyncio.wait_for(lose(), TIMEOUT_S))
    assert end is not None
    assert end.signal == signal.SIGKILL
    assert end.lost != ""
    assert not is_open
    assert ended(pid)
    assert ended(int(child.read_text()))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('["a"]', None),
        ("3", None),
        ('{"message": ["a"]}', None),
        (
            '{"message": {"message": "ValueError: y", "extraInfo": []}}',
            RecordedError("ValueError", "y", ""),
        ),
    ],
)
def test_an_error_file_of_another_form_fails_no_answer(
    tmp_path: Path, text: str, error: RecordedError | None
) -> None:
    """The agent raised as it told of the end, and its rank was lost."""
    (tmp_path / "error.json").write_text(text)
    assert recorded_error(tmp_path / "error.json") == error


def test_a_folder_that_is_too_long_for_a_socket_is_in_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/" + "x" * 100)
    assert node_folder("raydist-1") == Path("/tmp/raydist-1")
    monkeypatch.setattr("tempfile.tempdir", "/short")
    assert node_folder("raydist-1") == Path("/short/raydist-1")


def test_a_fork_server_that_is_stopped_is_told_of_and_ended_when_it_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its rank had finished, or was to be stopped, and its end was not reported for minutes."""
    monkeypatch.setattr("raydist.node.rank_process.SERVER_S", 1.0)
    monkeypatch.setattr("raydist.node.rank_process.STOP_S", 0.5)
    monkeypatch.setattr("raydist.node.fork_client.PING_S", 0.2)
    go = tmp_path / "go"

    async def run(finish: bool) -> tuple[float, RankEnd | None, bool]:
        agent = RankAgent()
        await agent.handle(open_request(os.urandom(4).hex()))
        try:
            await agent.handle(
                program_request("sh", "-c", f"until test -e {go}; do sleep 0.05; done")
            )
            await follow(agent, until="joined")
            os.kill(agent._server.pid, signal.SIGSTOP)
            quiet, until = 0.0, time.monotonic() + 10
            while quiet < 0.5 and time.monotonic() < until:
                quiet = (await agent.handle(GetNews(0.1))).server_quiet
            if finish:
                go.touch()
            else:
                await agent.handle(StopRank(0.0))
            return quiet, (await follow(agent)).end, await agent.handle(IsOpen())
        finally:
            await agent.close()

    for finish in (False, True):
        quiet, end, is_open = asyncio.run(asyncio.wait_for(run(finish), TIMEOUT_S))
        assert quiet >= 0.5
        assert end is not None
        assert (end.signal, bool(end.lost), end.stop_requested) == (
            signal.SIGKILL,
            True,
            not finish,
        )
        assert not is_open  # it is replaced


def test_a_rank_is_stopped_while_its_server_imports_for_another_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The signal waited for the end of the imports: the rank was declared stuck, and with it a
    trial of a sweep ended."""
    gate = tmp_path / "gate"
    (tmp_path / "raydist_gated.py").write_text(GATED.format(str(gate)))
    monkeypatch.syspath_prepend(tmp_path)

    async def run() -> tuple[RankEnd | None, bool, bool, RankEnd | None]:
        agent = RankAgent()
        await agent.handle(open_request(os.urandom(4).hex()))
        try:
            pid, _ = await agent.handle(program_request("sleep", "300"))
            await follow(agent, until="joined")
            other = await asyncio.to_thread(Line, agent.folder)
            other.send(ImportModules(("raydist_gated",)))
            while not agent._server.busy:
                await asyncio.sleep(0.01)
            await agent.handle(StopRank(0.0))
            end, runs, is_open = (await follow(agent)).end, alive(pid), await agent.handle(IsOpen())
            gate.touch()
            await asyncio.to_thread(other.receive, Warm)
            await agent.handle(program_request("true"))
            return end, runs, is_open, (await follow(agent)).end
        finally:
            gate.touch()
            await agent.close()

    end, runs, is_open, second = asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
    assert end is not None
    assert (end.signal, end.stop_requested, end.lost) == (signal.SIGKILL, True, "")
    assert (runs, is_open) == (False, True)
    assert second is not None
    assert (second.code, second.signal) == (0, 0)
