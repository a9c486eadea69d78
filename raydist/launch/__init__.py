"""From a Plan to running ranks. (driver)

It gets a Plan and a Job. It returns a worker group: actors on all nodes, warm fork servers, a
rendezvous, started ranks.

    actors.py             The actors of a worker group: one per rank, in its bundle, and one per
                          standby node
    bundles.py            The placement groups of a run: one for each of its nodes, with the bundles
                          there
    calls.py              One request to the agent of each rank, all at once
    changes.py            Settings that a person has changed in a run, which each later attempt
                          repeats
    deputies.py           Has the nodes of a run tell, in the driver's place, if the driver's
                          machine is lost
    flush.py              Writes a run's last state to the disk: a whole one by any node, a sharded
                          one by all
    gangs.py              The worker groups of ended runs, for later runs of this process with equal
                          resources
    hosts.py              What a worker group needs of the machines of its agents: with Ray or
                          without
    inline.py             group=inline, without Ray: one rank in this process, for pdb, or several
                          processes
    left_out.py           Nodes that raydist has given up before Ray: no ranks until they are there
                          again
    limits.py             Limits on waits for agents; longer with many ranks, whose replies come one
                          by one
    mailbox.py            Requests to a node's agents, and their answers, in one Ray call at a time
    model_check.py        Checks before Ray and ranks start that `model=` can be divided as
                          `parallel=` says
    mpi.py                backend=mpi: runs mpirun on rank 0's node, and its daemons on all nodes
    network_check.py      Before the ranks start, nodes call each other with short and with long
                          packets
    network_use.py        Which network a run used, from the counters of its nodes and the output of
                          NCCL
    opened_nodes.py       The nodes of a worker group: their fork servers, and what their first
                          agents replied
    paused_states.py      The states of a run that has made way: its nodes hold them in memory while
                          it waits
    payload.py            Pickled functions for the ranks, and the values and exceptions that they
                          return
    placement_group.py    A worker group on the cluster: placement group, an actor per rank, node
                          replacement
    preload.py            The modules that a fork server imports before it forks: torch and the
                          job's imports
    rendezvous.py         Opens the rendezvous of an attempt: a store on rank 0's node, or a file
    run_storage.py        A run's storage: reserved before the launch, read for checkpoints, given
                          the records
    runtime_env.py        Ray's runtime_env of a job: the folder and the packages that its nodes get
    shard_saver.py        Has the sharded checkpoints written that the ranks request while they
                          train
    shared_paths.py       (Job, paths that each node can't see) -> an error or a warning before a
                          rank starts
    standby.py            Standby nodes: without ranks but with warm fork servers, as spares or to
                          grow a job
    start_requests.py     The requests that start the ranks of an attempt: what all have in common,
                          then each
    vitals.py             Reports every few seconds how fast ranks and how busy nodes are: `pace`,
                          `nodes`
    warm_server.py        The fork server of the driver's machine: warms up while Ray connects, and
                          may be kept
    worker_group.py       The worker group: opens, starts, queries and stops the agents of all ranks
"""
