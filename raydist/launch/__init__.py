"""From a Plan to running ranks. (driver)

Gets a Plan and a Job. Gives a worker group: actors on all nodes, warm fork servers, a rendezvous,
started ranks.

    actors.py             The actors of a worker group: one per rank, in its placement group's
                          bundle, and one per standby node
    flush.py              Have the last state of a run written to the disk: a whole one by any node,
                          a sharded one by all
    gangs.py              The worker groups of runs that have ended, for the next runs of this
                          process with the same resources
    inline.py             group=inline, without Ray: one rank in this process, where pdb works, or
                          several as plain processes
    limits.py             The longest waits for agents: longer in a run of many ranks, whose answers
                          the driver takes one by one
    mailbox.py            The requests to the agents of a node, and their answers, in one Ray call
                          at a time
    model_check.py        The model that `model=` names, before Ray and ranks start: can it be
                          divided as `parallel=` says?
    mpi.py                backend=mpi: runs mpirun on rank 0's node and its daemons on all nodes,
                          and passes their messages on
    payload.py            Pickled functions for the ranks, and the values and exceptions that they
                          return
    placement_group.py    A worker group on the cluster: one placement group, one actor per rank,
                          replacements for lost nodes
    preload.py            The modules that a fork server imports before it forks: torch, and those
                          that the job's file imports
    run_storage.py        A run's storage: reserved before the launch, read for the checkpoint to
                          resume, given the records
    runtime_env.py        Ray's runtime_env of a job: the folder and the packages that its nodes get
    shard_saver.py        Have the sharded checkpoints written that the ranks ask for while they
                          train
    shared_paths.py       (Job, the paths that each node can't see) -> an error or a warning before
                          a rank starts
    standby.py            Standby nodes: nodes without ranks whose fork servers are warm, as spares
                          or for an elastic job
    vitals.py             Says every some seconds while ranks train how fast each is and how busy
                          each node is: `pace`, `nodes`
    warm_server.py        The fork server of the driver's machine: it warms up while Ray connects,
                          and stays for the next run
    worker_group.py       The worker group: opens, starts, queries and stops the agents of all ranks
                          by typed requests
"""
