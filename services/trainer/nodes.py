"""A trainer on several machines: each starts its own ranks, and all start theirs anew when one fails.

The machines meet in the run's Redis (`scripts/trainer_node.lua`), where each holds a seat under a lease, and so do the
ranks of one generation (`services/buffer/torch_store.py`). Nothing of this listens on a port.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

from tandem.protos.errors import UnavailableError
from tandem.services.buffer.connection import Connection, milliseconds
from tandem.services.trainer.ranks import STOPPED, LocalRanks

log = logging.getLogger(__name__)

MOST_FAILURES = 5
LEASE_SECONDS = 15.0
"""After this time without a report a machine counts as gone, also if only its connection to Redis is."""
_REPORT_SECONDS = 0.2
_GATHER_SECONDS = 600.0
_USER_ERROR = 2

State = Literal["waiting", "running", "finished", "failed", "ended", "left"]
StartRanks = Callable[[int, int], LocalRanks]
"""Starts this machine's ranks, given its seat and the generation."""


class View(NamedTuple):
    """What a machine learns when it reports: see the script."""

    seat: int
    generation: int
    seated: int
    waiting: int
    finished: bool
    exit_code: int


class Node:
    """The launcher on one of `num_nodes` machines."""

    def __init__(self, connection: Connection, num_nodes: int, start_ranks: StartRanks) -> None:
        self._connection = connection
        self._num_nodes = num_nodes
        self._start_ranks = start_ranks
        self._id = uuid.uuid4().hex
        self._ranks: LocalRanks | None = None
        self._generation = -1
        self._failures = 0
        self._waits_since = time.monotonic()

    def run(self, stop: threading.Event) -> int:
        """Runs until the ranks of all machines have succeeded; returns the exit code.

        That is 2 if a rank on any machine rejected the user's input, 1 if ranks of one machine failed more than
        `MOST_FAILURES` times, 143 if this machine was stopped. Raises UnavailableError if the other machines do not
        come, or Redis is unreachable.
        """
        try:
            while (code := self._step(stop)) is None:
                time.sleep(_REPORT_SECONDS)
            return code
        finally:
            self._end_ranks()
            with suppress(UnavailableError):  # then its lease expires
                self._report("left")

    def _step(self, stop: threading.Event) -> int | None:
        """One report, and what follows from it. Returns an exit code if that is all."""
        if stop.is_set():
            return self._step_to_stop()
        ended = None if self._ranks is None else self._ranks.exit_code()
        if ended:
            return self._note_failure(ended)
        state: State = "waiting" if self._ranks is None else "running" if ended is None else "finished"
        view = self._report(state)
        if view.exit_code >= 0:
            log.error("another machine gave up; its log names the cause")
            return view.exit_code
        if view.finished:
            return 0
        if self._ranks is not None and view.generation != self._generation:
            log.warning("the ranks of all machines start anew")
            self._end_ranks()
        elif self._ranks is None and view.seat >= 0 and view.waiting == self._num_nodes:
            log.info("starts ranks as machine %d of %d", view.seat, self._num_nodes)
            self._generation = view.generation
            self._ranks = self._start_ranks(view.seat, view.generation)
        elif self._ranks is None:
            self._check_patience(view)
        return None

    def _note_failure(self, code: int) -> int | None:
        self._failures += 1
        if code == _USER_ERROR or self._failures > MOST_FAILURES:
            code = _USER_ERROR if code == _USER_ERROR else 1
            self._report("ended", code)
            return code
        self._report("failed")
        self._end_ranks()
        return None

    def _step_to_stop(self) -> int | None:
        """Reports until the ranks have ended, because those of other machines take part in their orderly end."""
        if self._ranks is None:
            return STOPPED
        if not self._ranks.is_stopping:
            self._ranks.stop()
        code = self._ranks.exit_code()
        if code is None and self._report("running").generation != self._generation:
            return STOPPED
        return code

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.__exit__()
        self._ranks = None
        self._waits_since = time.monotonic()

    def _check_patience(self, view: View) -> None:
        if time.monotonic() - self._waits_since < _GATHER_SECONDS:
            return
        there = f"{view.seated} of {self._num_nodes} machines are there"
        if view.seat < 0:
            there = f"{there} without this one"
        raise UnavailableError(
            f"the trainer's machines did not come together within {_GATHER_SECONDS:g} s: {there}; run `tandem serve "
            "trainer` on each of trainer.num_nodes machines"
        )

    def _report(self, state: State, exit_code: int = -1) -> View:
        lease = milliseconds(LEASE_SECONDS)
        arguments = (self._id, self._num_nodes, state, self._generation, exit_code, lease)
        seat, generation, seated, waiting, finished, code = map(int, self._connection.run("trainer_node", *arguments))
        return View(seat, generation, seated, waiting, bool(finished), code)
