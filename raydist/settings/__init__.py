"""From command-line overrides to a Job. (driver)

Takes overrides from a command line and the groups of conf/. Returns a frozen, checked config.Job,
or raises a ConfigError that names the value and what to type instead. Starts nothing.

    changeable.py         The settings of raydist.fit that may change while it runs (`raydist set`)
    choices.py            A config source for choices without a file: scale=2x8, any model,
                          optimizer, job
    compose.py            Overrides -> Job: Hydra composes conf/ and the overrides, checked before
                          any start
    config.py             The settings of a run: frozen dataclasses; a field's docstring is its
                          --help text
    duration.py           A duration as people type it, such as 4h or 1h30m, in seconds
    env_file.py           `env_file=`: environment variables from a file in the format of docker's
                          --env-file
    fused.py              `optim.fused`, `train.fast` -> whether torch's fused optimizer is used,
                          and why
    help.py               `raydist --help`: every group and its choices; each setting's type,
                          default, docstring
    hydra_errors.py       Errors of Hydra and OmegaConf -> one ConfigError with the setting and a
                          suggestion
    in_place.py           Which jobs can replace a killed rank alone, while the other ranks keep
                          their processes
    lookup.py             Find files and modules that settings name without importing them, or
                          suggest a name
    mesh.py               `parallel=` and a number of ranks -> stages, copies, shards, shares of
                          layers
    notices.py            `notify.`: a ConfigError for a webhook or a kind of message that cannot be
                          right
    overrides.py          Overrides as typed -> overrides in Hydra's grammar; meaningless ones are
                          refused
    priority.py           `queue.priority` as a number
    profiled.py           The steps that `watch.profile=100..105` names
    references.py         Replace secrets in overrides and config files by references, which Hydra
                          saves
    run_folder.py         The location of a run's checkpoints and records
    script.py             Find the program of `script=` before anything starts
    secrets.py            Tell by name or value which settings are secrets; strip them for saving
    slurm.py              Refuse a run that Slurm would start several times, or outside of its nodes
    targets.py            Find the function of `job=` by name and check its arguments, without
                          importing it
    torchrun.py           torchrun's flags -> raydist's overrides, a note that a flag is not needed,
                          or a refusal
    validate.py           Values of a Job that cannot be right: a ConfigError with the value and a
                          suggestion
"""
