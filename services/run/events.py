"""events.jsonl of a run folder: what the launcher reports, for those who look at the run later or from elsewhere."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from tandem.services.run.json_files import EVENTS_FILE, JsonLines


def note_event(folder: Path, text: str) -> None:
    """Appends one event. A disk that is full keeps no run from being supervised."""
    with suppress(OSError):
        JsonLines(folder / EVENTS_FILE).append({"time": time.time(), "text": text})
