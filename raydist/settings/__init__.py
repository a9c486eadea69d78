"""From what is typed to a Job. (driver)

Gets overrides from a command line and the groups of conf/. Gives a frozen, checked config.Job, or a
ConfigError that names the value and what to type instead. Starts nothing.

    choices.py            The choices of a group that have no file: scale=2x8, torchvision's models,
                          any job. A config source
    compose.py            Overrides -> Job: conf/ and the overrides composed by Hydra, checked
                          before anything starts
    config.py             The settings of a run: frozen dataclasses. The docstring under each field
                          is its text in --help
    env_file.py           `env_file=`: environment variables from a file in the format of docker's
                          --env-file
    fused.py              `optim.fused`, `train.fast` -> whether torch's fused optimizer steps, and
                          why
    help.py               `raydist --help`: every group with its choices, every setting with type,
                          default and docstring
    hydra_errors.py       Errors of Hydra and OmegaConf -> one ConfigError with the wrong setting
                          and what to type instead
    lookup.py             Files and modules that settings name: found without importing them, or
                          refused with the nearest name
    mesh.py               `parallel=` and a number of ranks -> stages, copies, shards, shares of
                          layers; or what to type instead
    overrides.py          Overrides as typed -> overrides in Hydra's grammar; those without a
                          meaning are refused
    references.py         Secrets in overrides and config files -> references to them, which Hydra
                          saves and shows instead
    run_folder.py         The place of a run's checkpoints and records
    script.py             The program of `script=`: found before anything starts
    secrets.py            Which settings are secrets, by name or by value; settings without them,
                          for files and checkpoints
    targets.py            The function of `job=`: found by name, and its arguments checked, without
                          importing its file
    torchrun.py           torchrun's flags -> raydist's overrides: each is translated, reported as
                          needless, or refused
    validate.py           Values of a Job that cannot be right: a ConfigError with the value and a
                          suggestion
"""
