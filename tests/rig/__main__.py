"""`python -m tests.rig 3`: a Ray cluster on three hosts and a shell on the first. (driver)"""

from __future__ import annotations

import shlex
import signal
import sys
import tempfile
from pathlib import Path

from tests.leftovers import Session
from tests.rig import hosts


def main(count: int) -> int:
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, lambda signum, _: sys.exit(128 + signum))
    tempfile.tempdir = str(Session().folder)
    with hosts(count) as rig:
        print(
            f"Ray at {rig.ray_up()}, this machine is {rig.gateway}. A shell on host0; from "
            "elsewhere:",
            flush=True,
        )
        for host in rig.hosts:
            words = [
                "nsenter",
                f"--target={host.space.pid}",
                "--all",
                f"--wd={Path.cwd()}",
                "env",
                "-i",
            ]
            values = [f"{key}={value}" for key, value in host.environment.items()]
            enter = host.folder / "enter"
            enter.write_text(f'#!/bin/sh\nexec {shlex.join([*words, *values])} "${{@:-bash}}"\n')
            enter.chmod(0o755)
            print(
                f"  {host.name}  {', '.join(f'{n} {a}' for n, a in host.addresses.items())}  "
                f"{enter}",
                flush=True,
            )
        return rig.hosts[0].popen(["bash"]).wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
