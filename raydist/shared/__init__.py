"""What every stage knows: errors, events, how ranks ended. (either side)

Gets nothing and imports nothing of raydist. Gives data types that driver, nodes and ranks share.

    arguments.py          The placeholders in the arguments of a program: `--rank {rank}` becomes
                          each rank's own
    cgroup.py             The cgroups of a process, and the memory that is left in them
    ending.py             The end of a process without the interpreter's tear-down: of a command, of
                          a fork
    env_names.py          The names of the environment variables that raydist sets for its
                          processes, or reads
    errors.py             The errors that end a run, and the exit code of each. All can be pickled
    events.py             The events of a run: one append-only file of JSON lines, and readers that
                          get each event live
    home.py               The user's home and cache folder; a uid without a password entry may have
                          neither
    imports.py            Imports without garbage collection
    outcome.py            How ranks ended, and the outcome of an attempt
    own_path.py           Whether other users of this machine can reach a folder, or decide what
                          lies at a path
    rank_names.py         Ranks, hosts and counts as text
    signals.py            The first Ctrl-C or SIGTERM stops a run in order; the second one ends the
                          process immediately
    sysfs.py              Read small files of /sys and /proc; a missing file reads as empty
    version.py            The version of this package
"""
