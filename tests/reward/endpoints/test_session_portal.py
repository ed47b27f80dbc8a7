"""The event loop thread of remote scorers ends with the program."""

from __future__ import annotations

import subprocess
import sys

UNCLOSED = """
import asyncio, threading
from contextlib import asynccontextmanager
from tandem.reward.endpoints.session_portal import ClosedError, SessionPortal

begun = threading.Event()

@asynccontextmanager
async def session():
    yield 7

async def wait_for_long(value):
    begun.set()
    await asyncio.sleep(3600)

def call():
    try:
        portal.run(wait_for_long)
    except ClosedError:
        pass

portal = SessionPortal("test", session)
threading.Thread(target=call, daemon=True).start()
assert begun.wait(30)
"""


def test_a_program_that_never_closes_its_portal_exits() -> None:
    done = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=60.0, check=False)
    assert (done.returncode, done.stderr) == (0, "")
