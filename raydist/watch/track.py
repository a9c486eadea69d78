"""track=…, notify.…: start a process per tracker or receiver, and wait for its end. (driver)

Each tracker has its own process: one that hangs, raises an exception or has no network delays
neither the run nor the others. It reads events.jsonl itself, so the driver does nothing for it
while the run continues. So has each receiver of messages.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from raydist.messages.deputy import Duty
from raydist.recovery import policy
from raydist.settings.config import Job, Notify, as_saved
from raydist.settings.run_folder import run_folder
from raydist.shared import env_names, kinds
from raydist.shared.events import Events
from raydist.state.object_store import StoragePath, environment, parse_path, reason
from raydist.state.run_checkpoints import finished, newest_of_run, run_and_earlier, training_of
from raydist.state.write import CHECKPOINTS, TRAINING
from raydist.watch import notify, trackers
from raydist.watch.trackers import Ledger, Task
from raydist.watch.web.sweep import RECORD

KUBEFLOW = "KUBEFLOW_TRAINER_SERVER_URL"
"""Set in the pods of a TrainJob: its status gets the progress, without a setting."""
PATIENCE_S = 2.0
"""Seconds after the end of a run until the command prints for which trackers it waits."""
LOOK_S = 0.5
"""Seconds between two looks at how long to wait for a tracker."""
READY_S = 90.0
"""Longest wait for the variables of a program, before its ranks start: on a busy machine MLflow,
which yields the CPUs to others, takes most of a minute to import."""
RETRY_S = 30.0
"""The same where the tracker could not be opened at first, which is tried again."""
FAILED = "failed"
"""The kind of message that the driver's machine is lost."""


class Trackers(AbstractContextManager["Trackers"]):
    """The processes of all trackers of a run, and of all receivers of messages about it."""

    def __init__(self, job: Job, events: Events) -> None:
        self._job = job
        self._events = events
        messengers = receivers(job.notify)
        before = resumed_folder(job, events) if job.track or messengers else None
        names = [*job.track, *(["kubeflow"] if KUBEFLOW in os.environ else []), *messengers]
        self._all: list[TrackerProcess] = []
        for name in names:
            try:
                self._all.append(TrackerProcess(name, job, events, before))
            except OSError as error:
                events.warn(
                    f"{name} cannot be started ({error}); the run continues without it",
                )

    def for_ranks(self) -> Job:
        """Return the job as its ranks get it: without the webhook, which they need not know.

        A program gets the variables that make its own tracker join the run. What the person has set
        takes precedence.
        """
        env = {**self._job.env}
        env.pop(env_names.NOTIFY_WEBHOOK, None)
        if self._job.script:
            made = {name: value for each in self._all for name, value in each.variables().items()}
            # A Ray that was started in another shell does not have this one's variables.
            env = {name: os.environ.get(name, made[name]) for name in made} | env
        return dataclasses.replace(self._job, env=env, notify=Notify())

    def duty(self) -> Duty | None:
        """Return what the other machines of the run tell if this one is lost.

        None if nobody wants to know, or knows of a failure from the run that this one resumes.
        """
        notify = self._job.notify
        tellers = [
            each
            for each in self._all
            if each.name in receivers(notify)
            and FAILED in notify.events
            and FAILED not in each.ledger.sent_kinds
        ]
        if not tellers:
            return None
        # the secret of one receiver is none of the other's
        settings = {"webhook": {"webhook": notify.webhook, "form": notify.form}}
        settings["command"] = {"command": notify.command}
        return Duty(
            receivers={each.name: settings[each.name] for each in tellers},
            ledgers={each.name: each.ledger.id for each in tellers},
            run=tellers[0].run,
            folder=str(Path(self._job.dir).absolute()),
            cwd=os.getcwd(),
            env={k: v for k, v in self._job.env.items() if k != env_names.NOTIFY_WEBHOOK},
            began=time.time(),
        )

    def __exit__(self, *_: object) -> None:
        began = time.monotonic()
        for each in self._all:
            each.close()
        late = [each for each in self._all if not each.ended(began + PATIENCE_S)]
        if late:
            names = ", ".join(each.title for each in late)
            text = (
                f"{names}: the end of the run is still being sent; the command waits up to "
                f"{max(each.patience(began) for each in late):.0f} s for it"
            )
            self._events.add(kinds.Track(text=text))
        for each in sorted(self._all, key=lambda each: each.patience(began)):
            each.wait(began)


