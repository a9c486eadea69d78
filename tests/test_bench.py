"""`make gpu`: a report with a verdict per line, also where a part can't run, fails or hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import goodput, gpu, keeping
from raydist.cluster import placement
from raydist.cluster.nodes import Node
from raydist.recovery import policy
from raydist.settings.compose import compose
from raydist.settings.config import Restart
from tests import faults
from tests.conftest import CPUS, ROOT
from tests.scenarios import test_gpu


def test_without_a_gpu_each_line_of_the_report_says_so(tmp_path: Path) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "bench", "gpu"],
        cwd=tmp_path,
        env=env,
        check=True,
        capture_output=True,
    )
    lines = (tmp_path / gpu.REPORT).read_text().splitlines()
    assert lines[0] == "# raydist on no GPU"
    cells = [re.split(r" *\| *", line)[1:-1] for line in lines if line.startswith("|")][2:]
    assert [what for what, *_ in cells] == [part.what for part in gpu.PARTS.values()]
    assert {(figure, verdict[:9]) for _, figure, _, verdict in cells} == {("", "not run: ")}


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("words", [(), ("scale=1x1", "train.epochs=3")], ids=str)
def test_the_trainings_of_the_gpu_tests_have_room_and_reach_their_faults(
    gpus: int, words: tuple[str, ...]
) -> None:
    """On 8 GPUs each test was refused, for want of CPUs, and the fault was to come after the last
    step."""
    job = compose(
        [f"job={ROOT}/tests/faults.py:training", *test_gpu.words_of_training(*words, gpus=gpus)]
    )
    have = {"CPU": float(CPUS), "GPU": float(gpus)}
    request = placement.resources_for(job, [Node("id", "10.0.0.1", "node", have, have)])
    assert request.world_size == (1 if words else gpus)
    per_epoch = faults.SAMPLES // (job.data.batch_size * request.world_size)
    assert per_epoch * job.train.epochs > test_gpu.STRUCK


def test_no_bench_hides_a_module_of_python() -> None:
    """torchrun runs some of them by their paths, so that their folder is searched first."""
    assert not {path.stem for path in (ROOT / "bench").glob("*.py")} & sys.stdlib_module_names


def test_keeping_on_gpus_makes_as_few_steps_as_the_bench_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It made 840,042 of them."""
    called: list[int] = []

    class Done:
        values = ([[(1.0, 1.0)], 0.0],)

    def run(job: object, *words: str, args: tuple[int]) -> Done:
        called.extend(args)
        return Done()

    monkeypatch.setattr("raydist.run", run)
    monkeypatch.setattr(gpu, "begin_ray", lambda: None)
    gpu.keeping(3)
    assert keeping.BLOCK * (2 * called[0] + 3) < 15_000


def test_a_part_that_hangs_or_fails_or_lacks_a_gpu_costs_its_line_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gpu.run_part("bandwidth", 1, 1) == ("", "not run: it needs 2 GPUs, this machine has 1")
    figure, verdict = gpu.run_part(
        "bandwidth", 2, 1
    )  # nccl without a GPU: it ends with a traceback
    assert (figure, verdict[:8]) == ("", "FAILED: ")
    monkeypatch.setattr(gpu, "LIMIT_S", 0.01)
    assert gpu.run_part("network", 1, 1) == ("", "FAILED: it did not end within 0.01 s")


@pytest.mark.parametrize(
    ("ours", "least", "most", "good"),
    [(99, 0.99, 2, True), (98, 0.99, 2, False), (60, 0, 0.5, False)],
)
def test_a_figure_is_held_against_its_goal(
    ours: float, least: float, most: float, good: bool
) -> None:
    text, reached = gpu.compare(
        {"raydist": [ours, ours], "torchrun": [100.0, 100.0]}, "steps/s", least, most
    )
    assert reached is good
    assert f"{ours / 100:.3f}" in text


def test_simulated_goodput_is_what_meta_published_for_the_stalls_that_it_published() -> None:
    """Llama 3 405B: more than 90% in steps. At 100,000 GPUs: 44% with ten minutes for each failure
    and 80% with three, of which the model lacks the steps that were repeated."""
    assert sum(goodput.LLAMA_3.values()) == 419
    llama = goodput.simulate(goodput.stalls(600), 16384, 54 * 86400 / 419, 54)
    assert llama.share == pytest.approx(0.95, abs=0.01)
    mttf_s = goodput.MTTF_S[131072]
    shares = [goodput.simulate(goodput.stalls(s), 131072, mttf_s, 30).share for s in (600, 180)]
    assert shares == pytest.approx([0.44, 0.80], abs=0.06)


def test_a_month_with_16384_ranks_is_survived_by_the_default_limit_and_not_by_three() -> None:
    def run(most: int) -> goodput.Outcome:
        rule = Restart(max=most)
        return goodput.simulate(goodput.by_raydist(16384), 16384, goodput.MTTF_S[16384], 30, rule)

    whole, ended = run(policy.usual_limit(16384)), run(policy.USUAL)
    assert whole.gave_up == ""
    assert whole.failures > 300
    assert whole.share > 0.99
    assert ended.gave_up == "4 failures within 3600 s, restart.max=3"
