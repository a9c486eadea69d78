"""What runs on each node: an actor with an agent for each rank, and the fork server. (actor)

Gets calls from the driver. Gives facts about the node, forked ranks, their events and ends, and
keeps their snapshots when a rank dies.

    actor.py              The Ray actor of one rank: it holds the rank's resources; the first on a
                          node hosts all agents there
    agent.py              The agent of one rank: starts its process, watches it, answers the
                          driver's requests about it
    cache_folder.py       The user's folder for compiled code on this node: on its own disk, kept
                          over runs and boots
    checkup.py            The doctor's check-up of one node: connections, libraries, /dev/shm; it
                          leaves nothing behind
    counters.py           Byte counters and rates of this machine's network ports, read from /sys
                          under a given root
    dryrun.py             The addresses that gloo and NCCL choose with a rank's variables, tried
                          before any rank starts
    fork_client.py        An agent's connection to the fork server of its node: messages, replies,
                          and the ends of processes
    fork_launcher.py      Starts and ends a fork server: for the first agent of a node, or for the
                          driver on its machine
    fork_server.py        The fork server of a node: a plain process that imports torch once, and
                          forks the ranks from itself
    huge_pages.py         A process's memory in pages of 2 MB: a fork copies an entry for each page,
                          and its end frees them
    kept_server.py        Fork servers that stay on their node for the next run of the same user,
                          environment and Python
    left_folders.py       Folders of fork servers that were killed together with their agents, by a
                          power cut for example
    load.py               How busy this machine is: CPU, memory, GPUs by NVML, bytes of its network
                          ports
    mpi_agent.py          The agent of a rank under mpirun: it serves mpirun's processes, and forks
                          the rank when mpirun starts it
    mpi_child.py          The program that mpirun starts in place of ssh and of the user's program
    mpi_install.py        The MPI of this machine: its mpirun, and the daemon that an mpirun on
                          another host requests here
    mpi_segments.py       Removes shared memory that killed MPI ranks left in /dev/shm, which else
                          stays until a reboot
    nccl_output.py        NCCL's log of one rank: passes it on for fabric.debug, and checks its
                          network for fabric.strict
    oom.py                Whether the kernel's OOM killer ended a process: its counters before and
                          after, and its log
    output_file.py        A rank's output on its node: the agent reads it, and frees what it has
                          read
    path_check.py         Whether this machine sees paths on a shared disk or at a URL
    peers.py              Connections between every two nodes on the training addresses:
                          reachability, round trip, clocks, MTU
    probe/                The facts of this machine: addresses, interfaces, GPUs, versions,
                          variables of the site
    processes.py          Signals, awaits and ends processes with their children; reads their state
                          and their recorded error
    rank_spec.py          The driver's request for a rank -> the whole description of its process,
                          on its node
    recorded_end.py       What a node knows of a run whose agents are stopped: how a rank ended, in
                          a file; the newest state
    rendezvous.py         The rendezvous TCPStore, served on the training address by a process that
                          outlives rank 0
    rendezvous_http.py    Horovod's rendezvous: its key-value store over HTTP, on the training
                          address only, behind a secret
    shards.py             Write a sharded state to the disk: each node writes the shards in its
                          memory
    snapshots.py          The snapshot memories of a node: its fork server holds them, its writer
                          processes write them to disk
    spawn.py              Children of the fork server: forks of it, and ranks in a new interpreter
                          where a fork is unsafe
    warm_imports.py       What a fork server imports before it forks, and whether its children can
                          use that
    writer.py             An agent's way to writer processes, which write checkpoints beside its
                          rank; and messages as lines
"""
