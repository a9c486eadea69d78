"""The rank's own process: what runs between its first line and its last. (rank side)

Gets a spec of the rank from the agent of its node. Runs the job or the program, reports events and
a heartbeat, saves states. Never imports Ray.

    backends/             The table of backends: by name its module, which only a rank imports
    channel.py            A rank's channel to its agent: events over a socket, and a heartbeat page
                          that outlives the process
    checkpoint.py         A job's own checkpoints: save a state, find the one to continue from
    context.py            The rank's context, for jobs: its rank, its reports, its step. It works
                          under plain torchrun too
    garbage.py            Python's garbage collector in a training: how long it stops this rank, and
                          collections at the same step
    groups.py             Process groups and meshes next to the default group, with its timeout:
                          torch would take its own
    heartbeat.py          The heartbeat page and the signal that a rank and its agent share beside
                          messages
    main.py               Start and end of a rank process: become the rank, run the job, report how
                          it ended
    program.py            Runs an existing program (script=) in a rank's process, as a shell would
    random_state.py       Seeds, captures and restores all random generators of a rank
    stacks.py             What a hung rank reports: the stacks of its threads, and its last
                          collectives
    standalone.py         Runs a job's file as a program: `python jobs/digits.py …`, `torchrun
                          jobs/digits.py …`
    step_timer.py         Measures a rank's compute time in each step apart from its waits for other
                          ranks, in any loop
    target.py             Loads the job's function by its name, and calls it with its arguments
    torch_private.py      All private parts of torch that raydist uses, with the fallback for a
                          torch without them
"""