def receivers(settings: Notify) -> list[str]:
    """Return the receivers of messages that are set: webhook, command."""
    return [name for name in ("webhook", "command") if getattr(settings, name)]


class TrackerProcess:
    """The process of one tracker, or of one receiver of messages."""

    def __init__(self, name: str, job: Job, events: Events, before: Path | None) -> None:
        """Start the process.

        `before`: the folder of the run that this one resumes.
        """
        messenger = name in receivers(job.notify)
        self.name = name
        self.title = f"notify.{name}" if messenger else name
        self._wait_s = notify.WAIT_S if messenger else trackers.END_S
        """The longest wait for the process at the end of the run, once it has opened."""
        self._opened_by = 0.0 if messenger else math.inf
        """When it has tried to open the tracker's run at the latest, by the monotonic clock."""
        self._events = events
        self._variables: dict[str, str] = {}
        self._ready = threading.Event()
        self._warned = False
        folder = Path(job.dir).absolute()
        # This folder may have the ledger of a training that has finished: `before` is None then.
        ledger = Ledger.read(before, name) if before is not None else Ledger()
        if name == "wandb":  # the only one whose client creates the ids
            named = {**os.environ, **job.env}.get("WANDB_RUN_ID")
            ledger.id = ledger.id or named or secrets.token_hex(4)
            self._variables = {"WANDB_RUN_ID": ledger.id, "WANDB_RESUME": "allow"}
        if messenger:
            ledger.id = secrets.token_hex(4)
        if name != "mlflow":
            self._ready.set()
        ledger.write(folder, name)
        task = Task(
            name=name,
            folder=str(folder),
            project=job.name or folder.parent.name,
            settings=as_saved(job),
            repeats=policy.restart_rule(job).max != 0,
            program=bool(job.script),
            begin=events.path.stat().st_size,
            sweep=Path(job.sweep.dir).name if job.sweep.dir else "",
            differs=settings_of_trial(folder),
            notify=wanted(job) if messenger else {},
        )
        self.ledger = ledger
        """What the process continues; its own copy may have more."""
        self.run = f"{task.project}/{task.run}"
        self._process = start(task, job)
        self._reader = threading.Thread(target=self._read, name=f"raydist-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            self._warned |= "warning" in message
            self._variables.update(message.get("variables", {}))
            if "warning" in message:
                self._events.warn(message["warning"])
            if "track" in message:
                self._events.add(kinds.Track(text=message["track"]))
            if "opening" in message:
                left_s = trackers.OPEN_S if message["opening"] else 0.0
                self._opened_by = time.monotonic() + left_s
            if "ready" in message:
                self._ready.set()
        self._ready.set()

    def variables(self) -> dict[str, str]:
        """Return the variables of a program, once the tracker has its run.

        After READY_S, or RETRY_S, they are those known so far.
        """
        began = time.monotonic()
        while not self._ready.wait(LOOK_S):
            now = time.monotonic()
            if now - began > (READY_S if now < self._opened_by else RETRY_S):
                break
        return self._variables

    def close(self) -> None:
        """Signal that the run is over: by a line, and by closing the process's input."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write("\n")
        with suppress(OSError):
            self._process.stdin.close()

    def ended(self, until: float) -> bool:
        """Report whether the process ends before this time of the monotonic clock."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
            return True
        return False

    def patience(self, began: float) -> float:
        """Return the longest wait for the process, in seconds.

        `began`: the end of the run, by the monotonic clock.
        """
        return self._wait_s + min(max(0.0, self._opened_by - began), trackers.OPEN_S)

    def wait(self, began: float) -> None:
        """Wait for the process to end, but no longer than its patience; then kill it.

        A receiver of messages goes on for up to a minute: a message is not cut off. `began`: as in
        `patience`.
        """
        log, why = Path("logs", f"track-{self.name}.log"), ""
        try:
            # Its patience is known once it has opened.
            while not self.ended(time.monotonic() + LOOK_S):
                if time.monotonic() > began + self.patience(began):
                    break
            if code := self._process.wait(0):
                why = f"its process ended with {code}"
            self._reader.join(1.0)
        except subprocess.TimeoutExpired:
            if self.title != self.name:
                text = f"{self.title}: the last message is still being sent; {log} has the outcome"
                self._events.warn(text)
                return
            why = f"it did not finish in {self.patience(began):.0f} s"
        if why and not self._warned:
            self._events.warn(f"{self.title} lacks part of the run: {why} ({log})")
        with suppress(ProcessLookupError):  # what its library has started ends too
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start(task: Task, job: Job) -> subprocess.Popen[str]:
    """Start the process of a tracker: a new interpreter in its own session.

    Ctrl-C thus does not reach it.
    """
    log = Path(task.folder, "logs", f"track-{task.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    own = {**os.environ, **job.env}
    env = {
        **own,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        env_names.PYTHONPATH_BEFORE: own.get("PYTHONPATH", ""),
    }
    with log.open("ab") as file:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                f"raydist.watch.{'notify' if task.notify else 'trackers'}.child",
            ],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(dataclasses.asdict(task), default=str) + "\n")
    process.stdin.flush()
    return process


