"""`raydist horovod`: what it decides, what it says is missing, how builds fail, the real check."""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from raydist.shared.errors import ConfigError, LaunchError
from raydist.tools import horovod, horovod_build
from raydist.tools.horovod import (
    BuildProgress,
    Installed,
    choose_recipe,
    main,
    missing_programs,
    parse_arguments,
)
from raydist.tools.horovod_build import (
    PATCHES,
    Recipe,
    compile_wheel,
    complaint,
    patch,
    unpack_source,
)
from tests.horovod_ranks import requires_horovod

CPU = Installed(torch="2.15.0", cuda="", gpu=False, nccl="")
CUDA = Installed(torch="2.15.0+cu132", cuda="13.2", gpu=True, nccl="")


def toolkit(folder: Path, release: str = "13.0", without: str = "") -> Path:
    """Make a CUDA toolkit, with the files that are read."""
    for name in (
        "bin/nvcc",
        "include/cuda_runtime.h",
        "lib64/libcudart.so.13",
        "include/nccl.h",
        "lib/libnccl.so.2",
    ):
        if name != without:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(
                f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n"
            )
            (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def cuda_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(home))
    return home


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "toolkit", lambda: "")


def test_without_a_gpu_it_is_built_for_cpus_whatever_toolkit_is_there(cuda_home: Path) -> None:
    assert choose_recipe(CPU, cpu=False, cuda=False, mpi=False) == Recipe(torch="2.15.0")
    assert (
        choose_recipe(
            Installed("2.15.0+cu132", "13.2", False, ""), cpu=False, cuda=False, mpi=False
        ).cuda
        == ""
    )


def test_with_a_gpu_and_a_whole_toolkit_nccl_is_in_it(cuda_home: Path) -> None:
    recipe = choose_recipe(CUDA, cpu=False, cuda=False, mpi=False)
    assert (recipe.cuda, recipe.nccl) == (str(cuda_home), str(cuda_home))
    assert recipe.environment()["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert choose_recipe(CUDA, cpu=True, cuda=False, mpi=False).cuda == ""


def test_the_nccl_that_came_with_torch_goes_first(cuda_home: Path, tmp_path: Path) -> None:
    of_torch = toolkit(tmp_path / "nccl")
    facts = Installed("2.15.0+cu132", "13.2", True, str(of_torch))
    assert choose_recipe(facts, cpu=False, cuda=True, mpi=False).nccl == str(of_torch)


@pytest.mark.parametrize(
    "place", ["lib/libnccl.so.2", "lib64/libnccl.so", "lib/x86_64-linux-gnu/libnccl.so.2.30"]
)
def test_nccl_is_linked_under_the_name_that_linkers_want(tmp_path: Path, place: str) -> None:
    library = tmp_path / "root" / place
    library.parent.mkdir(parents=True)
    library.write_text("")
    link = horovod_build.link_nccl(tmp_path / "root", tmp_path / "links") / "libnccl.so"
    assert link.resolve() == library


@pytest.mark.parametrize("without", ["bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so.13"])
def test_an_nvcc_alone_is_no_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    part = toolkit(tmp_path / "part", without=without)
    monkeypatch.setenv("CUDA_HOME", str(part))
    assert horovod.toolkit() != str(part)


@pytest.mark.parametrize(
    ("facts", "release", "says"),
    [
        (CPU, "13.0", r"a torch with CUDA \(this is 2.15.0\)"),
        (CUDA, "12.4", r"a CUDA toolkit 13.2, as torch has \(.* is 12.4\)"),
    ],
)
def test_cuda_that_can_not_be_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: Installed, release: str, says: str
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", release)))
    with pytest.raises(ConfigError, match=f"--cuda needs {says}; --cpu builds for CPUs"):
        choose_recipe(facts, cpu=False, cuda=True, mpi=False)


def test_cuda_without_toolkit_and_nccl_names_both(
    no_toolkit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horovod, "has_nccl", lambda folder: False)
    with pytest.raises(
        ConfigError, match=r"nvcc, cuda_runtime.h and libcudart \(CUDA_HOME .* and NCCL's nccl.h"
    ):
        choose_recipe(CUDA, cpu=False, cuda=True, mpi=False)


def test_a_gpu_that_will_not_be_used_is_mentioned(
    no_toolkit: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose_recipe(CUDA, cpu=False, cuda=False, mpi=False).cuda == ""
    assert "NCCL needs a CUDA toolkit with nvcc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "version"),
    [
        (Recipe(torch="2.15.0"), "0.28.1+raydist{r}.torch2.15.0.cpu"),
        (
            Recipe(torch="2.15.0+cu132", cuda="/usr/local/cuda"),
            "0.28.1+raydist{r}.torch2.15.0.cu132.nccl",
        ),
        (Recipe(torch="2.14.1+cpu", mpi=True), "0.28.1+raydist{r}.torch2.14.1.cpu.cpu.mpi"),
    ],
)
def test_the_version_says_what_it_was_built_against(recipe: Recipe, version: str) -> None:
    from packaging.version import Version

    assert recipe.version == version.format(r=horovod_build.REVISION)
    assert str(Version(recipe.version)) == recipe.version


def test_the_environment_asks_for_gloo_and_torch_and_nothing_else() -> None:
    env = Recipe(torch="2.15.0").environment()
    assert (
        env["HOROVOD_WITH_GLOO"] == env["HOROVOD_WITH_PYTORCH"] == env["HOROVOD_WITHOUT_MPI"] == "1"
    )
    assert not {"HOROVOD_GPU_OPERATIONS", "HOROVOD_WITH_MPI", "CUDA_HOME"} & env.keys()
    assert Recipe(torch="2.15.0", mpi=True).environment()["HOROVOD_WITH_MPI"] == "1"


def test_what_a_machine_lacks_is_told_all_at_once_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert missing_programs(Recipe(torch="2.15.0")) == []
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    lacking = missing_programs(Recipe(torch="2.15.0", mpi=True))
    assert [line.split(" (")[0] for line in lacking] == [
        "it needs a C++20 compiler", "it needs Python's own headers", "it needs mpicxx for --mpi",
    ]  # fmt: skip
    assert "apt-get install libopenmpi-dev" in lacking[-1]


def test_a_build_that_can_not_work_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError, match=r"Horovod can't be built here: it needs a C\+\+20 compiler"
    ):
        horovod.make(Recipe(torch="2.15.0"), tmp_path / "shelf", 1)
    assert not (tmp_path / "shelf").exists()


