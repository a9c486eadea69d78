"""Names of the files of a run folder that several packages read or write. (either side)"""

from __future__ import annotations

EVENTS = "events.jsonl"
"""The events of the run (shared/events.py)."""
NOTE = "note.json"
"""The note and the tags that a person gave the run."""
RESULT = "result.json"
"""The Result of the run, once it is over."""
