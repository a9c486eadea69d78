"""Many runs with different settings over one cluster, the bad ones ended early. (driver)

Gets a job and a space of settings. Gives the trials, each a run with a Result. One thread of the
driver for each trial under way; the main thread decides which.

    conduct.py            The trials of a sweep, from the first to the last: starts them as there is
                          room, hears them, ends them
    flow.py               A sweep on one screen: settings -> space -> folder -> cluster -> trials ->
                          SweepResult
    folder.py             The folder of a sweep: a record of each trial, and a summary of all. Each
                          file is whole at any time
    optuna_study.py       Optuna's samplers by ask and tell, its journal in the folder of the sweep;
                          the importance of settings
    room.py               Whether the cluster has room for another trial now, and whether it can
                          ever have it
    rules.py              (trials, rule) -> which trial goes on, which is paused or ended, and which
                          one is next
    samplers.py           Who proposes the settings of the next trial: a grid, random numbers, or
                          Optuna
    space.py              Overrides in Hydra's grammar -> the space of a sweep: what is fixed, what
                          differs, and every combination
    table.py              What a person sees of a sweep: a live table in a terminal, a line for each
                          change elsewhere, a summary
    trial.py              A trial of a sweep: its settings, how far it is, and how it ended. Its
                          record as JSON
"""
