"""`python -m raydist.tools.submit`, with the words of train: a job for a running Ray cluster, and its log. (driver)"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist import cluster, gcs, storage, train
from raydist.config import SECRET
from raydist.errors import ConfigError, LaunchError, RaydistError, nearest
from raydist.watch.metadata import WORDS
from raydist.words import compose, lookup

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from ray.job_submission import JobSubmissionClient

LEFT_OUT = ["/runs", "/multirun", "/outputs"]
"""What earlier runs have left in the folder; Ray itself leaves out .git, .venv and what .gitignore names."""
LOOK_S = 1.0
"""Seconds between two looks at a job whose log has ended before it has."""


def parser() -> train.Parser:
    """The flags; what comes after them is for raydist.train."""
    made = train.Parser(prog="python -m raydist.tools.submit", description=__doc__, allow_abbrev=False)
    made.add_argument("--address", default="", help="http://HEAD:8265; otherwise where RAY_API_SERVER_ADDRESS says")
    made.add_argument("--working-dir", default=".", help="the folder that is sent: conf/, jobs/, data (.)")
    made.add_argument("--submission-id", metavar="ID", help="the name of the job; otherwise Ray makes one up")
    made.add_argument("--no-wait", action="store_true", help="come back when it is sent")
    made.add_argument("words", nargs=argparse.REMAINDER, metavar="-- WORD …", help="as for raydist.train")
    return made


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags and the words; ConfigError for a flag that there is not."""
    asked, unknown = (made := parser()).parse_known_args(argv)
    if unknown:
        close = nearest(unknown[0], [flag for action in made._actions for flag in action.option_strings])
        offer = f"did you mean {close}? " if close else ""
        raise ConfigError(f"{unknown[0]}: there is no such flag; {offer}Flags of raydist.train come after a --")
    asked.words = asked.words[1:] if asked.words[:1] == ["--"] else asked.words
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """Send it. The exit code: that of the job; 0 with --no-wait, 2 where nothing was sent, 130 after Ctrl-C."""
    try:
        asked = parse(sys.argv[1:] if argv is None else argv)
        with standing_in(asked.working_dir):
            check(asked.words)
        client = connect(asked.address)
        name = send(client, asked.working_dir, asked.words, asked.submission_id)
    except RaydistError as error:
        return train.tell(error)
    except SystemExit as said:  # --help
        return int(said.code or 0)
    where = f"--address {client.get_address()} "
    later = f"  ray job logs {where}--follow {name}\n  ray job stop {where}{name}"
    print(f"job   {name}, at {client.get_address()}", flush=True)
    if asked.no_wait:
        print(later)
        return 0
    try:
        info = asyncio.run(follow(client, name))
        print(f"job   {name} {str(info.status).lower()}")
        return code(info)
    except KeyboardInterrupt:
        print(f"\nthe job goes on; to see it again, or to end it:\n{later}", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        print(f"error: {name} can't be followed any more ({reason(error)}); it may go on:\n{later}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def standing_in(folder: str) -> Iterator[None]:
    """Inside that folder, as the job will be."""
    before = os.getcwd()
    if not Path(folder).is_dir():
        close = nearest(folder, [each.name for each in Path().iterdir() if each.is_dir()])
        raise ConfigError(f"--working-dir {folder}: there is no such folder; say --working-dir {close or '.'}")
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class Distant(compose.Loader):
    """Checks names, types, values and a job's file in the folder that is sent; all else only the cluster can know."""

    def settle(self, config: DictConfig, checked: bool = True) -> None:
        config.env_file = ""
        super().settle(config, checked=False)
        if checked and not (job := compose.to_job(config)).script:
            target = str(config.job.target)
            if lookup.is_name(target) or re.match(r"[^/~].*\.py(:|$)", target):
                lookup.settle(target, job.job.args)


def check(words: Sequence[str]) -> None:
    """Refuse words that the job would refuse."""
    typed = train.parse(words)
    if not typed.multirun:
        with compose.hydra_set_up():
            Distant(config_dir=typed.config_dir).load(typed.words, typed.config_name)
    if secret := next((word for word in words if masked(word) != word), None):
        print(
            f"note: {masked(secret)}: whoever sees the cluster's jobs can read it, other than in env_file=",
            file=sys.stderr,
        )


def masked(word: str) -> str:
    """A word without the secret in it."""
    found = re.match(r"(\+*env(?:\.[^=]*)?=)", word)
    return f"{found[1]}***" if found and SECRET.search(word) else word


def connect(address: str) -> JobSubmissionClient:
    """The cluster's job server: the one typed, else where Ray's own commands look for it."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    at = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if "://" not in at and not (cluster.running() if at == "auto" else gcs.answers(at)):
            raise ConfigError(f"no Ray answers at {at}; say --address http://HEAD:8265, or set RAY_API_SERVER_ADDRESS")
        gcs.use_token()
        with storage.environment({"RAY_API_SERVER_ADDRESS": at}):  # Ray obeys it before what it is called with
            return JobSubmissionClient()
    except LaunchError as error:
        raise ConfigError(error.message) from error
    except AuthenticationError as error:
        raise ConfigError(
            f"the cluster at {at} wants its token: put it into ~/.ray/auth_token, or its file's name into "
            "RAY_AUTH_TOKEN_PATH, and leave RAY_AUTH_MODE unset or say RAY_AUTH_MODE=token"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no job can be sent to {at} ({reason(error)}); say --address http://HEAD:8265") from error


def send(client: JobSubmissionClient, folder: str, words: Sequence[str], name: str | None) -> str:
    """Send the folder and the command; the job's id."""
    try:
        sent: str = client.submit_job(
            entrypoint=shlex.join(["python", "-m", "raydist.train", *words]),
            submission_id=name,
            runtime_env={"working_dir": os.path.abspath(folder), "excludes": LEFT_OUT},
            metadata={WORDS: shlex.join(masked(word) for word in words)},
        )
        return sent
    except Exception as error:
        large = "" if "413" not in str(error) else "; name what the job does not need in .gitignore or .rayignore"
        raise ConfigError(f"nothing was sent to {client.get_address()}: {reason(error)}{large}") from error


def reason(error: Exception) -> str:
    """What Ray says, in one line: a traceback from the job server ends with it."""
    return str(error).rstrip(". \n").splitlines()[-1]


async def follow(client: JobSubmissionClient, name: str) -> Any:
    """Show the log as it grows; what Ray knows of the job when it has ended."""
    async for lines in client.tail_job_logs(name):
        print(lines, end="", flush=True)
    while not (info := client.get_job_info(name)).status.is_terminal():
        await asyncio.sleep(LOOK_S)
    return info


def code(info: Any) -> int:
    """The exit code that a job had; 1 where that can't be known."""
    ended: int | None = info.driver_exit_code
    if ended is None:  # stopped, or never begun
        if info.status == "FAILED":
            print(f"error: {info.message}", file=sys.stderr)
        ended = -int((info.metadata or {}).get("raydist.signal", 0)) or 1
    return ended if ended >= 0 else 128 - ended


if __name__ == "__main__":
    sys.exit(main())