def test_without_torch_nothing_can_be_built_against(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "FACTS", "import torch_that_is_not_there")
    with pytest.raises(
        ConfigError, match=r"can't import torch.*: ModuleNotFoundError: No module named"
    ):
        horovod.installed_versions()


def test_the_torch_of_this_environment_is_asked() -> None:
    import torch

    assert horovod.installed_versions().torch == torch.__version__


def source(folder: Path) -> Path:
    """Make the parts of Horovod's source that the patches change."""
    for name, old, _ in PATCHES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + f"before\n{old}\nafter\n")
    return folder


def test_every_patch_is_applied(tmp_path: Path) -> None:
    patch(source(tmp_path))
    for name, old, new in PATCHES:
        text = (tmp_path / name).read_text()
        assert new in text
        assert old not in text.replace(new, "")


def test_a_source_that_is_not_the_known_one_is_refused(tmp_path: Path) -> None:
    (source(tmp_path) / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 17)\n")
    with pytest.raises(
        LaunchError, match=r"CMakeLists.txt does not contain 'set\(CMAKE_CXX_STANDARD 14\)'"
    ):
        patch(tmp_path)


def test_an_archive_is_unpacked_by_a_python_without_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tarfile.TarFile.extractall
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda self, path: whole(self, path))
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    (source := tmp_path / "horovod-0.28.1").mkdir()
    (source / "setup.py").write_text("pass")
    with tarfile.open(archive := tmp_path / "horovod.tar.gz", "w:gz") as tar:
        tar.add(source, source.name)
    monkeypatch.setattr(horovod_build, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    assert (unpack_source(archive, tmp_path / "there") / "setup.py").read_text() == "pass"


def test_a_cache_that_can_not_be_written_is_told_with_the_way_out(tmp_path: Path) -> None:
    (file := tmp_path / "cache").write_text("")  # not even root can make a folder in there
    with pytest.raises(
        ConfigError, match=r"cache/shelf can't be written .*; set RAYDIST_CACHE to a folder"
    ):
        horovod.make(Recipe(torch="2.15.0"), file / "shelf", 1)


def test_an_archive_that_is_not_the_known_one_is_not_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("horovod-0.28.1/setup.py"), io.BytesIO(b""))
    with pytest.raises(LaunchError, match=r"is not Horovod 0\.28\.1: its sha256 is"):
        unpack_source(archive, tmp_path)
    assert not (tmp_path / "horovod-0.28.1").exists()


