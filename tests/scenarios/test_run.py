"""raydist.run on real Ray and without it: what a caller gets back."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist import events
from raydist.recovery import deadlines
from raydist.shared.errors import ConfigError, LaunchError, RunFailed
from raydist.worker import context
from tests.leftovers import remaining_placement_groups
from tests.records import read_events
from tests.waiting import wait_until

pytestmark = pytest.mark.ray
QUIET = "watch.progress=none"
GROUPS = [pytest.param("group=ray", id="ray"), pytest.param("group=inline", id="inline")]


@pytest.mark.parametrize("group", GROUPS)
def test_values_come_back_by_rank_and_the_ranks_know_each_other(on_ray: Path, group: str) -> None:
    def job(factor: float, more: int = 0) -> tuple[Any, ...]:
        import torch
        import torch.distributed as dist

        total = torch.ones(1) * factor
        dist.all_reduce(total)
        me = raydist.rank()
        same = me == raydist.rank().from_env(os.environ)
        return me.rank, me.local_rank, me.world_size, total.item() + more, same, dist.get_backend()

    done = raydist.run(job, "scale=1x3", group, QUIET, args=(2.0,), more=1)
    assert done.status == "finished"
    assert done.values == tuple((rank, rank, 3, 7.0, True, "gloo") for rank in range(3))


@pytest.mark.parametrize("group", GROUPS)
def test_a_caller_gets_each_event_and_a_result_to_print_and_a_folder(
    on_ray: Path, group: str
) -> None:
    def job() -> None:
        for step in range(1, 4):
            raydist.report(step=step, steps=3, samples=8, loss=1.5)

    seen: list[events.Event] = []
    done = raydist.run(job, "scale=1x2", "name=mine", group, QUIET, on_event=seen.append)
    written = [*read_events(done.dir / "events.jsonl")]
    shown = [each for each in seen if not isinstance(each, events.Output)]
    assert [each.to_json() for each in shown] == written
    losses = [
        each.values["loss"] for each in seen if isinstance(each, events.Report) and not each.rank
    ]
    assert losses == [1.5] * 3
    lines = str(done).splitlines()
    assert lines[0] == f"finished in {done.wall_s:.1f} s"
    assert lines[1].split() == ["loss", "1.5"]
    assert lines[-1].split() == ["folder", str(done.dir)]
    assert len(lines) < 12
    assert done.dir.parent == on_ray / "runs" / "mine"
    assert [written[0]["kind"], written[-1]["kind"]] == ["run", "result"]
    steps = [e["step"] for e in written if e["kind"] == "report" and e["rank"] == 0]
    assert steps == [1, 2, 3]
    assert {e["rank"] for e in written if e["kind"] == "ended"} == {0, 1}
    phases = [e["name"] for e in written if e["kind"] == "phase"]
    placing = ["connect", "place"] if group == "group=ray" else []
    assert phases == [*placing, "actors", "warm-up", "rendezvous", "first step"]
    assert done.metrics["loss"] == 1.5
    assert (done.dir / "result.json").exists()


def test_a_callback_that_raises_and_a_value_that_can_not_be_sent_are_warnings(
    on_ray: Path,
) -> None:
    def job() -> Any:
        import threading

        return 1 if raydist.rank().rank else threading.Lock()

    def fail(event: events.Event) -> None:
        raise ValueError(f"no {event.kind}")

    done = raydist.run(job, "scale=1x2", QUIET, on_event=fail)
    assert done.values == (None, 1)
    assert [text for text in done.warnings if "ValueError: no run" in text], done.warnings
    assert [text for text in done.warnings if "can't be pickled" in text], done.warnings


@pytest.mark.parametrize("init_method", ["tcp", "file"])
def test_every_init_method_is_really_used(on_ray: Path, init_method: str) -> None:
    def job() -> tuple[str, str]:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        dist.barrier()
        store: Any = _get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return type(store).__name__, os.environ.get("RAYDIST_RENDEZVOUS_FILE", "")

    done = raydist.run(job, "scale=1x2", f"init_method={init_method}", QUIET)
    kind, file = done.values[0] or ("", "")
    assert kind == ("FileStore" if init_method == "file" else "TCPStore")
    assert bool(file) == (init_method == "file")
    assert done.values[0] == done.values[1]


def test_cluster_takes_every_cpu_and_groups_of_some_ranks_work(on_ray: Path) -> None:
    """Every CPU of a cluster without GPUs."""

    def job() -> float:
        import torch
        import torch.distributed as dist

        pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(mine, group=pairs[dist.get_rank() // 2])
        return mine.item()

    assert raydist.run(job, "scale=cluster", QUIET).values == (1.0, 1.0, 5.0, 5.0)


def test_a_module_that_is_a_job_and_its_own_words(
    on_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (on_ray / "my_package.py").write_text(
        "def train(config, hidden=1):\n    return hidden, config.seed\n"
    )
    monkeypatch.syspath_prepend(str(on_ray))
    done = raydist.run("my_package:train", "scale=1x2", "job.args.hidden=5", "seed=3", QUIET)
    assert done.values == ((5, 3), (5, 3))


@pytest.mark.parametrize("group", GROUPS)
def test_ranks_may_be_spawned(on_ray: Path, group: str) -> None:
    """The other tests have the default, fork."""
    done = raydist.run(lambda: os.environ["RANK"], "scale=1x2", group, "start=spawn", QUIET)
    assert done.values == ("0", "1")


def test_a_report_that_json_cannot_hold_is_a_warning_inline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the run; a rank elsewhere only warns."""
    monkeypatch.chdir(tmp_path)

    def job() -> int:
        raydist.report(step=1, confusion={(0, 1): 5})
        raydist.report(step=2, loss=1.0)
        return 7

    done = raydist.run(job, "scale=1x1", "group=inline", QUIET)
    assert done.values == (7,)
    assert [text for text in done.warnings if "the kind report was not sent: keys must" in text]
    assert [each["step"] for each in read_events(done.dir / "events.jsonl", kind="report")] == [2]


