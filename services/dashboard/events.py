"""What happened in a run, the newest first: what its launcher reported, checkpoints, evaluations, the autoscaler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tandem.protos import control_pb2
from tandem.services.dashboard.figures import Figures
from tandem.services.run.json_files import EVENTS_FILE, JsonTail
from tandem.trainer.checkpoints.state import list_checkpoints

MOST = 500


class Event(NamedTuple):
    time: float
    """Unix time in seconds."""
    kind: str
    """launcher, checkpoint, evaluation, skipped step or autoscaler."""
    text: str


class Events:
    """The events of one run. One thread calls `read`."""

    def __init__(self, folder: Path, figures: Figures) -> None:
        self._checkpoints = folder / "checkpoints"
        self._figures = figures
        self._tail = JsonTail(folder / EVENTS_FILE)
        self._reported: list[Event] = []
        self.listed: list[Event] = []

    def read(self, decisions: Iterable[control_pb2.StatusReply.Decision]) -> None:
        """Reads what is new."""
        lines, fresh = self._tail.read()
        if fresh:
            self._reported = []
        self._reported = [*self._reported, *(Event(line["time"], "launcher", line["text"]) for line in lines)][-MOST:]
        found = [*self._reported, *self._saved(), *self._evaluated(), *self._skipped(), *map(_decided, decisions)]
        self.listed = sorted(found, reverse=True)[:MOST]

    def _saved(self) -> Iterator[Event]:
        for version, _, folder in list_checkpoints(self._checkpoints):
            try:
                yield Event(folder.stat().st_mtime, "checkpoint", f"version {version} is saved")
            except OSError:
                continue  # it was pruned just now

    def _evaluated(self) -> Iterator[Event]:
        times = {line["step"]: line["time"] for line in self._figures.lines}
        begin = min(times.values(), default=0.0)
        for line in self._figures.evaluations:
            for name, one in line.get("sets", {}).items():
                told = one["failed"] or f"accuracy {100 * one['accuracy']:.1f} %"
                text = f"version {line['version']}: {name}: {told}"
                yield Event(times.get(line["version"], begin), "evaluation", text)

    def _skipped(self) -> Iterator[Event]:
        for line in self._figures.lines:
            if line.get("skipped_steps"):
                text = (
                    f"batch {line['step']}: {line['skipped_steps']} optimizer steps had gradients that are not finite"
                )
                yield Event(line["time"], "skipped step", text)


def _decided(one: control_pb2.StatusReply.Decision) -> Event:
    change = "stays at" if one.from_replicas == one.to_replicas else f"goes from {one.from_replicas} to"
    dry = " (dry run)" if one.dry_run else ""
    return Event(one.time, "autoscaler", f"{one.service} {change} {one.to_replicas}{dry}: {one.reason}")
