"""The commands besides train: `python -m raydist.tools.NAME`. (driver)

Each takes the same overrides as `python -m raydist.train`.

    bandwidth.py          The command `raydist bandwidth`: measure collectives on the ranks of a job
    bandwidth_figures.py  Times -> algorithm and bus bandwidth, schedule of pairs, slow nodes and
                          pairs, verdict
    bandwidth_plot.py     Bus bandwidth over message size as an SVG, without a plotting library
    bandwidth_ranks.py    The part of tools.bandwidth in each rank: check each operation once, then
                          time it
    command_line.py       Command lines of the tools: flags between overrides, exit codes, raydist's
                          errors
    debug.py              The command `raydist debug`: a session of pdb in a rank of a run
    doctor.py             The command `raydist doctor`: test whether nodes and network can run the
                          job
    doctor_findings.py    The doctor's measurements -> findings, each with a fix
    doctor_report.py      The doctor's report: a table of nodes and checks, findings with fixes, a
                          verdict
    doctor_rounds.py      The doctor's checks in order; each sends one request to all nodes at once
    editor_port.py        Where an editor on this machine connects to debug a rank: on 127.0.0.1,
                          once
    exec.py               The command `raydist exec`: run a command where a rank of a run runs
    horovod.py            `raydist horovod`: `build` builds Horovod for the installed torch, `check`
                          tests it
    horovod_build.py      Patch and build Horovod's source distribution for the installed torch
    launch.py             The command `raydist launch`: torchrun's command line on the nodes of a
                          Ray cluster
    note.py               The command `raydist note`: give a run a note and tags, which the list of
                          runs shows
    own_terminal.py       Uses this terminal for a command on another host: its input, its size, raw
                          mode
    plan.py               The command `raydist plan`: print where ranks would run and with which
                          variables
    profile.py            The command `raydist profile`: the same steps of all ranks, in one file
                          for Perfetto
    queue.py              The command `raydist queue`: the runs of a cluster in the queue, and what
                          a person wants of them
    ranks.py              The command `raydist ranks`: where each rank of a run is, and what it is
                          doing
    running.py            Find the run that a person means, connect to its driver, and ask it
    save.py               The command `raydist save`: have a run save a checkpoint now, without
                          stopping
    set.py                The command `raydist set`: change settings of a run while it runs
    stacks.py             The command `raydist stacks`: where in their programs the ranks of a run
                          are
    stop.py               The command `raydist stop`: stop a run as Ctrl-C does
    submit.py             The command `raydist submit`: submit a job to a running Ray cluster, show
                          its log
    sweep.py              The command `raydist sweep`: run a job with many settings, ending bad
                          trials early
    sweep_add.py          The command `raydist sweep add`: add trials to a sweep, by their settings
    warm.py               The command `raydist warm`: list the fork servers that nodes keep for the
                          next run
    watch.py              The command `raydist watch`: the page of a run or sweep, by folder,
                          storage or job id
"""