def test_a_build_tells_how_far_it_is_and_keeps_all_that_was_said(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(
        "print('[1/2] Building a.cc'); print('warning: so what'); print('[2/2] Linking')"
    )
    lines: list[str] = []
    compile_wheel(tmp_path, {}, tmp_path / "build.log", lines.append)
    assert [text.split(",")[0] for text in lines] == [
        "compiling 1 of 2 files",
        "compiling 2 of 2 files",
    ]
    assert "warning: so what" in (tmp_path / "build.log").read_text()


def test_a_build_that_fails_says_the_compilers_first_errors_and_where_the_rest_is(
    tmp_path: Path,
) -> None:
    (tmp_path / "setup.py").write_text(
        "import sys\nprint('[1/2] Building'); print('a.cc:3:1: error: no such thing'); "
        "sys.exit('x' * 9)"
    )
    with pytest.raises(
        LaunchError, match=r"(?s)all of it is in .*build.log:\n  a.cc:3:1: error: no such thing"
    ):
        compile_wheel(tmp_path, {}, tmp_path / "build.log", lambda text: None)


def test_a_build_that_fails_without_a_word_of_error_shows_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {number}" for number in range(50)))
    assert complaint(log).splitlines() == [f"  line {number}" for number in range(30, 50)]


def test_pip_says_what_went_wrong(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"pip install .*raydist-no-such-thing.* failed"):
        horovod_build.pip("install", "--no-index", "raydist-no-such-thing")


def test_a_wheel_in_the_cache_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    recipe = Recipe(torch="9.9.9")
    monkeypatch.setenv("RAYDIST_CACHE", str(tmp_path))
    monkeypatch.setattr(horovod, "installed_versions", lambda: Installed("9.9.9", "", False, ""))
    monkeypatch.setattr(horovod_build, "pip", lambda *words, **_: done.append(words))
    monkeypatch.setattr(horovod, "check_command", lambda: "fine")

    def build(recipe: Recipe, folder: Path, jobs: int, tell: Any) -> Path:
        done.append("built")
        (folder / "horovod.whl").write_text("")
        return folder / "horovod.whl"

    monkeypatch.setattr(horovod_build, "build_wheel", build)
    for _ in range(2):
        text = horovod.build_command(parse_arguments(["build"]))
        assert text.startswith(f"Horovod {recipe.version}: fine")
    assert [what if isinstance(what, str) else what[0] for what in done] == [
        "built",
        "install",
        "install",
    ]
    (wheel,) = tmp_path.rglob("*.whl")
    assert recipe.stamp in wheel.parent.name
    assert list(wheel.parent.iterdir()) == [wheel], "the folder of the build is gone"
    horovod.build_command(parse_arguments(["build", "--again"]))
    assert done.count("built") == 2


@requires_horovod
def test_two_real_ranks_add_up() -> None:
    assert horovod.check_command().startswith("two ranks added up 1 + 2 = 3 (gloo")


@requires_horovod
def test_a_horovod_that_does_not_work_says_how_to_mend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "CHECK", "raise ImportError('undefined symbol: _ZN2at4')")
    with pytest.raises(
        LaunchError, match=r"(?s)build it again: .*horovod build --again.*undefined symbol"
    ):
        horovod.check_command()


def test_ranks_that_never_end_are_ended() -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            stdin=subprocess.DEVNULL,
            stdout=-1,
            stderr=-1,
            text=True,
        )
    ]
    with pytest.raises(LaunchError, match="did not end within 0 s"):
        horovod.judge(ranks, patience=0)
    assert ranks[0].wait(10) != 0


def test_without_horovod_the_check_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "installed", lambda: "")
    assert main(["check"]) == 2
    with pytest.raises(ConfigError, match=r"not installed: raydist horovod build"):
        horovod.check_command()


@pytest.mark.parametrize(
    "words", [[], ["biuld"], ["build", "--cpu", "--cuda"], ["build", "--jobs", "many"]]
)
def test_wrong_words_are_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_what_fails_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: argparse.Namespace) -> str:
        raise LaunchError("it rained")

    monkeypatch.setattr(horovod, "build_command", fail)
    assert main(["build"]) == 1
    assert capsys.readouterr().err == "error: it rained\n"


def test_progress_outside_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell = BuildProgress("Horovod")
    for number in range(100):
        tell(f"file {number}")
    assert capsys.readouterr().err == "Horovod: file 0\n"


def test_without_a_home_the_folder_for_wheels_must_be_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ended with a traceback, as in a container with `--user`."""
    for name in ("HOME", "XDG_CACHE_HOME", "RAYDIST_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # in no password database
    with pytest.raises(ConfigError, match="set RAYDIST_CACHE=/FULL/PATH"):
        horovod.cache()
    monkeypatch.setenv("RAYDIST_CACHE", str(tmp_path))
    assert horovod.cache() == tmp_path


def test_compilers_fit_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {*range(16)})
    monkeypatch.setattr("os.sysconf", lambda name: 2**20)  # 1 TiB
    monkeypatch.setattr("raydist.shared.cgroup.memory_left", lambda: 8 << 30)
    assert horovod.jobs() == 4
    monkeypatch.setattr("raydist.shared.cgroup.memory_left", lambda: 1 << 62)
    assert horovod.jobs() == 16
