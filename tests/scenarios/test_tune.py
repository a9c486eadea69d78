"""raydist.run inside a trial of Ray Tune, which holds a CPU and captures tasks: it works, and holds nothing later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.test_rig import wait_until

pytest.importorskip("pyarrow", reason="Ray Tune needs pyarrow and pandas: pip install 'ray[tune]'")
pytest.importorskip("pandas", reason="Ray Tune needs pyarrow and pandas: pip install 'ray[tune]'")
pytestmark = pytest.mark.ray


def total(rate: float) -> float:
    """The sum over the ranks."""
    import torch

    summed = torch.full((), rate)
    torch.distributed.all_reduce(summed)
    if rate > 0.5:
        raise ValueError("too fast")
    return summed.item()


def trainable(config: Mapping[str, float]) -> None:
    import ray
    from ray import tune

    import raydist
    from raydist.cluster import autoscaler

    context = ray.get_runtime_context()
    types = autoscaler.read_config_there(context.get_node_id(), context.gcs_address)  # a task, as on another node
    assert not types
    done = raydist.run(total, "scale=1x2", "backend=gloo", "restart=none", args=(config["rate"],))
    tune.report({"total": done.values[0], "ranks": len(done.values)})


def test_a_run_inside_ray_tune_releases_what_it_holds_also_when_it_fails(on_ray: Path) -> None:
    import ray
    from ray import tune
    from ray.util import placement_group_table

    found = tune.Tuner(
        tune.with_resources(trainable, {"CPU": 1}),
        param_space={"rate": tune.grid_search([0.1, 0.25, 0.9])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=str(on_ray / "tune"), verbose=0),
    ).fit()
    assert [(each.metrics or {}).get("ranks") for each in found] == [2, 2, None]
    assert [(each.metrics or {})["total"] for each in found if each.error is None] == pytest.approx([0.2, 0.5])
    assert len(found.errors) == 1

    def released() -> bool:
        held = {each["state"] for each in placement_group_table().values()} - {"REMOVED"}
        return not held and ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]

    wait_until(released, "all CPUs are free, and no placement group is left", 60)
