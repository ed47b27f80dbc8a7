"""Runs a command that ends with its parent, also if that is killed: `python bound_command.py PARENT COMMAND…`.

It leads a process group of its own, and what the command has started in it ends, too. It imports nothing of Tandem, so
that it starts at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the signal was set
        return
    child = os.posix_spawnp(command[0], command, os.environ)
    os.waitpid(child, 0)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
