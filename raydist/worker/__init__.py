"""The rank's own process, from its first line to its last. (rank side)

Takes a spec of the rank from the agent of its node. Runs the job or the program, reports events and
a heartbeat, saves states. Never imports Ray.

    agreed.py             Agreement of all ranks on a step, and what they do after it for a person
    backends/             The table of backends by name: each is a module that only a rank imports
    channel.py            A rank's channel to its agent: a socket for events, and a heartbeat page
    checkpoint.py         A job's own checkpoints: save a state, find the one to continue from
    compiler.py           Has torch.compile ready: imported by a fork server, before it forks ranks
                          that compile
    context.py            The rank's context, for jobs: rank, reports, step; works under torchrun
                          too
    debugger.py           pdb in a rank, over its channel: breakpoint() waits for a person, who may
                          enter
    editor.py             An editor's session in a rank, by debugpy; its text takes the rank's
                          channel
    garbage.py            Python's garbage collector in a training: its pauses, and common
                          collections
    groups.py             Process groups with the timeout of the default group, and long waits in
                          turns
    heartbeat.py          The heartbeat page and the signal that a rank and its agent share
    in_place.py           A rank that outlives another: it leaves its step, and joins the next
                          attempt
    main.py               Start and end of a rank process: become the rank, run the job, report the
                          end
    profiling.py          Profiles of this rank by torch's profiler, during training
    program.py            Runs an existing program (script=) in a rank's process, as a shell would
    random_state.py       Seeds, captures and restores all random generators of a rank
    stacks.py             What a hung rank reports: the stacks of its threads, and its last
                          collectives
    standalone.py         Runs a job's file as a program, with python or torchrun
    step_timer.py         Measures a rank's compute time per step apart from its waits, in any loop
    store.py              The store of ranks that stay when rank 0's node, which has the store, is
                          lost
    target.py             Loads the job's function by its name, and calls it with its arguments
    timeouts.py           Raises the timeouts of a rank's process groups while a rank is in the
                          debugger
    torch_private.py      All private parts of torch that raydist uses, each with a fallback
"""
