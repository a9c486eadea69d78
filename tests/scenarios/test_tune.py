"""raydist.run inside a trial of Ray Tune, which holds a CPU and captures tasks: it works, and holds
nothing later."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.cluster import ray_private
from raydist.cluster.queue import store
from tests.test_readme import tune_example
from tests.waiting import wait_until

for name in ("pyarrow", "pandas"):  # a new one may be there and refuse an old NumPy
    told = "Ray Tune needs pyarrow and pandas: pip install 'ray[tune]'"
    pytest.importorskip(name, reason=told, exc_type=ImportError)
pytestmark = pytest.mark.ray
REPORTS = """
import raydist

def job(config):
    raydist.report(step=1, test_loss=config.optim.lr)
"""


def total(rate: float) -> float:
    """Return the sum over the ranks."""
    import torch

    summed = torch.full((), rate)
    torch.distributed.all_reduce(summed)
    if rate > 0.5:
        raise ValueError("too fast")
    return summed.item()


def trainable(config: Mapping[str, float]) -> None:
    import ray
    from ray import tune

    from raydist.cluster import autoscaler

    context = ray.get_runtime_context()
    types = autoscaler.read_config_there(
        context.get_node_id(), context.gcs_address
    )  # a task, as on another node
    assert not types
    done = raydist.run(total, "scale=1x2", "backend=gloo", "restart=none", args=(config["rate"],))
    tune.report({"total": done.values[0], "ranks": len(done.values)})


def test_a_run_inside_ray_tune_releases_what_it_holds_also_when_it_fails(on_ray: Path) -> None:
    import ray
    from ray import tune
    from ray.util import placement_group_table

    results = tune.Tuner(
        tune.with_resources(trainable, {"CPU": 1}),
        param_space={"rate": tune.grid_search([0.25, 0.9])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=str(on_ray / "tune"), verbose=0),
    ).fit()
    assert [(each.metrics or {}).get("ranks") for each in results] == [2, None]
    assert (results[0].metrics or {})["total"] == pytest.approx(0.5)
    assert len(results.errors) == 1

    def released() -> bool:
        held = {each["state"] for each in placement_group_table().values()} - {"REMOVED"}
        return not held and ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]

    wait_until(released, "all CPUs are free, and no placement group is left", 200)


def test_ray_tune_runs_a_job_file_as_the_page_shows(on_ray: Path) -> None:
    from ray import tune

    (on_ray / "train.py").write_text(REPORTS)
    example = tune_example()
    for shown, here in (
        ("scale=1x8", "scale=1x2"),
        ("num_samples=40, max_concurrent_trials=4", "num_samples=2"),
        ("tune.Tuner(", "results = tune.Tuner("),
        ("tune_config=limits", "tune_config=limits, run_config=stored"),
    ):
        assert shown in example
        example = example.replace(shown, here)
    stored = tune.RunConfig(storage_path=str(on_ray / "tune"), verbose=0)
    # As a program of a person: its functions reach the trials by value.
    names: dict[str, Any] = {"__name__": "__main__", "stored": stored}
    exec(example, names)
    results = names["results"]
    assert not results.errors
    assert len(results) == 2
    for each in results:
        assert each.metrics["test_loss"] == pytest.approx(each.config["lr"])


def strike(pid: int) -> float:
    """Return the sum over the ranks. Rank 0 kills the process `pid`, if it is not 0."""
    import torch

    summed = torch.ones(())
    torch.distributed.all_reduce(summed)
    if pid and torch.distributed.get_rank() == 0:
        os.kill(pid, signal.SIGKILL)
    return summed.item()


def test_the_resources_of_a_trial_that_was_killed_are_free_for_the_next(on_ray: Path) -> None:
    """A trial of Tune is an actor. Ray keeps the placement group that it has made until the whole
    program ends."""
    import ray
    from ray.util import placement_group_table

    class Trial:
        def run(self, killed: bool) -> Sequence[Any]:
            os.chdir(on_ray)
            words = (f"scale=1x{cpus}", "backend=gloo", "restart=none", "scale.wait_s=200")
            return raydist.run(strike, *words, args=(os.getpid() if killed else 0,)).values

    actor: Any = ray.remote(num_cpus=0)(Trial)
    cpus = int(ray.cluster_resources()["CPU"])
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.remote().run.remote(True))
    held = {name for name, each in placement_group_table().items() if each["state"] != "REMOVED"}
    assert len(held) == 1
    assert len(ray_private.kv_values(store.RUNS)) == 1
    assert list(ray.get(actor.remote().run.remote(False))) == [cpus] * cpus
    assert {placement_group_table()[name]["state"] for name in held} == {"REMOVED"}
    assert ray_private.kv_values(store.RUNS) == {}
