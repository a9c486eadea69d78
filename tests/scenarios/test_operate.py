"""Commands about a run, as a person types them beside an unmodified program whose ranks are odd: one
in a collective, one in a Python loop, one in C code that holds the GIL, one stopped by a signal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from raydist.watch.operate.connection import read_address
from tests.conftest import ROOT
from tests.leftovers import ended
from tests.programs import Program
from tests.rig import requires_root
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
ODD = """
    import ctypes, os, signal, time
    import torch
    import torch.distributed as dist

    def wait_for_all():
        dist.all_reduce(torch.ones(3))

    def loop():
        while True:
            time.sleep(0.001)  # without it a CPU would have nothing else to do

    def hold_the_gil():
        mutex = ctypes.create_string_buffer(64)
        lock = ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex)
        lock(mutex)  # for ever: a signal would end sleep(3), and the rank would answer in between

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    wait_for_all()
    print("rank", rank, "has met the others", flush=True)
    if rank == 0:
        wait_for_all()
    if rank == 1:
        loop()
    if rank == 2:
        hold_the_gil()
    os.kill(os.getpid(), signal.SIGSTOP)
"""
SLEEPS = "time.sleep(0.001)  # without it a CPU would have nothing else to do"
HOLDS = "lock(mutex)  # for ever: a signal would end sleep(3), and the rank would answer in between"

FIT = """
    import time
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import raydist

    class Slow(nn.Module):
        def forward(self, x):
            time.sleep(0.02)
            return x

    def job(config):
        model = nn.Sequential(nn.Linear(4, 4), Slow(), nn.Linear(4, 2))
        data = TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
        return raydist.fit(config, model=model, train=data, loss=nn.functional.cross_entropy)
"""


def operate(folder: Path, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Type `raydist WORDS` in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "raydist.cli", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def refusal(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> str:
    """What `raydist COMMAND WORDS` says that refuses its words: one line. In this process."""
    capsys.readouterr()
    assert import_module(f"raydist.tools.{command}").main(words) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert len(error.splitlines()) == 1
    return str(error)


def rows(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What `raydist ranks --json` prints; empty while no rank runs."""
    done = operate(folder, "ranks", "--json", *words)
    return [json.loads(line) for line in done.stdout.splitlines()]


def written(file: Path) -> bool:
    """Whether a file has a whole line."""
    return file.exists() and file.read_text().endswith("\n")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A program of four ranks, each of which has come to where it stays."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd.py").write_text(textwrap.dedent(ODD))
    words = ("script=odd.py", "scale=1x4", "hang.end=false", "group=inline")
    program = Program(folder, *words, alone=True)
    program.wait_until(lambda: program.screen.count("has met the others") == 4, "the ranks")

    def stopped() -> bool:
        return any(row["state"].startswith("stopped") for row in rows(folder)[3:])

    program.wait_until(stopped, "the stopped rank")
    yield program
    program.process.kill()
    program.process.wait()
    assert program.leftovers() == []


def test_ranks_says_where_each_rank_is_and_what_it_does(odd: Program) -> None:
    found = rows(odd.folder)
    began = {each["rank"]: each["pid"] for each in odd.events("began")}
    assert {row["rank"]: row["pid"] for row in found} == began
    assert [row["host"] for row in found] == [socket.gethostname()] * 4
    assert [row["state"] for row in found][:3] == ["runs"] * 3
    assert "SIGSTOP" in found[3]["state"]
    table = operate(odd.folder, "ranks", str(odd.run_dir)).stdout
    assert [line.split()[:3] for line in table.splitlines()[1:]] == [
        [str(row["rank"]), row["host"], str(row["pid"])] for row in found
    ]


