"""The command `raydist sweep`: run a job with many settings, ending bad trials early. (driver)

`python -m raydist.tools.sweep` is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from raydist.launch import warm_server
from raydist.settings.compose import CONFIG
from raydist.sweeps.flow import run_sweep
from raydist.tools.command_line import ToolParser, run_tool
from raydist.tools.sweep_add import add_trials

DESCRIPTION = """\
Runs a job once for each combination of settings, as many at a time as the cluster has room for.

    raydist sweep optim.lr=0.1,0.01 model=mlp,small_cnn job=digits
    raydist sweep 'optim.lr=tag(log,interval(1e-4,1e-1))' sweep.trials=40 \\
        sweep.objective=min:test_loss sweep.prune=asha sweep.sampler=tpe
    raydist sweep sweep.resume=runs/digits/DATE_sweep
    raydist sweep add runs/digits/DATE_sweep optim.lr=0.02 model=mlp    (raydist sweep add --help)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep, or add trials to one.

    The exit code: 0, 1 if no trial finished, or that of the error that ended it.
    """

    words = [*(sys.argv[1:] if argv is None else argv)]

    def sweep() -> int:
        if words[:1] == ["add"]:
            return add_trials(words[1:])
        parser = ToolParser("sweep", DESCRIPTION)
        parser.add_argument(
            "--config-dir", "-cd", metavar="DIR", help="a folder like conf/ that is searched first"
        )
        parser.add_argument(
            "--config-name",
            "-cn",
            metavar="NAME",
            default=CONFIG,
            help="instead of conf/config.yaml",
        )
        arguments = parser.parse(words)
        warm_server.begin(arguments.overrides)
        done = run_sweep(arguments.overrides, arguments.config_name, arguments.config_dir)
        return done.exit_code

    return run_tool(sweep)


if __name__ == "__main__":
    sys.exit(main())
