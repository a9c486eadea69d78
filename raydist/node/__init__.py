"""What runs on each node: an actor with an agent for each rank, and the fork server. (actor)

It gets calls from the driver. It returns facts about the node, forks ranks, reports their events
and ends, and keeps their snapshots when a rank dies.

    actor.py              The Ray actor of one rank: holds its resources; a node's first also hosts
                          all agents
    agent.py              The agent of one rank: joins the fork server, starts the rank, answers
                          requests
    agent_server.py       Serves the agents of a node: forks processes for them, and reports their
                          ends
    cache_folder.py       The user's folder for compiled code, on the node's disk, kept across runs
                          and boots
    checkup.py            The doctor's check-up of one node: connections, libraries, /dev/shm; it
                          cleans up
    command_streams.py    The input and output of a command alongside a rank: pipes, or a terminal
    commands.py           Commands that a person runs alongside a rank, in its environment and
                          cgroup
    counters.py           Byte counters and rates of this machine's network ports, from /sys under a
                          given root
    debugger_desk.py      What the debugger of a rank says, until the driver takes it
    deputy_process.py     Starts the deputy of a run on its node, and tells it that the driver lives
    dryrun.py             Tries a rank's variables before any rank starts: the addresses of gloo and
                          NCCL
    fork_client.py        An agent's connection to the node's fork server: messages, replies, ends
                          of processes
    fork_launcher.py      Starts and ends a fork server, for the first agent of a node or for the
                          driver
    fork_server.py        The fork server of a node: a process that imports torch once and forks the
                          ranks
    gpu_faults.py         Determines by NVML whether a GPU of a silent or failed rank is broken
    held_states.py        The states of runs that have made way, held by a fork server for their
                          next placement
    huge_pages.py         Moves a process's memory into pages of 2 MB: it forks and its children end
                          faster
    kept_server.py        Fork servers kept on their node for later runs of the same user and Python
    left_folders.py       Removes the folders of fork servers killed with their agents, e.g. by a
                          power cut
    load.py               How busy this machine is: CPU, memory, GPUs by NVML, bytes of its network
                          ports
    mpi_agent.py          The agent of a rank under mpirun: serves mpirun's processes and forks the
                          rank
    mpi_child.py          The program that mpirun starts in place of ssh and of the user's program
    mpi_install.py        The MPI of this machine: its mpirun, and the daemon for another host's
                          mpirun
    mpi_listener.py       Where mpirun's launch agents, and its child for the rank, connect to the
                          rank's agent
    mpi_segments.py       Removes killed MPI ranks' shared memory from /dev/shm, where it stays
                          until a reboot
    native_stack.py       Has py-spy read the stacks of a rank with the frames of C code, if it is
                          there
    nccl_output.py        NCCL's log of one rank: forwarded for fabric.debug, checked for
                          fabric.strict
    nvml.py               The GPUs of this machine by NVML, with ctypes: Ray and nvidia-ml-py need
                          not be there
    oom.py                Reports whether the kernel's OOM killer ended a process, by its counters
                          and its log
    output_file.py        A rank's output on its node: the agent reads it, and frees what it has
                          read
    path_check.py         Checks whether this machine sees paths on a shared disk or at a URL
    peers.py              Connections between every two nodes on the training addresses: round trip,
                          clocks, MTU
    probe/                The facts of this machine: addresses, interfaces, GPUs, versions,
                          variables of the site
    processes.py          Signals, awaits and ends processes and their children; reads their state
                          and error
    rank_channel.py       The connection of a rank's process to its agent: what the agent asks, and
                          the replies
    rank_process.py       One start of a rank: its process, from the fork to the end that is
                          reported
    rank_readers.py       Packages that only ranks may import: at import they read which rank they
                          are in
    rank_reports.py       What one start of a rank reports: events, output, NCCL's log, heartbeat,
                          an error
    rank_spec.py          The driver's request for a rank -> the complete spec of its process, on
                          its node
    ras_client.py         Asks the RAS of a rank's NCCL which ranks lag, and keeps a port for it
    recorded_end.py       How a rank ended, and the newest state, of a run whose agents do not
                          answer
    rendezvous.py         The rendezvous TCPStore, on the training address, in a process that
                          outlives rank 0
    rendezvous_http.py    Horovod's rendezvous: a key-value store over HTTP on the training address,
                          with a secret
    snapshots.py          The snapshot memories of a node, which its fork server holds and writers
                          save
    spawn.py              Children of the fork server: forks, or a rank in a new interpreter if that
                          is unsafe
    tracing.py            What this node lets a child of the agent trace: Yama, seccomp,
                          capabilities, users
    warm_imports.py       What a fork server imports before it forks, and whether its children can
                          use that
    writer.py             Has writer processes write checkpoints alongside the ranks, and reads
                          their messages
    writer_requests.py    Answers the driver in a writer process: each node writes the shards in its
                          memory
    xid_watch.py          Waits for the Xids of a rank's GPUs, in threads that NVML keeps asleep
    xids.py               The Xids of NVIDIA's driver: what they mean, and whether the GPU is at
                          fault
"""
