"""Run a job with many settings on one cluster, ending bad trials early. (driver)

Takes a job and a space of settings. Returns the trials, each a run with a Result. Each trial under
way has its own thread in the driver; the main thread decides which trials run.

    conduct.py            Start, observe and end the trials of a sweep, from the first to the last
    flow.py               A sweep in one file: settings -> space -> folder -> cluster -> trials ->
                          SweepResult
    folder.py             The folder of a sweep: a record per trial, and a summary; every file
                          always complete
    importance.py         The importance of each setting during a sweep, computed in a child process
    optuna_study.py       Optuna's samplers by ask and tell, with a journal; the importance of
                          settings
    requests.py           Trials that a person adds to a sweep, as files in its folder
    room.py               Find out whether the cluster has room for another trial now, or can ever
                          have it
    rules.py              (trials, rule) -> which trial continues, is paused or ended, and which one
                          is next
    samplers.py           Propose the settings of the next trial: by a grid, random numbers, or
                          Optuna
    space.py              Overrides -> the space of a sweep: what is fixed, what differs, all
                          combinations
    table.py              The screen of a sweep: a live table in a terminal, else a line per change;
                          a summary
    trial.py              A trial of a sweep: its settings, progress, end, and its record as JSON
    upload.py             Copy the records of a sweep to `storage=`, next to its trials, while it
                          runs
"""
