"""Derive the environment variables of each rank from facts about the nodes. (pure)

Input: facts.Facts of each node, a Plan and a Job. Output: environment variables, each with a
reason, and findings, each with a fix. It reads no files and starts no processes.

    binding.py            (scale.numa, NUMA nodes and GPUs of a machine) -> the CPUs to which its
                          ranks are bound
    checks_cluster.py     (settings, facts of all nodes) -> differences between nodes, unreachable
                          addresses
    checks_node.py        (settings, plan, facts of all nodes) -> what would keep ranks from the
                          network; fixes
    checks_site.py        (settings, facts of a node) -> problems with the site's variables and
                          lists of HCAs
    facts.py              Facts of a node as data: interfaces, HCAs, GPUs, limits, versions, site
                          variables
    finding.py            Result of a check: the problem, the hosts that have it, and what to type
                          to fix it
    horovod.py            (settings, slot of a rank) -> Horovod's variables, each with its reason
    levers.py             Levers of speed: variables of threads, compilers, allocator; each on or
                          off, and why
    mpi.py                mpirun's command line, and the variables that keep MPI on the planned
                          network
    names.py              Environment variables as data; values that planner and agents must agree
                          on
    nccl_log.py           NCCL's log -> the transport between each pair of ranks, and why none
                          better was used
    ras.py                NCCL's RAS: the variable with its address, and its answer about a hang ->
                          lines of text
    rdma.py               (settings, facts of one node) -> its interface, HCAs, and their variables
                          with reasons
    traffic.py            Port counters before and after a run, and NCCL's logs -> the network that
                          carried it
    variables.py          (settings, facts of all nodes) -> each rank's environment variables, with
                          reasons
"""
