"""Runs a command and writes its output as JSON lines; the entry point of the image.

    TANDEM_LOG=json python -m tandem.services.json_lines tandem serve feed recipe.toml

Log records of the services are JSON already (logging_setup.py) and pass as they are. Every other line becomes the
message of a record: tracebacks, warnings, and what libraries and native code print. It is done from outside the
process, because a line that a process writes as it crashes could not be caught inside. On a terminal, and without
TANDEM_LOG=json, the command takes this process's place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import IO

from tandem.services.process import dying_with_parent

_LONGEST_LINE = 1 << 16
_DRAIN_SECONDS = 2.0  # what the command started may keep its output open


def main(command: Sequence[str]) -> int:
    """Returns the command's exit code, or 128 and the number of the signal that ended it."""
    if os.environ.get("TANDEM_LOG", "").lower() != "json" or sys.stdout.isatty():
        os.execvp(command[0], [*command])
    process = subprocess.Popen(dying_with_parent(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: process.send_signal(number))
    lock = threading.Lock()
    threads = [
        threading.Thread(target=_copy, args=(stream, name, lock), daemon=True)
        for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr"))
    ]
    for thread in threads:
        thread.start()
    code = process.wait()
    for thread in threads:
        thread.join(_DRAIN_SECONDS)
    with lock:
        sys.stdout.flush()
    return code if code >= 0 else 128 - code


def _copy(stream: IO[bytes], name: str, lock: threading.Lock) -> None:
    for line in iter(lambda: stream.readline(_LONGEST_LINE), b""):
        if text := line.decode(errors="backslashreplace").rstrip():
            with lock:
                sys.stdout.write(as_record(text, name) + "\n")
                sys.stdout.flush()


def as_record(text: str, logger: str) -> str:
    """The text, if it is a JSON object, else a record with it as its message."""
    if text.startswith("{"):
        try:
            json.loads(text)
            return text
        except ValueError:
            pass
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": time, "level": "INFO", "logger": logger, "message": text})


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # a thread may still read what a process left behind keeps open
