"""`notify.`: a ConfigError for a webhook or a kind of message that cannot be right. (pure)"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from raydist.settings.config import NOTICES, Notify
from raydist.settings.secrets import MASK, SLACK_HOST
from raydist.shared import env_names
from raydist.shared.errors import ConfigError


def check_notify(notify: Notify) -> None:
    """Raise ConfigError for the first value that cannot be right. It never shows the webhook."""
    for name in notify.events:
        if name not in NOTICES:
            named = [each for each in NOTICES if each in name]
            if set(re.findall(r"\w+", name)) <= {*NOTICES}:
                raise ConfigError.of(
                    "notify.events",
                    name,
                    "several are a list",
                    f"notify.events=[{','.join(named)}]",
                )
            raise ConfigError.unknown("notify.events", name, NOTICES)
    if notify.webhook and (cause := wrong_url(notify.webhook)):
        raise ConfigError.of(
            "notify.webhook",
            MASK,
            f"{cause} (it is also read from {env_names.NOTIFY_WEBHOOK})",
            "notify.webhook=https://HOST/PATH",
        )


def wrong_url(url: str) -> str:
    """Return why nothing can be sent to this URL; empty if it can be right. Never the URL."""
    if re.search(r"[^!-~]", url):
        return "the URL has a blank, or a character that is not ASCII"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "the URL's host or port is wrong"
    if parts.scheme not in ("http", "https"):
        return "the URL must begin with https:// or http://"
    if not parts.hostname or port == 0:
        return "the URL's host or port is wrong"
    if parts.username is not None:
        return "the URL must not have a user or a password before its host"
    return ""


def form_of(notify: Notify) -> str:
    """Return the form in which the webhook gets messages: slack or json."""
    if notify.form != "auto":
        return notify.form
    host = urlsplit(notify.webhook).hostname or ""
    return "slack" if re.fullmatch(SLACK_HOST, host) else "json"
