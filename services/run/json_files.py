"""Files of a run folder that grow by one JSON object a line: metrics, evaluations, events, decisions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandem.services.run.folder import write_text
from tandem.trainer.checkpoints.durable import sync

Line = dict[str, Any]

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
GENERATIONS_FOLDER = "evaluations"
EVENTS_FILE = "events.jsonl"
DECISIONS_FILE = "decisions.jsonl"


class JsonLines:
    """An append-only file of JSON objects with one writer. A last line torn by a crash or a full disk is ignored by
    `read`, and cut off by `append` and `keep`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, *lines: Mapping[str, object]) -> None:
        """Appends objects and returns once they are on disk. Readers see only complete lines. Raises OSError."""
        with self.path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - 1, 0))
            if end and file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write("".join(map(_encoded, lines)).encode())
            file.flush()
            os.fsync(file.fileno())
        if not end:
            sync(self.path.parent)

    def read(self) -> list[Line]:
        """All complete lines; none if the file does not exist yet."""
        if not self.path.exists():
            return []
        texts = self.path.read_text(encoding="utf-8").split("\n")
        return [json.loads(text) for text in texts[:-1]]  # what follows the last newline is torn or empty

    def keep(self, wanted: Callable[[Line], bool]) -> None:
        """Rewrites the file with only the wanted lines, by one rename."""
        if self.path.exists():
            kept = (_encoded(line) for line in self.read() if wanted(line))
            write_text(self.path, "".join(kept))


class JsonTail:
    """Reads the new complete lines of a file of JSON objects. Starts over if a resumed run has replaced the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def read(self) -> tuple[list[Line], bool]:
        """The lines since the last call, and whether reading started over."""
        try:
            with open(self._path, "rb") as file:
                status = self._path.stat()
                fresh = status.st_ino != self._inode or status.st_size < self._offset
                if fresh:
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return [], False
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()], fresh


def _encoded(line: Mapping[str, object]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"
