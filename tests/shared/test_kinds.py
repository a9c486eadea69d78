"""The classes of events: their JSON, what they accept, and what reads JSON of another raydist."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raydist.shared import kinds
from raydist.shared.kinds import Event
from tests.records import event


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_an_event_comes_back_from_its_json(kind: str) -> None:
    made = event(kind)
    found = json.loads(json.dumps(made.to_json(), default=str))
    assert list(found)[:2] == ["t", "kind"]
    assert found["kind"] == kind
    back = kinds.from_json(found)
    assert type(back) is type(made)
    assert back.to_json() == found


def test_json_has_the_fields_that_an_event_was_made_with() -> None:
    made = kinds.Report(t=1.0, rank=0, values={"loss": 0.5}, step=None)
    assert made.to_json() == {
        "t": 1.0,
        "kind": "report",
        "rank": 0,
        "values": {"loss": 0.5},
        "step": None,
    }
    assert made.kept is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "place"}, r"Phase: missing \['s'\], unknown \[\]"),
        ({"name": "place", "s": 1.0, "seconds": 1}, r"unknown \['seconds'\]"),
    ],
)
def test_a_wrong_field_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        kinds.Phase(**fields)


def test_an_event_is_frozen_and_equal_to_its_like() -> None:
    made = kinds.Wait(t=1.0, text="a")
    with pytest.raises(AttributeError, match="Wait is frozen: text cannot be set"):
        made.text = "b"  # type: ignore[misc]
    assert made == kinds.Wait(t=1.0, text="a")
    assert made != kinds.Wait(t=1.0, text="b")
    assert made != kinds.Track(t=1.0, text="a")
    assert repr(made) == "Wait(t=1.0, text='a')"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"t": 1.0, "kind": "phase", "name": "place", "s": 1.0, "cpu_s": 2.0}, kinds.Phase),
        ({"t": 1.0, "kind": "thaw", "text": "of a newer raydist"}, kinds.Other),
        ({"t": 1.0, "kind": "phase", "text": "of an older raydist"}, kinds.Other),
    ],
)
def test_what_another_raydist_wrote_is_read_and_lost_nowhere(
    fields: dict[str, Any], kind: type[Event]
) -> None:
    found = kinds.from_json(fields)
    assert type(found) is kind
    assert found.kind == fields["kind"]
    assert found.to_json() == fields


def test_which_events_start_an_attempt() -> None:
    found = [name for name, each in kinds.KINDS.items() if issubclass(each, kinds.StartsAttempt)]
    assert found == ["restart", "regroup", "pause"]
