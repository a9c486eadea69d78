"""What goes to the nodes with the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydist import shipping
from raydist.config import Job
from raydist.run import run_job
from raydist.words import compose

SEES = """
import os, pathlib, sys
import beside
print(beside.WORD, os.getcwd(), sys.argv[0], sorted(path.name for path in pathlib.Path().iterdir()))
"""


def test_a_job_that_sends_nothing_asks_nothing_of_ray() -> None:
    assert shipping.runtime_env(Job()) == {}
    assert shipping.root(Job()) == ""
    assert shipping.root(Job(working_dir=".", group="inline")) == ""  # its ranks stand here anyway


def test_requirements_are_words_or_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "needed.txt"
    file.write_text("# all of it\n\neinops==0.8.0  # shapes\ntimm\n")
    assert shipping.runtime_env(Job(pip=[str(file), "rich"])) == {
        "runtime_env": {"pip": ["einops==0.8.0", "timm", "rich"]}
    }


@pytest.mark.ray
def test_ranks_run_in_a_copy_of_the_folder_less_what_git_ignores(on_ray: Path) -> None:
    (on_ray / "project" / "sub").mkdir(parents=True)
    (on_ray / "project" / "sub" / "sees.py").write_text(SEES)
    (on_ray / "project" / "sub" / "beside.py").write_text("WORD = 'sent'")
    (on_ray / "project" / ".gitignore").write_text("big\n")
    (on_ray / "project" / "big").write_text("x")
    words = ["script=project/sub/sees.py", "working_dir=project", "scale=1x2", "watch.progress=none"]
    done = run_job(compose.compose([*words, "watch.output=none"], claim=True))
    for rank in range(2):
        sent, folder, argv, *listed = (done.dir / "logs" / f"rank-{rank}.log").read_text().split()
        assert (sent, argv) == ("sent", "sub/sees.py")
        assert Path(folder) != on_ray / "project"
        assert "'sub']" in listed
        assert not any("big" in name for name in listed)