def wanted(job: Job) -> dict[str, object]:
    """Return the settings `notify.`; of a trial without `finished`, since a sweep has many."""
    kept = [each for each in job.notify.events if each != "finished" or not job.sweep.dir]
    return {**dataclasses.asdict(job.notify), "events": kept}


def settings_of_trial(folder: Path) -> Mapping[str, str]:
    """Return the settings that differ among the trials of a sweep; empty for any other run."""
    with suppress(OSError, ValueError, KeyError):
        return {**json.loads((folder / RECORD).read_text(encoding="utf-8"))["settings"]}
    return {}


def resumed_folder(job: Job, events: Events) -> Path | None:
    """Return the local folder of the run that `resume=` continues, if that run was tracked.

    Several trials of a sweep may begin with the checkpoint of one run: each is a run of its own.
    """
    here, own = run_folder(job), Path(job.dir).absolute()
    try:
        with environment(job.env):
            for run in earlier_runs(job.resume, here):
                folders = [run.absolute()] if isinstance(run, Path) else []
                if not folders or run.absolute().parent == here.absolute().parent:
                    # The storage has a copy, if that run has come to its end.
                    folders.insert(0, own.parent / run.name)
                for local in folders:
                    if (local / Ledger.FOLDER).is_dir() and (not job.sweep.dir or local == own):
                        return local
    except Exception as error:
        text = f"the run to resume cannot be found ({reason(error)}): trackers begin a new one"
        events.warn(text)
    return None


def earlier_runs(resume: str, here: StoragePath) -> list[StoragePath]:
    """Return the run folders that `resume=` may mean.

    Empty if it is a checkpoint with later ones in its run: the tracker has the steps after it, and
    could not tell them from those that follow now. `here`: the run's own folder. Checkpoints are
    not verified: ranks do that.
    """
    if resume == "none":
        return []
    if resume != "auto":
        path = parse_path(resume).absolute()
        training = training_of(path)
        if training.name != CHECKPOINTS:  # a run folder, or a folder of checkpoints
            return [path, path.parent, path.parent.parent]
        later = training.parent.name.startswith(TRAINING)
        run = training.parent.parent if later else training.parent
        newest = newest_of_run(run, hashed=False)
        return [] if newest and newest.path.absolute() != path else [run]
    for run in run_and_earlier(here):
        if newest := newest_of_run(run, hashed=False):
            return [] if finished(run, newest.path) else [run]
    return [here]
