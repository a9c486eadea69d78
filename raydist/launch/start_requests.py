"""The requests that start the ranks of an attempt: what all have in common, then each. (driver)"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from raydist.cluster.placement import Plan
from raydist.launch import runtime_env
from raydist.launch.opened_nodes import OpenedNodes
from raydist.messages.agent import StartRank
from raydist.network import binding
from raydist.network.facts import Facts
from raydist.network.names import EnvVar
from raydist.node.fork_launcher import names_folder
from raydist.settings.config import Job, as_dict
from raydist.shared import arguments
from raydist.shared.own_path import machine_id


def common_request(job: Job, has_call: bool, keep: bool, saving: bool) -> StartRank:
    """Return the request of a rank without what differs between ranks.

    `has_call`: whether the job is a pickled function. `keep`, `saving`: as in StartRank.
    """
    copied, here = runtime_env.root(job), os.getcwd()
    program = arguments.seen_from(copied or here, job.script)
    return StartRank(
        rank=0,
        env={},
        job=json.dumps(as_dict(job)),
        argv=(program or job.job.target,),
        script=program,
        # An agent that gets no folder uses its actor's, which is the copy.
        cwd="" if copied else here,
        sys_path=tuple(path for path in sys.path if not copied or os.path.abspath(path) != copied),
        nccl_aloud=job.fabric.debug,
        nccl_strict=job.fabric.strict,
        call=has_call,
        imports_cwd=names_folder(os.environ.get("PYTHONPATH", ""), copied or here, here),
        driver=machine_id(),
        keep=keep,
        saving=saving,
    )


def rank_requests(
    common: StartRank,
    job: Job,
    plan: Plan,
    facts: Sequence[Facts],
    variables: Sequence[Iterable[EnvVar]],
    nodes: OpenedNodes,
) -> list[StartRank]:
    """Return the request of each rank: with its variables, its arguments, its CPUs and its GPUs.

    `facts`, `variables`: of each rank.
    """
    requests, cpus = [], binding.bind_all(job, plan, facts)
    common = replace(common, gpus=max(1, int(plan.request.rank_resources.get("GPU", 1))))
    for slot, of_rank in zip(plan.slots, variables, strict=True):
        env = {var.name: var.value for var in of_rank}
        args = arguments.fill(job.args, env, job.init_method, plan.request.backend)
        argv, after = (*common.argv, *args), nodes.left_on(slot)
        requests.append(
            replace(common, rank=slot.rank, env=env, argv=argv, cpus=cpus[slot.rank], after=after)
        )
    return requests
