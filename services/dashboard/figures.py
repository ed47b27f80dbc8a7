"""The figures of one run for the page: its metrics and evaluations, read as they grow, and its curves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tandem.services.buffer.starvation import Observation
from tandem.services.report.curves import Values
from tandem.services.run.folder import SUMMARY_FILE
from tandem.services.run.json_files import EVALUATIONS_FILE, METRICS_FILE, JsonTail
from tandem.services.run.progress import WINDOW_LINES, Line, snapshot_of

_POINTS = 300  # of a drawn series
_FRESH_SECONDS = 0.5


class Figures:
    """The lines of metrics.jsonl and evaluations.jsonl. `read` fetches what is new. Thread-safe."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.lines: Sequence[Line] = []
        self.evaluations: Sequence[Line] = []
        self._folder = folder
        self._reading = threading.Lock()
        self._fresh_until = 0.0
        self._metrics = JsonTail(folder / METRICS_FILE)
        self._evaluated = JsonTail(folder / EVALUATIONS_FILE)

    def read(self) -> None:
        """Reads the lines that were written since the last call, but not more often than twice a second."""
        with self._reading:
            if time.monotonic() > self._fresh_until:
                self._read()
                self._fresh_until = time.monotonic() + _FRESH_SECONDS

    def _read(self) -> None:
        lines, fresh = self._metrics.read()
        if lines or fresh:
            self.lines = [*([] if fresh else self.lines), *lines]
        found, fresh = self._evaluated.read()
        if found or fresh:
            every = [*([] if fresh else self.evaluations), *found]
            self.evaluations = sorted(every, key=lambda line: int(line["version"]))

    def sizes(self) -> dict[str, object]:
        """How much there is to draw: the page asks again when one of these has changed."""
        return {"batches": len(self.lines), "evaluations": len(self.evaluations)}

    def progress(self, seen: Observation, total: int, hung: Sequence[str]) -> dict[str, object]:
        """The figures of the last batches."""
        evaluation = next((line for line in reversed(self.evaluations) if line["accuracy"] is not None), None)
        snapshot = snapshot_of(self.lines[-WINDOW_LINES:], evaluation, seen, total, hung)
        return {**asdict(snapshot), "waiting": snapshot.waiting.line}

    def final_counts(self) -> dict[str, int]:
        """The ledger's counts of a finished run."""
        with suppress(OSError, ValueError):
            return dict(json.loads((self._folder / SUMMARY_FILE).read_text(encoding="utf-8")).get("groups", {}))
        return {}


def thinned(values: Values) -> Values:
    """At most some hundred points of a series: of every stretch its lowest and its highest, so that no peak is lost."""
    xs, ys = values
    if len(xs) <= _POINTS:
        return values
    width = -(-2 * len(xs) // _POINTS)
    kept = {0, len(xs) - 1}
    for begin in range(0, len(xs), width):
        stretch = range(begin, min(begin + width, len(xs)))
        kept |= {min(stretch, key=ys.__getitem__), max(stretch, key=ys.__getitem__)}
    places = sorted(kept)
    return [xs[place] for place in places], [ys[place] for place in places]