def test_stacks_says_where_each_odd_rank_is_and_how_it_knows(odd: Program) -> None:
    groups: dict[str, list[str]] = {}

    def answered() -> bool:
        """Ask again where a rank that lacked the CPU has not answered by its thread in time."""
        done = operate(odd.folder, "stacks")
        assert done.returncode == 0, done.stderr
        groups.clear()
        for lines in map(str.splitlines, re.split(r"\n(?=ranks? |all )", done.stdout)):
            groups[lines[0].partition(":")[0]] = lines
        by_thread = ("rank 0", "rank 1")
        return all("by a thread" in "\n".join(groups.get(rank, [])) for rank in by_thread)

    wait_until(answered, lambda: str(groups))
    assert groups.keys() == {"rank 0", "rank 1", "rank 2", "rank 3", "all threads"}
    assert next(iter(groups)) == "rank 3"  # the one that is stopped
    pid = odd.events("began")[3]["pid"]
    assert f"kill -CONT {pid}" in groups["rank 3"][0]
    line = {text.strip(): n for n, text in enumerate(textwrap.dedent(ODD).splitlines(), 1)}
    assert (
        groups["rank 0"][0]
        == f"rank 0: all_reduce at odd.py:{line['dist.all_reduce(torch.ones(3))']}"
    )
    assert groups["rank 1"][0].endswith((f"odd.py:{line[SLEEPS]}", f":{line['while True:']}"))
    assert groups["rank 2"][0].endswith(f"odd.py:{line[HOLDS]}")
    said = {rank: "\n".join(lines) for rank, lines in groups.items()}
    assert "by a thread" in said["rank 0"]
    assert "by a thread" in said["rank 1"]
    assert "by a signal's handler" in said["rank 2"]
    assert "stack written" not in said["rank 3"]
    assert "waits in all_reduce of [[3]]" in said["rank 0"]
    *_, event = odd.events("operated")
    assert event["command"] == "stacks"
    whole = (odd.run_dir / event["file"]).read_text()
    assert "in hold_the_gil" in whole
    assert "in loop" in whole


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_native_stacks_have_the_frames_of_c_code(odd: Program) -> None:
    done = operate(odd.folder, "stacks", "rank=2", "--native")
    assert done.returncode == 0, done.stderr
    assert "hold_the_gil (odd.py:" in done.stdout
    assert re.search(r"nanosleep|sleep \(", done.stdout), done.stdout


