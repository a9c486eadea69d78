"""The command `raydist submit`: submit a job to a running Ray cluster, show its log. (driver)

`python -m raydist.tools.submit` is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import glob
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from raydist import train
from raydist.cluster import connect as cluster_connect
from raydist.cluster import gcs, ray_private
from raydist.launch.runtime_env import RUN_FOLDERS, SECRET_FILES
from raydist.reporting.job_metadata import OVERRIDES
from raydist.settings import compose, targets
from raydist.settings.lookup import missing_path
from raydist.settings.references import mask_override
from raydist.shared.errors import ConfigError, LaunchError
from raydist.state import object_store
from raydist.tools.command_line import ToolParser, run_tool

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

DEPTH = 2
"""How deep files with secrets are searched for."""
NAMED = 4
"""The most files that a note names."""
UNSEARCHED = (".git", ".venv", "venv", "node_modules")
"""Folders that are not searched for files with secrets."""
POLL_S = 1.0
"""Seconds between two requests for the status of a job whose log has ended."""


def submit_parser() -> ToolParser:
    """Return the parser of the flags; the arguments after them are for raydist.train."""
    parser = ToolParser(
        "submit", "Submits a job to a running Ray cluster, and shows its log.", remainder=True
    )
    parser.add_argument(
        "--address", default="", help="http://HEAD:8265 (default: RAY_API_SERVER_ADDRESS)"
    )
    parser.add_argument(
        "--working-dir", default=".", help="the folder to upload: conf/, jobs/, data (.)"
    )
    parser.add_argument(
        "--submission-id", metavar="ID", help="the name of the job (default: Ray chooses one)"
    )
    parser.add_argument("--no-wait", action="store_true", help="return when the job is submitted")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Submit the job.

    The exit code: that of the job; 0 with --no-wait, 2 if none was submitted, 130 after Ctrl-C.
    """
    return run_tool(lambda: submit(submit_parser().parse(sys.argv[1:] if argv is None else argv)))


def submit(arguments: argparse.Namespace) -> int:
    """Submit the job, and follow it unless --no-wait; return the exit code."""
    with in_folder(arguments.working_dir):
        env_file = check_overrides(arguments.overrides)
    client = job_client(arguments.address)
    folder = SentFolder.of(arguments.working_dir, env_file)
    folder.note_left_out()
    name = send(client, folder, arguments.overrides, arguments.submission_id)
    where = f"--address {client.get_address()} "
    later = f"  ray job logs {where}--follow {name}\n  ray job stop {where}{name}"
    print(f"job   {name}, at {client.get_address()}", flush=True)
    if arguments.no_wait:
        print(later)
        return 0
    try:
        info = asyncio.run(follow(client, name))
        print(f"job   {name} {str(info.status).lower()}")
        return code(info)
    except KeyboardInterrupt:
        print(
            f"\nthe job continues; to show its log again, or to stop it:\n{later}", file=sys.stderr
        )
        return 128 + signal.SIGINT
    except Exception as error:
        print(
            f"error: lost the connection to {name} ({reason_of_ray(error)}); it may still "
            f"run:\n{later}",
            file=sys.stderr,
        )
        return 1


@contextlib.contextmanager
def in_folder(folder: str) -> Iterator[None]:
    """Make a folder the current directory in this block, as it will be for the job."""
    before = os.getcwd()
    if not Path(folder).is_dir():
        raise missing_path("--working-dir", folder, Path(folder), "--working-dir .", folder=True)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@dataclass(frozen=True)
class SentFolder:
    """The folder to upload."""

    path: str
    env_file: str
    """The file that is sent although it has secrets, relative to `path`; empty: none."""

    @classmethod
    def of(cls, path: str, env_file: str) -> SentFolder:
        """`env_file`: that of the job, maybe outside the folder."""
        inside = env_file and not env_file.startswith(("/", "~"))
        return cls(os.path.abspath(path), os.path.normpath(env_file) if inside else "")

    @property
    def excludes(self) -> list[str]:
        """What of it is not sent, as .gitignore would say it.

        Ray itself leaves out .git, .venv and the paths in .gitignore.
        """
        needed = [f"!/{glob.escape(self.env_file)}"] if self.env_file else []
        return [*SECRET_FILES, *needed, *RUN_FOLDERS]

    def note_left_out(self) -> None:
        """Name the files with secrets that are not sent, of the folder and of DEPTH below it."""
        files = []
        for where, folders, names in os.walk(self.path):
            depth = len(Path(where).relative_to(self.path).parts)
            skipped = UNSEARCHED if depth else (*UNSEARCHED, *(each[1:] for each in RUN_FOLDERS))
            # A folder of data may have millions of files.
            folders[:] = [each for each in folders if depth < DEPTH and each not in skipped]
            secret = [each for each in names if each.endswith(".env") and each != "example.env"]
            files += [os.path.relpath(os.path.join(where, each), self.path) for each in secret]
        if files := sorted({*files} - {self.env_file}):
            named = ", ".join(files[:NAMED]) + (", …" if len(files) > NAMED else "")
            note = (
                f"{named}: not sent, because whoever has the cluster's token could read it; "
                f"env_file={files[0]} sends it, unless .gitignore names it, and sets its variables"
            )
            print(f"note: {note}", file=sys.stderr)


