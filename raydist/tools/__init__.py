"""Commands beside train: `python -m raydist.tools.NAME`. (driver)

Each gets the same overrides as `python -m raydist.train`.

    bandwidth.py          `python -m raydist.tools.bandwidth`: measures collectives on the ranks
                          that a job would have
    bandwidth_figures.py  Times -> algorithm and bus bandwidth, schedule of pairs, slow nodes and
                          pairs, verdict
    bandwidth_plot.py     Bus bandwidth over message size as an SVG, without a plotting library,
                          which would be larger than raydist
    bandwidth_ranks.py    The part of tools.bandwidth that runs in each rank: checks every operation
                          once, then times it
    command_line.py       Command lines of the tools: flags anywhere between overrides, exit codes,
                          errors in raydist's form
    doctor.py             `python -m raydist.tools.doctor`: tests whether the nodes and the network
                          can run the job
    doctor_findings.py    The doctor's measurements -> findings, each with a fix
    doctor_report.py      The doctor's report: a table of nodes and checks, the findings with their
                          fixes, a verdict
    doctor_rounds.py      The doctor's checks in order; each sends one request to all nodes at once
    horovod.py            `python -m raydist.tools.horovod`: `build` builds Horovod for the
                          installed torch, `check` tests it
    horovod_build.py      Patches and builds Horovod's source distribution for the installed torch
    launch.py             `python -m raydist.tools.launch`: takes torchrun's command line, and runs
                          on the nodes of a Ray cluster
    plan.py               `python -m raydist.tools.plan`: prints where ranks would run and with
                          which variables; starts nothing
    submit.py             `python -m raydist.tools.submit`: submits a job to a running Ray cluster,
                          and shows its log
    sweep.py              `python -m raydist.tools.sweep`: runs a job with many settings, side by
                          side, the bad ones ended early
    warm.py               `python -m raydist.tools.warm`: lists the fork servers that stay on the
                          nodes for the next run
    watch.py              `python -m raydist.tools.watch`: the page of a run or a sweep: its folder,
                          its storage, a Ray job's id
"""