def test_ranks_that_the_run_does_not_have_are_refused(
    odd: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(odd.folder)
    for word, instead in {"rank=4": "rank=3", "rank=x": "rank=3", "rnk=3": "rank=3"}.items():
        error = refusal(capsys, "stacks", word)
        assert error.startswith(f"error: {word}: ")
        assert instead in error


def test_exec_runs_where_the_rank_runs_and_ends_as_the_command(odd: Program) -> None:
    """Beside ranks that are in a collective, in C code, and stopped."""
    code = "import os, sys; print(os.environ['RANK'], os.getcwd()); print('e', file=sys.stderr)"
    done = operate(odd.folder, "exec", "rank=2", "--", sys.executable, "-c", f"{code}; exit(7)")
    assert (done.returncode, done.stdout) == (7, f"2 {odd.folder}\n"), done.stderr
    assert done.stderr == "e\n"
    every = operate(odd.folder, "exec", "--all", "--", "sh", "-c", "echo one; printf two-$RANK")
    assert every.returncode == 0, every.stderr
    assert sorted(every.stdout.splitlines()) == sorted(
        line for rank in range(4) for line in (f"[{rank}] one", f"[{rank}] two-{rank}")
    )
    absent = operate(odd.folder, "exec", "rank=0", "--", "no-such-program")
    assert absent.returncode == 127
    assert "no-such-program" in absent.stderr
    text = (odd.run_dir / "events.jsonl").read_text()
    assert "no-such-program on rank 0, exit code 127" in text
    assert "two-" not in text  # neither arguments nor output


def test_exec_passes_bytes_ctrl_c_and_its_own_end_on(odd: Program, tmp_path: Path) -> None:
    sent = "import os; os.write(1, bytes(range(256)) * 20000)"
    command = [sys.executable, "-m", "raydist.cli", "exec", "rank=0", "--"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    got = subprocess.run(
        [*command, sys.executable, "-c", sent], cwd=odd.folder, env=env, capture_output=True
    )
    assert got.stdout == bytes(range(256)) * 20000
    for number, code in ((signal.SIGINT, 128 + signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)):
        file = tmp_path / f"pid-{number}"
        script = f"echo $$ > {file}; exec sleep 3600"
        running = subprocess.Popen([*command, "sh", "-c", script], cwd=odd.folder, env=env)
        wait_until(partial(written, file), "its pid")
        running.send_signal(number)
        assert running.wait(120) == code
        assert ended(int(file.read_text()))


def test_exec_refuses_what_it_can_not_run(
    odd: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(odd.folder)
    wrong = {"exec": "rank=0 --", "exec rank=0": "after --", "exec -- ls": "rank=0, or --all"}
    for words, instead in wrong.items():
        assert instead in refusal(capsys, *words.split())


@pytest.mark.root
@requires_root
def test_another_user_gets_nothing(odd: Program) -> None:
    address = read_address(odd.run_dir)
    assert address is not None
    code = f"""
import os, socket
os.setgid(65534)
os.setuid({{uid}})
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0{address.socket}")
try:
    sock.sendall(b'{{{{"protocol": "ListRanks"}}}}\\n')
    answer = sock.recv(1 << 16)
except OSError:
    answer = b""
print(len(answer))
"""
    said = {
        uid: int(subprocess.check_output([sys.executable, "-c", code.format(uid=uid)], text=True))
        for uid in (0, 65534)
    }
    assert said[0] > 0
    assert said[65534] == 0


def test_what_does_not_run_is_refused(
    odd: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no such folder" in refusal(capsys, "ranks", "runs/nothing")
    refusal(capsys, "ranks")
    monkeypatch.chdir(odd.folder)
    assert "did you mean --json" in refusal(capsys, "ranks", "--jsn")
    refusal(capsys, "ranks", "newest", "newest")


def test_save_and_stop(tmp_path: Path) -> None:
    """Two checkpoints that nobody had planned, the training goes on, and a stop keeps the last
    state."""
    (tmp_path / "fits.py").write_text(textwrap.dedent(FIT))
    words = ("job=fits.py", "scale=1x2", "group=inline", "data.batch_size=4", "snapshot.every=1")
    endless = ("train.epochs=1000000", "checkpoint.every=1000000000")
    program = Program(tmp_path, *words, *endless)
    program.wait_for_step(2)
    steps = []
    for _ in range(2):
        done = operate(tmp_path, "save")
        assert done.returncode == 0, done.stderr
        step, path = re.fullmatch(r"saved step (\d+): (\S+) \(.*\)", done.stdout.strip()).groups()  # type: ignore[union-attr]
        assert (Path(path) / "meta.json").exists()
        assert Path(path).name == f"step-{int(step):08d}"
        steps.append(int(step))
        program.wait_for_step(int(step) + 2)
    assert steps == sorted(set(steps))
    assert [each["step"] for each in program.events("saved")] == steps
    assert [each["command"] for each in program.events("operated")] == ["save"] * 2
    reached = program.events("report")[-1]["step"]
    stopped = operate(tmp_path, "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert program.wait() == 128 + signal.SIGTERM
    assert program.events("saved")[-1]["step"] >= reached
    assert not (program.run_dir / "driver.json").exists()


def test_stop_now_ends_ranks_that_ignore_sigterm_and_who_follows_them(tmp_path: Path) -> None:
    """Before that: what `raydist set` refuses, before and after it has found a run."""
    code = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("here", flush=True)
        while True:
            time.sleep(1)
    """
    (tmp_path / "stays.py").write_text(textwrap.dedent(code))
    program = Program(tmp_path, "script=stays.py", "scale=1x2", "group=inline")
    program.wait_until(lambda: program.screen.count("here") == 2, "the ranks")
    followed = tmp_path / "followed.txt"
    with followed.open("w") as screen:
        following = subprocess.Popen(
            [sys.executable, "-m", "raydist.cli", "ranks", "--follow"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=screen,
            stderr=screen,
        )
    wrong = operate(tmp_path, "set", "optim.momentum=0.9")
    outside = operate(tmp_path, "set", "optim.lr=0.1")
    for done in (wrong, outside):
        assert (done.returncode, done.stdout) == (2, "")
    assert "checkpoint.every, optim.lr, train.clip, train.evaluate_steps" in wrong.stderr
    assert "the program is not in raydist.fit" in outside.stderr
    program.wait_until(lambda: followed.read_text().count("own work") >= 2, "two tables")
    done = operate(tmp_path, "stop", "--now")
    assert done.returncode == 0, done.stderr
    assert program.wait() in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    assert following.wait(120) == 0, followed.read_text()
    assert program.leftovers() == []


def test_a_program_that_saves_by_itself_is_not_saved(odd: Program) -> None:
    done = operate(odd.folder, "save")
    assert done.returncode == 1  # two of its ranks can't answer
    assert "ranks 2-3 do not answer" in done.stderr


HELD = """
    import time
    import torch
    import torch.distributed as dist
    import raydist

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def work(step):
        scale = step * 2
        if rank == 1 and step == 5:
            breakpoint()
        return scale

    for step in range(1000000):
        work(step)
        dist.all_reduce(torch.ones(1))
        raydist.report(step=step)
        time.sleep(0.01)
"""


def debug(folder: Path, typed: str, *words: str) -> str:
    """What `raydist debug` shows a person who types these lines; the rank goes on afterwards."""
    done = subprocess.run(
        [sys.executable, "-m", "raydist.cli", "debug", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=typed,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("the rank continues\n")
    return done.stdout


def test_breakpoint_waits_for_a_person_and_the_run_goes_on(tmp_path: Path) -> None:
    """The rank is held for longer than a hang lasts until it ends a run: the hang watch rests."""
    code = textwrap.dedent(HELD)
    (tmp_path / "held.py").write_text(code)
    line = code.splitlines().index("        breakpoint()") + 1
    limits = ("hang.after_s=2", "hang.limit_s=10", "restart=none")
    program = Program(tmp_path, "script=held.py", "scale=1x2", "group=inline", *limits)
    program.wait_until(
        lambda: f"rank 1 waits at held.py:{line};" in program.screen, "the breakpoint"
    )
    hangs = program.events("hang")  # on a busy machine ranks may seem to hang before
    (event,) = program.events("held")
    assert (event["rank"], event["line"], event["function"]) == (1, line, "work")
    file = tmp_path / "held.py"
    assert rows(tmp_path)[1]["state"] == f"waits in the debugger at {file}:{line}"
    time.sleep(12)  # beyond hang.limit_s
    said = debug(tmp_path, "p step, scale\nw\nn\np scale + 1\nq\n")
    assert "(5, 10)" in said
    assert "raydist/" not in said  # the stack begins with the program
    assert f"> {file}({line + 1})work()" in said
    assert "(rank 1) 11" in said
    program.wait_for_step(10)

    # Without a breakpoint() in the program, on the other rank: where it is, and in the next step. It
    # may be in Python code of torch, which does not know the name `work`.
    entered = debug(tmp_path, f"b {file}:{line - 2}\nc\np step\nc\np step\n", "rank=0")
    first, second = map(int, re.findall(r"\(rank 0\) (\d+)$", entered, re.MULTILINE))
    assert second == first + 1, entered
    program.wait_for_step(second + 10)
    assert program.events("hang") == hangs
    assert operate(tmp_path, "stop").returncode == 0
    assert program.wait() == 128 + signal.SIGTERM


def test_a_person_who_is_gone_holds_no_rank_and_a_driver_who_is_gone_lists_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "held.py").write_text(textwrap.dedent(HELD).replace("== 5", "== -1"))
    program = Program(tmp_path, "script=held.py", "scale=1x2", "group=inline")
    program.wait_for_step(2)
    none, many = operate(tmp_path, "debug"), operate(tmp_path, "debug", "rank=0,1")
    assert (none.returncode, many.returncode) == (2, 2)
    assert "no rank waits at a breakpoint()" in none.stderr
    for number in (signal.SIGINT, signal.SIGKILL):
        person = subprocess.Popen(
            [sys.executable, "-m", "raydist.cli", "debug", "rank=1"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert person.stdin is not None
        assert person.stdout is not None
        person.stdin.write("p 40 + 2\n")
        person.stdin.flush()
        assert any("42" in line for line in iter(person.stdout.readline, ""))
        person.send_signal(number)
        person.wait(120)
        person.stdin.close()
        person.stdout.close()
        program.wait_for_step(program.events("report")[-1]["step"] + 20)
    program.process.kill()
    program.process.wait()
    done = operate(tmp_path, "ranks", str(program.run_dir))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"pid {program.process.pid}" in done.stderr
    wait_until(lambda: program.leftovers(0) == [], "its processes", 120)


def test_stop_of_a_trial_stops_this_one_only(tmp_path: Path, ray_address: str) -> None:
    code = """
        import time
        from pathlib import Path
        import raydist

        def job(config):
            for step in range(1, 10_000):
                raydist.report(step=step, loss=1.0 / step)
                if config.seed == 1 and Path("go").exists():
                    return
                time.sleep(0.05)
    """
    (tmp_path / "waits.py").write_text(textwrap.dedent(code))
    folder = tmp_path / "many"
    words = ("job=waits.py", "seed=0,1", "scale=1x1", f"hydra.sweep.dir={folder}")
    sweep = Program(tmp_path, *words, address=ray_address, module="raydist.tools.sweep")
    runs = [folder / str(number) for number in range(2)]
    sweep.wait_until(lambda: all(map(has_reported, runs)), "both trials")
    refused = operate(tmp_path, "stop", str(runs[0]), "--now")
    assert (refused.returncode, "omit --now" in refused.stderr) == (2, True), refused.stderr
    stopped = operate(tmp_path, "stop", str(runs[0]))
    assert stopped.returncode == 0, stopped.stderr
    (tmp_path / "go").touch()
    assert sweep.wait() == 0, sweep.screen
    states = [json.loads((run / "trial.json").read_text())["state"] for run in runs]
    assert states == ["stopped", "finished"]


def has_reported(run: Path) -> bool:
    return (run / "events.jsonl").exists() and '"kind": "report"' in (
        run / "events.jsonl"
    ).read_text()
