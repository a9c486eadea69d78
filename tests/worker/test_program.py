"""Existing programs: a warm rank must look to them like a process of python or torchrun."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.flow import run_job
from raydist.reporting.result import Result
from raydist.settings import compose
from raydist.shared.errors import RunFailed
from raydist.worker import program
from tests.records import read_events

SCRIPTS = Path(__file__).parents[1] / "scripts"
SLOW_EXIT = """
import atexit, sys, time
import torch, torch.distributed as dist

def leave():
    dist.destroy_process_group()
    time.sleep(20)

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    atexit.register(leave)
    sys.exit(4)
dist.all_reduce(torch.ones(1))
"""
INLINE = ("group=inline", "watch.progress=none", "watch.output=none")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(script: str, *words: str, scale: str = "1x2") -> Result[Any]:
    """Run a program of tests/scripts on ranks without Ray."""
    where = script if not script.endswith(".py") or "/" in script else str(SCRIPTS / script)
    return run_job(
        compose.compose([f"script={where}", f"scale={scale}", *INLINE, *words], claim=True)
    )


def logs(done: Result[Any]) -> list[str]:
    """Return the output of each rank, without the lines of torch 2.8's gloo."""
    files = [done.dir / "logs" / f"rank-{rank}.log" for rank in range(done.world_size)]
    return [
        re.sub(r"^\[Gloo\] .*\n", "", each.read_text(errors="surrogateescape"), flags=re.M)
        for each in files
    ]


def failure(script: str, *words: str, scale: str = "1x2") -> RunFailed:
    with pytest.raises(RunFailed) as caught:
        run(script, *words, scale=scale)
    return caught.value


def test_a_torchrun_program_runs_unchanged() -> None:
    done = run("env_ddp.py", "backend=script", "args=--epochs 3", scale="1x3")
    assert logs(done) == [
        f"rank {rank} local {rank} of 3: same weights True\n" for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("how", "says"), [("raise", "ValueError: the loss"), ("kill", "SIGKILL"), ("5", "code 5")]
)
def test_the_rank_of_a_program_that_fails_is_named(how: str, says: str) -> None:
    failed = failure("env_ddp.py", f"args=--fail {how}", scale="1x3")
    assert failed.result.cause.rank == 1
    assert says in str(failed)
    assert str(Path(raydist.__file__).parent) not in failed.result.cause.traceback


def test_a_rank_that_is_slow_to_exit_is_named_before_those_that_lose_it(tmp_path: Path) -> None:
    (tmp_path / "slow_exit.py").write_text(SLOW_EXIT)
    failed = failure(str(tmp_path / "slow_exit.py"), scale="1x3")
    cause = failed.result.cause
    assert (cause.rank, cause.how, cause.code) == (1, "exited", 4)


def under_python(words: list[str], folder: Path, **env: str) -> dict[str, Any]:
    """Return the facts that a program prints when plain python starts it."""
    facts = folder / "plain"
    env = {**os.environ, "PYTHONPATH": "", **env, "FACTS": str(facts)}
    env.pop("RANK", None)
    subprocess.run(
        [sys.executable, *words], check=True, cwd=folder, env=env, stdin=subprocess.DEVNULL
    )
    return dict(json.loads(facts.read_text()))


@pytest.mark.parametrize(("below", "start"), [("", "spawn"), ("below/", "fork")])
def test_a_file_sees_what_it_sees_under_python(tmp_path: Path, below: str, start: str) -> None:
    (tmp_path / "below").mkdir()
    for name in ("facts.py", "helper_beside.py"):
        (tmp_path / below / name).write_text((SCRIPTS / name).read_text())
    plain = under_python([f"{below}facts.py", "--a b", "-c"], tmp_path)
    run(
        f"./{below}facts.py",
        "args=['--a b',-c]",
        f"env.FACTS={tmp_path}/rank",
        "env.PYTHONPATH=",
        f"start={start}",
    )
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}").read_text()) == plain