class RemoteLoader(compose.Loader):
    """A loader that checks names, types, values and the job's file in the uploaded folder.

    Only the cluster can check the rest.
    """

    env_file = ""
    """That of the job, unless only the cluster knows it."""

    def complete(self, config: DictConfig, resolve: bool) -> None:
        if not OmegaConf.is_interpolation(config, "env_file"):
            self.env_file = str(config.env_file)
        config.env_file = ""
        super().complete(config, resolve=False)
        if resolve and not (job := compose.validated_job(config)).script:
            target = str(config.job.target)
            if targets.is_name(target) or re.match(r"[^/~].*\.py(:|$)", target):
                targets.resolve_target(target, job.job.args)


def check_overrides(words: Sequence[str]) -> str:
    """Raise the ConfigError that the job would raise for these overrides; return its env_file.

    Warn about secrets in them.
    """
    arguments = train.parse_arguments(words)
    named = [text.partition("=")[2] for text in words if text.startswith("env_file=")]
    env_file = named[-1] if named else ""  # of a sweep, whose runs the cluster composes
    if not arguments.multirun:
        with compose.hydra_set_up():
            loader = RemoteLoader(config_dir=arguments.config_dir)
            loader.load(arguments.overrides, arguments.config_name)
        env_file = loader.env_file
    for word in words:
        if (masked := mask_override(word)) != word:
            note = (
                f"{masked}: everyone who can list the cluster's jobs can read it; use "
                "env_file= instead"
            )
            print(f"note: {note}", file=sys.stderr)
            break
    return env_file


def job_client(address: str) -> JobSubmissionClient:
    """Return a client of the cluster's job server.

    It is the one at `address`, else the one that Ray's own commands use.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    at = (
        address
        or os.environ.get("RAY_API_SERVER_ADDRESS")
        or os.environ.get("RAY_ADDRESS")
        or "auto"
    )
    try:
        if "://" not in at and not (
            cluster_connect.running_address() if at == "auto" else gcs.answers(at)
        ):
            raise ConfigError.of("--address", at, "no Ray answers", "--address http://HEAD:8265")
        ray_private.load_auth_token()
        # For Ray this variable overrides the client's argument.
        with object_store.environment({"RAY_API_SERVER_ADDRESS": at}):
            return JobSubmissionClient()
    except LaunchError as error:
        raise ConfigError(error.message) from error
    except AuthenticationError as error:
        if ray_private.refused_token(error.message):
            raise ConfigError(
                f"--address {at}: the token in {token_source()} is not this cluster's: `ray "
                "get-auth-token` on the "
                "cluster's head prints the right one",
                "--address",
                at,
            ) from error
        raise ConfigError(
            f"--address {at}: the cluster requires its token: put it into ~/.ray/auth_token, or "
            "set "
            "RAY_AUTH_TOKEN_PATH to its file, and unset RAY_AUTH_MODE or set RAY_AUTH_MODE=token",
            "--address",
            at,
            "RAY_AUTH_MODE=token",
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        cause = f"no job can be sent there ({reason_of_ray(error)})"
        raise ConfigError.of("--address", at, cause, "--address http://HEAD:8265") from error


def find_job(client: JobSubmissionClient, job: str) -> Any:
    """Return Ray's JobDetails of a job. ConfigError: there is no such job."""
    try:
        return client.get_job_info(job)
    except RuntimeError as error:
        raise ConfigError.of(
            "--job", job, reason_of_ray(error), "the id that `ray job list` shows"
        ) from error


def token_source() -> str:
    """Return where Ray has found this user's token, in the order in which it looks."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    return os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"


def send(
    client: JobSubmissionClient, folder: SentFolder, overrides: Sequence[str], name: str | None
) -> str:
    """Upload the folder and submit the command; return the job's id."""
    try:
        id: str = client.submit_job(
            entrypoint=shlex.join(["python", "-m", "raydist.train", *overrides]),
            submission_id=name,
            runtime_env={"working_dir": folder.path, "excludes": [*folder.excludes]},
            metadata={OVERRIDES: shlex.join(map(mask_override, overrides))},
        )
        return id
    except Exception as error:
        large = (
            ""
            if "413" not in str(error)
            else "; list large files of other use in .gitignore or .rayignore"
        )
        raise ConfigError(
            f"could not submit to {client.get_address()}: {reason_of_ray(error)}{large}"
        ) from error


def reason_of_ray(error: Exception) -> str:
    """Return the last line of Ray's error: a traceback of the job server ends with the reason."""
    lines = str(error).rstrip(". \n").splitlines()
    return lines[-1] if lines else type(error).__name__


async def follow(client: JobSubmissionClient, name: str) -> Any:
    """Print the log as it grows; return Ray's JobDetails when the job has ended."""
    async for lines in client.tail_job_logs(name):
        print(lines, end="", flush=True)
    while not (info := client.get_job_info(name)).status.is_terminal():
        await asyncio.sleep(POLL_S)
    return info


def code(info: Any) -> int:
    """Return the exit code of a job.

    A job that was stopped has none: Ray ends it with SIGTERM.
    """
    ended: int | None = info.driver_exit_code
    if ended is None:
        if info.status != "FAILED":
            return 128 + signal.SIGTERM
        print(f"error: {info.message}", file=sys.stderr)
        return 1
    return ended if ended >= 0 else 128 - ended


if __name__ == "__main__":
    sys.exit(main())
