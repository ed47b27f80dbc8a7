"""What a run shows on a real (pseudo-)terminal: a bar that fits it, also without colours; lines on a dumb one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from tests.support.paths import ROOT

PROGRAM = """
from types import SimpleNamespace
from rich.console import Console
from tandem.services.run.progress import Progress, ProgressSnapshot
snapshot = ProgressSnapshot(step=20, total=40, reward=0.5, seconds_left=60.0)
watch = SimpleNamespace(snapshot=snapshot, sample=lambda: snapshot, take_steps=list)
with Progress(watch, dict, Console()):
    pass
"""
BAR = re.compile(r"20/40 +(━+[╸╺]?━*) *\d:\d\d")


def shown(columns: int, **environment: str) -> str:
    """The output of the program on a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**plain, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 65536):
            said += piece
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0, said
    return said.decode()


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("columns", [120, 80, 40])
def test_half_of_the_bar_is_filled_and_lines_fit_the_terminal(columns: int) -> None:
    said = shown(columns, NO_COLOR="1")
    lines = [line.rstrip("\r") for line in without_escapes(said).split("\n")]
    assert max(map(len, lines)) <= columns
    found = BAR.search(said)
    assert found is not None, said
    assert 4 <= len(found[1]) <= 15, "half of the steps are done; what is left is not drawn without colours"


def test_with_colours_the_rest_of_the_bar_is_drawn_too() -> None:
    said = shown(80)
    assert "\x1b[" in said
    found = BAR.search(without_escapes(said))
    assert found is not None and len(found[1]) == 30


def test_no_color_has_no_colours() -> None:
    said = shown(80, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38;)[0-9;]*m", said)


def test_a_dumb_terminal_gets_lines_without_escapes() -> None:
    said = shown(80, TERM="dumb")
    assert "\x1b" not in said and "━" not in said
    assert "step 20/40" in said