def test_a_module_sees_what_it_sees_under_python(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for path in (SCRIPTS / "package").glob("*.py"):
        (tmp_path / "package" / path.name).write_text(path.read_text())
    plain = under_python(["-m", "package", "x"], tmp_path)
    run("-m package", "args=x", f"env.FACTS={tmp_path}/rank")
    assert json.loads((tmp_path / "rank1").read_text()) == plain


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_a_program(method: str) -> None:
    done = run("processes.py", f"args={method}", scale="1x1")
    assert logs(done) == [f"all processes answered {method}\n"]


@pytest.mark.parametrize(
    ("how", "method", "start"),
    [
        ("pool", "forkserver", "fork"),
        ("pool", "spawn", "spawn"),
        ("executor", "spawn", "fork"),
        ("loader", "spawn", "fork"),
    ],
)
def test_processes_of_a_program_return_objects_of_its_classes(
    how: str, method: str, start: str
) -> None:
    done = run("own_classes.py", f"args={how} {method}", f"start={start}", scale="1x1")
    assert logs(done) == [f"{how} {method}: 0 1 4 9\n"]


def test_so_they_may_where_the_program_is_a_module(tmp_path: Path) -> None:
    (tmp_path / "own_classes.py").write_text((SCRIPTS / "own_classes.py").read_text())
    assert logs(run("-m own_classes", "args=pool spawn", scale="1x1")) == ["pool spawn: 0 1 4 9\n"]


def test_a_module_is_the_main_one_until_the_process_ends(tmp_path: Path) -> None:
    """Threads and exit functions of a program may pickle objects of its classes."""
    (tmp_path / "late.py").write_text(
        "import atexit, pickle, sys, threading, time\n"
        "class Own: pass\n"
        "def show(who):\n"
        "    print(who, type(pickle.loads(pickle.dumps(Own()))) is Own, sys.argv[0])\n"
        "atexit.register(show, 'exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), show('thread'))).start()\n"
    )
    file = tmp_path / "late.py"
    assert logs(run("-m late", scale="1x1")) == [f"thread True {file}\nexit True {file}\n"]


def test_a_module_that_a_host_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for package, source in (("empty_of_main", ""), ("lacks_one", "import no_such_library")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(source)
    for name in ("no_such.module", "empty_of_main"):
        with pytest.raises(program.ProgramNotFound, match=f"there is no module {name}"):
            program.find_program(name)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        program.find_program("lacks_one")


@pytest.mark.parametrize("how", ["end", "code", "text", "raise", "hook", "terminated"])
def test_all_that_an_interpreter_does_last_is_done_however_it_ends(
    tmp_path: Path, how: str
) -> None:
    words = ("ends.py", f"args={how} {tmp_path}")
    if how == "end":
        run(*words, scale="1x1")
    else:
        failed = failure(*words, scale="1x1")
        says = {
            "code": "exited with code 3",
            "text": "no data under /nowhere",
            "terminated": "exited with code 9",
        }
        assert says.get(how, "RuntimeError: as it is") in str(failed)
    assert (tmp_path / f"{how}-0.unwritten").read_text() == "written at the end"
    assert (tmp_path / f"{how}-0.atexit").exists()
    assert (tmp_path / f"{how}-0.thread").exists()


def test_the_programs_excepthook_is_called(tmp_path: Path) -> None:
    failed = failure("ends.py", f"args=hook {tmp_path}", scale="1x1")
    assert logs(failed.result) == ["my own words for RuntimeError\n"]


def test_a_traceback_has_only_the_programs_frames(tmp_path: Path) -> None:
    failed = failure("ends.py", f"args=raise {tmp_path}", scale="1x1")
    lines = logs(failed.result)[0].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{SCRIPTS}/ends.py", line ')
    assert lines[-1] == "RuntimeError: as it is"
    assert len([line for line in lines if line.startswith("  File")]) == 1


def test_bytes_and_long_lines_arrive_as_they_are() -> None:
    done = run("noise.py", scale="1x1")
    wrote = (done.dir / "logs" / "rank-0.log").read_bytes()
    rest = b"x" * 3_000_000 + b"\nstraight to the descriptor\nfrom a shell\nno end of line"
    assert wrote == bytes(range(256)) + b"\n" + rest


def test_a_programs_signal_handlers_are_called() -> None:
    assert logs(run("signals.py", scale="1x1")) == [
        "heard SIGALRM SIGCHLD SIGTERM SIGUSR1 SIGUSR2\n"
    ]


def test_ranks_draw_random_numbers_as_fresh_interpreters_do() -> None:
    drawn = [
        line.split() for line in logs(run("random_numbers.py")) + logs(run("random_numbers.py"))
    ]
    for column in range(4):
        assert len({line[column] for line in drawn}) == 4


@pytest.mark.parametrize("init_method", ["env", "tcp", "file"])
def test_a_rank_on_the_command_line(init_method: str) -> None:
    args = (
        "--rank {rank} --world-size={world_size} --local_rank {local_rank} --init-method "
        "{init_method}"
    )
    done = run(
        "by_flags.py",
        f"init_method={init_method}",
        f'args={args} --backend {{backend}} --hparams \'{{"a":{{"b":1}}}}\'',
    )
    store = "FileStore" if init_method == "file" else "TCPStore"
    assert logs(done) == [
        f"{store} {init_method} gloo {rank} 1.0 {{'a': {{'b': 1}}}}\n" for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("how", "says"), [("assert", "rank 1 was told"), ("kill", "SIGABRT"), ("exit", "code 9")]
)
def test_a_rank_on_the_command_line_that_fails(how: str, says: str) -> None:
    args = (
        "--rank {rank} --world-size 2 --local_rank 0 --init-method "
        "tcp://{master_addr}:{master_port} --backend gloo"
    )
    failed = failure("by_flags.py", f"args={args} --fail-rank 1 --fail {how}")
    assert failed.result.cause.rank == 1
    assert says in str(failed)


def test_errors_that_record_wrote_are_reported() -> None:
    failed = failure(
        sys.executable, f"args='{SCRIPTS / 'recorded.py'}'"
    )  # a separate process: only the file tells
    cause = failed.result.cause
    assert (cause.rank, cause.how, cause.type, cause.message) == (
        1,
        "raised",
        "KeyError",
        "'no such layer'",
    )
    assert 'raise KeyError("no such layer")' in cause.traceback
    assert "KeyError: 'no such layer'" in str(failure("recorded.py"))


def test_any_command_runs_with_a_ranks_variables_and_reports_its_code() -> None:
    done = run("/bin/sh", "args=-c 'echo $RANK of $WORLD_SIZE on $LOCAL_RANK; echo {rank}'")
    assert logs(done) == ["0 of 2 on 0\n0\n", "1 of 2 on 1\n1\n"]
    failed = failure("/bin/sh", "args=-c 'exit $((RANK * 7))'")
    assert "rank 1" in str(failed)
    assert "exited with code 7" in str(failed)


def test_a_program_that_a_host_lacks(tmp_path: Path) -> None:
    from raydist.settings.config import Job
    from raydist.shared import arguments

    job = compose.compose([f"script={SCRIPTS / 'env_ddp.py'}", "scale=1x2", *INLINE], claim=True)
    assert arguments.seen_from(os.getcwd(), job.script) == job.script
    assert isinstance(job, Job)
    gone = tmp_path / "gone.py"
    gone.write_text("print('never')")
    job = compose.compose([f"script={gone}", "scale=1x2", *INLINE], claim=True)
    assert arguments.seen_from(os.getcwd(), job.script) == "gone.py"
    gone.unlink()
    with pytest.raises(
        RunFailed, match=r"ProgramNotFound: there is no .*gone\.py on .*working_dir=\."
    ):
        run_job(job)


def test_a_command_that_is_not_there_and_one_that_is_none(tmp_path: Path) -> None:
    failed = failure("no-such-command", "name=x")
    assert "there is no program no-such-command on" in str(failed)
    cause = failed.result.cause
    assert (cause.type, cause.code or 127) == (
        "ProgramNotFound",
        127,
    )  # 0: it was ended while it exited
    (tmp_path / "text").write_text("not a program")
    assert "is not executable: chmod +x ./text" in str(failure("./text"))


@pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed")
def test_a_horovodrun_program_runs_unchanged() -> None:
    done = run("horovod_mnist.py", "backend=horovod", "args=--epochs 2", scale="1x3")
    assert [line.split("\n")[-2] for line in logs(done)] == [
        f"rank {i} of 3, local {i}: same True" for i in range(3)
    ]


@pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed")
@pytest.mark.parametrize(
    ("how", "says"), [("raise", "a digit too many"), ("kill", "SIGSEGV"), ("exit", "code 4")]
)
def test_the_failed_rank_of_horovod_is_named(how: str, says: str) -> None:
    failed = failure("horovod_mnist.py", "backend=horovod", f"args=--fail {how}", scale="1x3")
    assert failed.result.cause.rank == 1
    assert says in str(failed)


def test_reports_of_a_script_are_received() -> None:
    script = Path("reports.py")
    script.write_text(
        "import raydist\nfor step in range(1, 4):\n    raydist.report(step=step, loss=1 / step)\n"
    )
    assert run(f"./{script}").metrics == {"loss": 1 / 3}


def test_a_command_has_the_signals_that_a_shell_gives_it(tmp_path: Path) -> None:
    """Python ignores SIGPIPE and SIGXFSZ, and a program that is exec'ed inherits that."""
    ask = ["sh", "-c", "grep SigIgn /proc/self/status"]

    def ignored(text: str) -> int:
        # glibc's posix_spawn, which subprocess uses from Python 3.13 on, ignores its own 32 and 33
        return int(text.split()[-1], 16) & (1 << 31) - 1

    def output(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    direct = ignored(output(*ask))
    code = f"from raydist.worker import program; program.execute({ask})"
    assert ignored(output(sys.executable, "-c", code)) == direct
    (log := tmp_path / "log").touch()
    spec = f"ProgramSpec({tuple(ask)}, dict(os.environ), '/')"
    code = (
        "import os; from raydist.worker import main; from raydist.messages.server import "
        "ProgramSpec;"
        f"os.fork() or main.run_program({spec}, os.open({str(log)!r}, os.O_WRONLY)); os.wait()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert ignored(log.read_text()) == direct


@pytest.mark.parametrize("words", ["script=src/train.py", "script=-m train", "job=src/train.py"])
def test_a_module_wins_over_the_installed_package_of_its_name(words: str, tmp_path: Path) -> None:
    """The fork server had imported the package, as for an earlier program."""
    (tmp_path / "flask_user.py").write_text("import flask\nprint(flask.__file__)\n")
    assert "site-packages" in logs(run("./flask_user.py"))[0]
    (tmp_path / "src").mkdir()
    (tmp_path / "src/flask.py").write_text("WHERE = 'own'\n")
    (tmp_path / "src/train.py").write_text(
        "import flask\n\ndef job():\n    print(flask.WHERE)\n\n"
        "if __name__ == '__main__':\n    job()\n"
    )
    if "-m" in words:
        os.chdir(tmp_path / "src")
    done = run_job(compose.compose([words, "scale=1x2", *INLINE], claim=True))
    assert logs(done) == ["own\n"] * 2


def test_a_variable_that_a_program_sets_before_its_imports_is_read_by_them(tmp_path: Path) -> None:
    set_it = "import os\nos.environ['HF_HOME'] = '/data/hf'\n"
    (tmp_path / "own.py").write_text(
        f"{set_it}from huggingface_hub import constants\nprint(constants.HF_HOME)\n"
    )
    done = run("./own.py")
    assert logs(done) == ["/data/hf\n"] * 2
    (warning,) = (each["text"] for each in read_events(done.dir / "events.jsonl", "warning"))
    assert warning.startswith("own.py sets HF_HOME before it imports a package")


def test_files_that_a_program_leaves_open_are_whole_and_its_output_may_be_closed(
    tmp_path: Path,
) -> None:
    (tmp_path / "leaves.py").write_text(
        "import gzip, os, sys, zipfile\n"
        "packed = gzip.open(f'{os.environ[\"RANK\"]}.gz', 'wt')\n"
        "packed.write('text')\n"
        "archive = zipfile.ZipFile(f'{os.environ[\"RANK\"]}.zip', 'w')\n"
        "archive.writestr('name', 'text')\n"
        "sys.stdout.close()\n"
        "other = open(f'{os.environ[\"RANK\"]}.txt', 'w')\n"
        "os.system('echo from a child')\n"
    )
    assert logs(run("./leaves.py")) == ["from a child\n"] * 2
    for rank in range(2):
        assert gzip.decompress((tmp_path / f"{rank}.gz").read_bytes()) == b"text"
        assert zipfile.ZipFile(tmp_path / f"{rank}.zip").read("name") == b"text"
        assert (tmp_path / f"{rank}.txt").read_text() == ""


def test_a_python_below_a_shell_script_does_not_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output appeared only at its end, and a killed one lost it."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import os; print(1); os._exit(0)'\n")
    script.chmod(0o755)
    assert logs(run("./run.sh")) == ["1\n"] * 2
