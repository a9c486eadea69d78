"""From facts about nodes to the variables of each rank. (pure)

Input: facts.Facts of each node, a Plan and a Job. Output: environment variables, each with a
reason, and findings, each with a fix. It reads no files and starts no processes.

    binding.py            (scale.numa, the NUMA nodes and GPUs of one machine) -> the CPUs to which
                          each of its ranks is bound
    checks_cluster.py     (settings, facts of all nodes) -> differences between nodes, and addresses
                          that other nodes can't reach
    checks_node.py        (settings, plan, facts of all nodes) -> problems that would keep ranks
                          from the network, each with a fix
    checks_site.py        (settings, facts of one node) -> problems with variables that the site
                          set, and with lists of HCAs
    facts.py              Facts of one node as plain data: interfaces, HCAs, GPUs, limits, versions,
                          variables of the site
    finding.py            Result of a check: the problem, the hosts that have it, and what to type
                          to fix it
    horovod.py            (settings, slot of a rank) -> Horovod's variables, each with its reason
    levers.py             Levers of speed: variables of threads, compilers and allocator; each lever
                          on or off, and why
    mpi.py                mpirun's command line, and the variables that keep MPI on the planned
                          network
    names.py              Environment variables as data, and the values that planner and agents must
                          agree on
    nccl_log.py           NCCL's own log -> the transport between each pair of ranks, and why NCCL
                          took no better one
    rdma.py               (settings, facts of one node) -> its interface, HCAs, and their variables,
                          each with its reason
    traffic.py            Port counters before and after a run, and NCCL's logs -> which network
                          carried the run, in one line
    variables.py          (settings, facts of all nodes) -> each rank's environment variables, each
                          with its reason
"""
