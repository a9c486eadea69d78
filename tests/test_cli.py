"""The command `raydist`: one entry for training and the tools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import raydist
from raydist import cli
from raydist.tools.command_line import run_tool
from tests.conftest import ROOT

SCRIPT = "import sys; from raydist.cli import entry_point; sys.argv[0] = 'raydist'; entry_point()"
"""What pip writes into the file `raydist`, which must not find the folder it is called in by
itself."""


def run_command(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`raydist WORDS` in a folder, as a person types it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_ctrl_c_ends_a_tool_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert run_tool(interrupted) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)], ids=repr)
def test_the_manual_is_one_screen_and_names_every_command(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    result = run_command(*words, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[4 : 4 + len(cli.COMMANDS)]] == [
        command.name for command in cli.COMMANDS
    ]


def test_the_manual_needs_neither_ray_nor_torch_nor_hydra(tmp_path: Path) -> None:
    code = (
        "import sys; from raydist import cli; sys.argv = ['raydist']; cli.main(); "
        "print('LOADED', *sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"ray", "torch", "hydra", "omegaconf"} & {
        *result.stdout.rpartition("LOADED")[2].split()
    }


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_each_command_shows_its_own_help(command: cli.Command, tmp_path: Path) -> None:
    result = run_command(command.name, "--help", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"raydist {command.name}" in result.stdout


def test_every_tool_is_a_command() -> None:
    tools = {
        path.stem
        for path in (ROOT / "raydist/tools").glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text()
    }
    assert tools == {command.name for command in cli.COMMANDS} - {"train"}


def test_it_is_the_command_that_is_installed() -> None:
    assert 'raydist = "raydist.cli:entry_point"' in (ROOT / "pyproject.toml").read_text()


def test_train_with_and_without_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def job(config): ...\n")
    words = ("job=mine:job", "--cfg", "job")
    named, unnamed = run_command("train", *words, cwd=tmp_path), run_command(*words, cwd=tmp_path)
    assert named.returncode == 0, named.stderr
    assert "target: mine:job" in named.stdout  # the folder it is typed in is searched
    assert named.stdout == unnamed.stdout
    assert run_command("--version", cwd=tmp_path).stdout == f"raydist {raydist.__version__}\n"


def test_a_program_alone_runs(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(
        "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    )
    done = run_command("launch", "--nproc-per-node", "3", "hello.py", cwd=tmp_path, RAY_ADDRESS="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} of 3" in done.stdout for rank in range(3)), done.stdout


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [(("dcotor",), "doctor"), (("trian", "scale=2x8"), "train"), (("train", "scal=2"), "scale=2")],
)
def test_a_mistake_is_refused(words: tuple[str, ...], suggestion: str, tmp_path: Path) -> None:
    done = run_command(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"error: {words[-1] if '=' in words[-1] and words[0] == 'train' else words[0]}: "
    )
    assert f"did you mean {suggestion}" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("raydist do", ["doctor"]),
        ("raydist train scale=", ["scale=cluster", "scale=local"]),
        ("raydist plan model=resnet1", ["model=resnet101", "model=resnet152", "model=resnet18"]),
        ("raydist sweep scale=2x8 optim.l", ["optim.lr="]),
        ("raydist scale=2x8 optim.l", ["optim.lr="]),
    ],
)
def test_the_shell_completes_it(line: str, offered: list[str], tmp_path: Path) -> None:
    done = run_command("-sc", "query=bash", cwd=tmp_path, COMP_LINE=line)
    assert (done.returncode, done.stdout.split()) == (0, offered), done.stderr
