"""The list of slow tests, made by measurement: `make test` leaves them out.

`python -m tests.durations REPORT.xml …` rewrites tests/slow.txt from the reports of a whole run,
which `pytest --junitxml=REPORT.xml` writes.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

LIST = Path(__file__).parent / "slow.txt"
LIMIT_S = 3.0
"""Seconds, with its fixtures, from which a test is slow."""
ESSENTIAL = {
    "tests/launch/test_mpirun.py": ("test_collectives_and_torchruns_variables[openmpi]",),
    "tests/scenarios/test_fabric_rig.py": ("test_what_a_site_has_set_wins_and_is_told",),
    "tests/scenarios/test_hang.py": (
        "test_what_can_not_get_better_ends_the_run_and_names_the_culprit[another-words1]",
    ),
    "tests/scenarios/test_horovod_run.py": (
        "test_a_stall_ends_the_run_and_the_log_names_who_was_missing",
    ),
    "tests/scenarios/test_in_place_run.py": ("test_a_killed_rank_is_replaced_and_the_other_stays",),
    "tests/scenarios/test_jobs.py": (
        "test_the_language_model_runs_under_every_division[parallel=pp-2]",
    ),
    "tests/scenarios/test_notify.py": (
        "test_a_dead_webhook_costs_a_warning_and_a_command_gets_the_cause",
    ),
    "tests/scenarios/test_operate.py": (
        "test_ranks_says_where_each_rank_is_and_what_it_does",
        "test_stacks_says_where_each_odd_rank_is_and_how_it_knows",
        "test_exec_runs_where_the_rank_runs_and_ends_as_the_command",
    ),
    "tests/scenarios/test_operate_set.py": ("test_all_ranks_go_on_with_the_new_values",),
    "tests/scenarios/test_queue.py": ("test_a_paused_run_goes_on_once_it_is_resumed",),
    "tests/scenarios/test_restart_run.py": (
        "test_a_run_that_is_struck_ends_as_if_it_had_not_been[gloo-kill16-killed]",
    ),
    "tests/scenarios/test_sweep.py": ("test_a_full_disk_does_not_stop_a_sweep",),
    "tests/scenarios/test_train.py": (
        "test_the_main_job_with_no_arguments_starts_ray_trains_and_leaves_nothing",
        "test_a_failing_job_exits_1_and_its_page_names_the_culprit",
    ),
    "tests/scenarios/test_watch_page.py": (
        "test_a_run_from_its_first_step_to_the_death_of_its_driver",
    ),
    "tests/scenarios/test_without_ray.py": ("test_a_failure_is_blamed_and_restarted",),
    "tests/training/test_parallel.py": (
        "test_the_losses_are_those_of_ddp[tp-settings3-2]",
        "test_the_losses_are_those_of_ddp[fsdp-settings0-4]",
    ),
    "tests/test_rig.py": (
        "test_gloo_uses_the_interface_it_is_told_and_the_bytes_prove_it[ib0-eth0]",
    ),
}
"""Tests that `make test` runs though they are slow: no quicker one notices the feature's loss."""


def slow() -> frozenset[str]:
    """The node ids in the list."""
    return frozenset(LIST.read_text().splitlines())


def measured(report: Path) -> Iterator[tuple[str, float]]:
    """The node id and the seconds of each test in a report."""
    for case in ET.parse(report).iterfind(".//testcase[@classname]"):
        path = case.attrib["classname"].replace(".", "/") + ".py"
        yield f"{path}::{case.attrib['name']}", float(case.attrib["time"])


def main(reports: list[str]) -> None:
    seconds = dict(pair for report in reports for pair in measured(Path(report)))
    essential = {f"{file}::{test}" for file, tests in ESSENTIAL.items() for test in tests}
    if unknown := essential - set(seconds):
        sys.exit(f"error: the reports lack {', '.join(sorted(unknown))}")
    chosen = {test for test, s in seconds.items() if s >= LIMIT_S} - essential
    LIST.write_text("".join(f"{test}\n" for test in sorted(chosen)))
    rest = sum(s for test, s in seconds.items() if test not in chosen)
    print(f"{len(chosen)} of {len(seconds)} tests are slow; the others take {rest:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
