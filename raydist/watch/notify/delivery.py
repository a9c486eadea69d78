"""Send one message to a webhook or a command, within half a minute. (driver)

No message arrives twice: it is sent again only if the receiver certainly does not have it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

from raydist.settings.config import Notify
from raydist.settings.notices import form_of
from raydist.settings.secrets import MASK
from raydist.shared import env_names
from raydist.watch.notify.message import RunMessage

ANSWER_S = 8.0
"""Limit on the wait for a connection to a webhook, and for its answer."""
PAUSE_S = 1.0
"""Seconds between two attempts."""
TRIES = 3
AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
"""Answers after which a message is sent again, because nobody has read it."""

Deliver = Callable[[RunMessage, float], str]
"""(message, deadline on the monotonic clock) -> why it was not delivered; empty if it was."""


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treats a redirection as a failure: urllib would follow it with a GET without the message."""

    def redirect_request(self, *_: Any) -> None:
        return None


def receiver(name: str, notify: Notify) -> Deliver:
    """Return the function that delivers a message. `name`: webhook or command."""
    if name == "command":
        return lambda message, until: run_receiver(notify.command, message, until)
    slack = form_of(notify) == "slack"
    return lambda message, until: post(
        notify.webhook, message.as_slack() if slack else message.as_json(), until
    )


def post(url: str, body: str, until: float) -> str:
    """POST a body to a webhook; return why it was not delivered, without the URL (a secret).

    `until`: the deadline on the monotonic clock, after which there is no other attempt.
    """
    request = urllib.request.Request(
        url, body.encode(), {"Content-Type": "application/json", "User-Agent": "raydist"}
    )
    opener = urllib.request.build_opener(NoRedirect)
    for number in range(1, TRIES + 1):
        wait = min(ANSWER_S, until - time.monotonic())
        try:
            opener.open(request, timeout=max(0.1, wait)).close()
            return ""
        except urllib.error.HTTPError as error:
            error.close()
            why, again = f"it answered {error.code} {error.reason}", error.code in AGAIN
        except urllib.error.URLError as error:  # there was no connection, so nothing was sent
            why, again = str(error.reason), True
        except TimeoutError:
            why, again = f"no answer in {wait:.0f} s, so it may have got it", False
        except (OSError, HTTPException, ValueError) as error:
            why, again = f"{type(error).__name__}, so it may have got it", False
        if not again or number == TRIES or time.monotonic() + PAUSE_S >= until:
            break
        time.sleep(PAUSE_S)
    return why.replace(url, MASK)


def run_receiver(command: str, message: RunMessage, until: float) -> str:
    """Run a command with a message, once; return why it failed, empty if it did not.

    `until`: the time on the monotonic clock when the command is killed.
    """
    env = {**os.environ, **message.variables()}
    if (before := env.pop(env_names.PYTHONPATH_BEFORE, None)) is not None:
        # Ours has the modules of this Python: the command may run another one.
        env |= {"PYTHONPATH": before}  # Python takes an empty one for none
    process = subprocess.Popen(
        ["sh", "-c", command], env=env, stdin=subprocess.PIPE, start_new_session=True
    )
    wait = max(0.1, until - time.monotonic())
    try:
        process.communicate(f"{message.as_json()}\n".encode(), wait)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"it did not end in {wait:.0f} s"
    return f"it ended with {process.returncode}" if process.returncode else ""
