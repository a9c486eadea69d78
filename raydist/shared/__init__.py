"""What every stage knows: errors, events, how ranks ended. (either side)

Imports nothing else from raydist. Defines the data types that driver, nodes and ranks share.

    arguments.py          Replace placeholders in a program's arguments: `--rank {rank}` gets each
                          rank's value
    cgroup.py             The cgroups of a process, and the memory that is left in them
    ending.py             End a process: a command, or a fork without the interpreter's teardown
    env_names.py          Names of the environment variables that raydist sets for its processes, or
                          reads
    errors.py             The errors that end a run, and the exit code of each. All can be pickled
    events.py             The events of a run: an append-only file of JSON lines, and live readers
    home.py               The user's home and cache folder; a uid without a password entry may lack
                          both
    imports.py            Imports without garbage collection
    kinds.py              The kinds of events of a run: a class for each, and their JSON
    outcome.py            How ranks ended, and the outcome of an attempt
    own_path.py           Whether other users can reach a folder, or decide what lies at a path
    rank_names.py         Ranks, hosts and counts as text
    record_names.py       Names of the files of a run folder that several packages read or write
    signals.py            Stop a run in order on the first Ctrl-C, SIGTERM or SIGHUP, end at once on
                          the next
    stack_ways.py         What a node lets one process see of another -> which ways of `raydist
                          stacks` work
    sysfs.py              Read small files of /sys and /proc; a missing file reads as empty
    version.py            The version of this package
    whole_file.py         Write a file as a whole, or not at all
"""
