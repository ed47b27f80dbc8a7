"""Asks Redis what a run waits for, and says it once it has waited for long (`services/buffer/starvation.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.protos.errors import TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.orders import Orders
from tandem.services.buffer.starvation import Observation, Verdict, diagnose
from tandem.services.config import Recipe
from tandem.services.process import Repeated

log = logging.getLogger(__name__)

STARVED_SECONDS = 30.0
"""A wait that is said in logs and on the console, and again each time that it doubles."""
_POLL_SECONDS = 2.0


def observe(buffer: Buffer, recipe: Recipe) -> Observation:
    """Asks Redis. Raises UnavailableError if it cannot be reached."""
    return Observation(
        counts=buffer.counts(),
        samplers=buffer.samplers(),
        silences=buffer.silences(),
        figures=buffer.figures(),
        activities=buffer.activities(),
        paused=frozenset(Orders(buffer.connection).samplers("paused")),
        num_credits=recipe.credits,
        groups_per_batch=recipe.run.groups_per_batch,
    )


class Watchdog(Repeated):
    """Context manager: says in the log what is starved, after 30 s, and each time the wait doubles."""

    def __init__(self, buffer: Buffer, recipe: Recipe) -> None:
        super().__init__("watchdog", _POLL_SECONDS, self._check)
        self._buffer = buffer
        self._recipe = recipe
        self._threshold = STARVED_SECONDS

    def _check(self) -> None:
        try:
            verdict = diagnose(observe(self._buffer, self._recipe))
        except TandemError:  # the connection says so
            return
        self._threshold = said(verdict, self._threshold, log.warning)


def said(verdict: Verdict, threshold: float, report: Callable[[str], None]) -> float:
    """Reports a verdict whose seconds have reached the threshold. Returns the next threshold."""
    if verdict.seconds < STARVED_SECONDS:
        return STARVED_SECONDS
    if verdict.seconds < threshold:
        return threshold
    report(verdict.line)
    return 2 * verdict.seconds
