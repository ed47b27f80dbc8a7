"""Runs a command in a sandbox: `python -m tandem.reward.sandbox.command PATH … -- COMMAND …`.

The command sees Python with its installed packages, and the given files and folders, all read-only. It starts in the
present folder and may write only in an empty one, which `HOME` and `TMPDIR` name. There is no network. Standard input
and output stay; if there is no sandbox, or a socket in it, `{"error": …}` is written and the exit code is 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from tandem.reward.sandbox.inside.zygote import WORK_FOLDER
from tandem.reward.sandbox.launcher import (
    AS_NOBODY,
    NEW_NAMESPACES,
    bubblewrap_mounts,
    find_bubblewrap,
    layout_for,
)
from tandem.reward.sandbox.sandbox import SandboxError

_TRY_SECONDS = 30.0


def main(arguments: Sequence[str]) -> int:
    split = arguments.index("--")
    paths, command = arguments[:split], arguments[split + 1 :]
    environment = {**os.environ, "HOME": WORK_FOLDER, "TMPDIR": WORK_FOLDER}
    try:
        check_no_socket(paths)
        prefix = sandbox_prefix(paths, os.getcwd())
        _try(prefix, environment)
    except SandboxError as error:
        sys.stdout.write(json.dumps({"error": f"in the sandbox: {error}"}) + "\n")
        return 1
    os.execve(prefix[0], [*prefix, *command], environment)


def check_no_socket(paths: Sequence[str]) -> None:
    """Raises SandboxError if a path, or a file below it, is a socket, such as that of a run's Redis: a program could
    connect to it, read-only or not.
    """
    for path in paths:
        below = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
        for file in chain([Path(path)], below):
            if file.is_socket():
                told = f"{file} is a socket that programs in it could use"
                raise SandboxError(f"{told}; keep what they may see apart from runs")


def sandbox_prefix(paths: Sequence[str], folder: str) -> list[str]:
    """What comes before a command that is to run in a sandbox, in `folder`. Raises SandboxError without bubblewrap."""
    layout = layout_for()
    shown = dict.fromkeys([sys.base_prefix, sys.prefix, *map(os.path.abspath, paths)])
    binds = (*layout.binds, *((os.path.realpath(path), path) for path in shown))
    mounts = bubblewrap_mounts(replace(layout, binds=binds, hidden=()), working_folder=True, folders=[folder])
    # Without --as-pid-1, so that bubblewrap's own process is the first one, and reaps what the command leaves behind.
    started = [*AS_NOBODY, *NEW_NAMESPACES, "--die-with-parent", *mounts, "--chdir", folder, "--"]
    return [find_bubblewrap(), *started]


def _try(prefix: Sequence[str], environment: dict[str, str]) -> None:
    """Raises SandboxError if Python does not start in the sandbox."""
    command = [*prefix, sys.executable, "-I", "-S", "-c", ""]
    try:
        tried = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(str(error)) from None
    if tried.returncode:
        raise SandboxError(" ".join(tried.stderr.decode(errors="replace").split()) or f"exit code {tried.returncode}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