def test_one_inline_rank_runs_in_this_very_process(on_ray: Path) -> None:
    before = dict(os.environ)
    done = raydist.run(
        lambda: (os.getpid(), raydist.rank().world_size), "scale=1x1", "group=inline", QUIET
    )
    assert done.values == ((os.getpid(), 1),)
    assert dict(os.environ) == before


def test_one_inline_rank_that_fails_has_a_page_of_its_failure_too(on_ray: Path) -> None:
    def job() -> None:
        raise KeyError("no such sample")

    with pytest.raises(RunFailed) as caught:
        raydist.run(job, "scale=1x1", "group=inline", QUIET)
    page = json.loads((caught.value.result.dir / "blame-1.json").read_text())
    assert (page["cause"]["type"], page["status"]) == ("KeyError", "failed")
    assert caught.value.result.failure == page["text"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (0, ""),
        (None, ""),
        (256, ""),
        (3, "exited with code 3"),
        (-1, "exited with code 255"),
        ("no data", "SystemExit: no data"),
    ],
)
def test_one_inline_rank_that_exits_does_not_end_the_caller(
    code: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        result = raydist.run(lambda: sys.exit(code), "scale=1x1", "group=inline", QUIET)
    except RunFailed as failed:
        result = failed.result
    assert result.status == ("failed" if says else "finished")
    assert says in result.failure
    assert (result.dir / "result.json").exists()


def test_what_ranks_print_is_in_their_own_logs_unmixed(on_ray: Path) -> None:
    def job() -> None:
        sys.stdout.buffer.write(bytes([0, 255, 10]))
        for number in range(2000):
            print("rank", os.environ["RANK"], number)
        print("x" * 3_000_000, file=sys.stderr)
        os.system("echo from a child")

    done = raydist.run(job, "scale=1x2", QUIET)
    for rank in range(2):
        log = (done.dir / "logs" / f"rank-{rank}.log").read_bytes()
        lines = [
            line for line in log.split(b"\n") if not line.startswith(b"[Gloo] ")
        ]  # torch 2.8's own
        assert lines[0] == bytes([0, 255])
        assert lines[1:2001] == [f"rank {rank} {number}".encode() for number in range(2000)]
        assert lines[2001:] == [b"x" * 3_000_000, b"from a child", b""]


def raise_value_error() -> None:
    raise ValueError("bad thing")


ENDS: list[tuple[str, str, Callable[[], Any]]] = [
    ("raised", "ValueError: bad thing", raise_value_error),
    ("exited", "exited with code 3", lambda: sys.exit(3)),
    ("killed", "killed by SIGKILL", lambda: os.kill(os.getpid(), 9)),
    ("exited", "exited with code 7", lambda: os._exit(7)),
    ("killed", "killed by SIGSEGV", lambda: __import__("ctypes").string_at(0)),
]


@pytest.mark.parametrize(
    ("group", "how", "words", "act"),
    [("group=ray", *end) for end in ENDS[:3]] + [("group=inline", *end) for end in ENDS[3:]],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_rank_that_failed_is_named_and_the_others_are_ended(
    on_ray: Path, group: str, how: str, words: str, act: Callable[[], Any]
) -> None:
    def job() -> None:
        import torch
        import torch.distributed as dist

        for step in range(1, 1_000_000):
            dist.all_reduce(torch.ones(1))
            raydist.report(step=step)
            if step == 20 and dist.get_rank() == 1:
                act()

    with pytest.raises(RunFailed) as caught:
        raydist.run(job, "scale=1x3", group, QUIET)
    result = caught.value.result
    cause = result.cause
    assert (cause.rank, cause.how, cause.step) == (1, how, 20)
    assert f"rank 1 on {cause.host}, step 20" in str(caught.value)
    assert words in str(caught.value)
    assert str(result.dir / "logs" / "rank-1.log") in str(caught.value)
    assert {end.rank: end.how for end in result.ends}.keys() == {0, 1, 2}
    assert 1 in caught.value.exceptions


def test_an_error_of_all_ranks_comes_back_as_itself_once_and_nothing_is_left(
    on_ray: Path,
) -> None:
    import ray

    with pytest.raises(RunFailed) as caught:
        raydist.run(raise_value_error, "scale=1x4", QUIET)
    errors = caught.value.exceptions.values()
    assert ValueError in {type(error) for error in errors}
    # One of a rank that was ended before it had written it comes as a RaydistError with its text.
    assert all("bad thing" in str(error) for error in errors)
    told = str(caught.value)
    assert "raise ValueError" in told
    assert "entry.py" not in told
    assert told.count("ValueError: bad thing") <= 2  # the cause, and its traceback's last line
    raydist.run(lambda: None, "scale=1x2", QUIET)  # a good run leaves nothing either
    assert remaining_placement_groups() == []
    wait_until(lambda: ray.available_resources().get("CPU") == 4, "all CPUs are free")


def test_a_rank_that_hangs_in_its_own_clean_up_does_not_hold_the_run(on_ray: Path) -> None:
    def job() -> None:
        import atexit
        import time

        atexit.register(time.sleep, 300)
        raise ValueError("then stuck")

    with pytest.raises(RunFailed, match="then stuck"):
        raydist.run(job, "scale=1x2", QUIET)


def test_what_can_never_fit_is_refused_at_once_with_what_is_there(on_ray: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 CPU"):
        raydist.run(raise_value_error, "scale=1x64", QUIET)


def test_nccl_without_gpus_is_refused_with_the_reason(on_ray: Path) -> None:
    with pytest.raises(ConfigError, match=r"nccl.*GPU"):
        raydist.run(raise_value_error, "backend=nccl", QUIET)


@pytest.mark.parametrize("backend", ["mpi", "ucc"])
def test_a_backend_that_this_torch_lacks_is_refused_with_the_reason(
    on_ray: Path, backend: str
) -> None:
    with pytest.raises(ConfigError, match=rf"backend={backend}: torch .* was built without"):
        raydist.run(raise_value_error, f"backend={backend}", QUIET)


def test_a_job_that_takes_all_waits_for_its_turn_and_gives_up_with_the_reason(on_ray: Path) -> None:
    import ray

    @ray.remote(num_cpus=3)
    class Taker:  # type: ignore[misc,unused-ignore]
        def here(self) -> bool:
            return True

    taker: Any = Taker.remote()  # type: ignore[attr-defined]
    ray.get(taker.here.remote())
    with pytest.raises(LaunchError, match=r"gave up after 2 s.*taken"):
        raydist.run(raise_value_error, "scale=1x2", "scale.wait_s=2", QUIET)
    ray.kill(taker)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's variables")
def test_a_rank_keeps_freed_memory_and_the_store_listens_on_its_address_only(
    on_ray: Path,
) -> None:
    """Three blocks of 20 MB, freed at once, are more than glibc keeps unless it is told to."""

    def job() -> tuple[int, list[str]]:
        import resource

        import psutil

        def step() -> int:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            blocks = [bytearray(20 << 20) for _ in range(3)]
            del blocks
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        port = int(os.environ["MASTER_PORT"])
        listening = [
            each.laddr.ip
            for each in psutil.net_connections()
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port
        ]
        return min([step() for _ in range(5)][2:]), listening

    done = raydist.run(job, "scale=1x2", QUIET)
    assert all(value is not None and value[0] < 1000 for value in done.values)
    (plan,) = read_events(done.dir / "events.jsonl", kind="plan")
    assert done.values[0] is not None
    assert done.values[0][1] == [plan["slots"][0]["ip"]]


def stop_agents() -> None:
    """SIGSTOP for the actor of this node's agents, once it has told the driver that the ranks
    run."""
    sock = context.current().flush.__self__._sock  # type: ignore[attr-defined]
    agent = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    while not any(read_events(raydist.rank().run_dir / "events.jsonl", kind="began")):
        time.sleep(0.1)
    os.kill(agent, signal.SIGSTOP)


def test_ranks_that_finish_beside_a_stopped_actor_have_finished(
    on_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their agents can't tell it. They were run again, because nobody knew."""

    def job() -> int:
        import torch.distributed as dist

        rank = raydist.rank()
        (rank.run_dir / f"ran-{rank.rank}-{os.getpid()}").touch()
        raydist.checkpoint.save(7, {"step": 7}, wait=True)
        dist.barrier()
        if rank.rank == 0:
            stop_agents()
        dist.barrier()
        return rank.rank

    monkeypatch.setattr(deadlines, "AGENT_S", 3.0)
    done = raydist.run(job, "scale=1x2", "hydra.run.dir=run", QUIET)
    assert (done.status, done.values, done.restarts) == ("finished", (0, 1), ())
    assert len([*Path("run").glob("ran-*")]) == 2
    assert [
        each["step"] for each in read_events(Path("run/events.jsonl")) if each["kind"] == "saved"
    ][-1] == 7


@pytest.mark.parametrize("known", [True, False])
def test_a_run_whose_agents_are_all_stopped_ends(
    on_ray: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """It waited ten minutes for them to write the last state. Its fork server does that, once they
    are killed.

    `known`: that state was saved, and the driver knew it: it waited in vain for a newer one, and
    called it lost.
    """

    def job() -> None:
        if raydist.rank().rank == 0 and not known:
            stop_agents()
        raydist.checkpoint.save(7, {"step": 7}, wait=known)
        while known and not any(read_events(raydist.rank().run_dir / "events.jsonl", kind="saved")):
            time.sleep(0.1)
        if raydist.rank().rank == 0 and known:
            stop_agents()
        time.sleep(600)

    monkeypatch.setattr(deadlines, "AGENT_S", 3.0)
    with pytest.raises(RunFailed, match="its agent stopped responding") as caught:
        raydist.run(job, "scale=1x2", "hydra.run.dir=run", QUIET, "restart=none")
    assert [end.how for end in caught.value.result.ends] == ["lost", "lost"]
    assert Path(str(caught.value.result.checkpoint)).name == "step-00000007"
    assert not any("no node could write" in text for text in caught.value.result.warnings)
