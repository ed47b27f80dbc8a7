"""Reports which stage is starved and which service causes it, from the ledger and the registry alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from tandem.protos.errors import TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import Sampler
from tandem.services.process import Repeated

log = logging.getLogger(__name__)

STARVED_SECONDS = 30.0
_POLL_SECONDS = 2.0
_STAGES = ("prompts", "generated")


class Watchdog(Repeated):
    """Context manager: logs a line when the trainer has waited 30 s for a claim, and each time the wait doubles."""

    def __init__(self, buffer: Buffer, waiting_since: Callable[[], float | None], groups_per_batch: int) -> None:
        super().__init__("watchdog", _POLL_SECONDS, self._check)
        self._buffer = buffer
        self._waiting_since = waiting_since
        self._groups_per_batch = groups_per_batch
        self._still: dict[str, tuple[tuple[int, int], float]] = {}
        self._threshold = STARVED_SECONDS
        self.line = ""

    def _check(self) -> None:
        since = self._waiting_since()
        waited = 0.0 if since is None else time.monotonic() - since
        if waited < STARVED_SECONDS:
            self._threshold, self.line = STARVED_SECONDS, ""
        try:
            self._look(waited, say=waited >= self._threshold)
        except TandemError as error:
            self.line = f"trainer starved: {error}"
        if waited >= self._threshold:
            log.warning(self.line)
            self._threshold = 2 * waited

    def _look(self, waited: float, *, say: bool) -> None:
        counts = self._buffer.counts()
        now = time.monotonic()
        for stage in _STAGES:  # seconds since anything was claimed from the stage
            mark = counts[f"{stage}_leased"], counts[f"{stage}_waiting"]
            if self._still.get(stage, (None, 0.0))[0] != mark:
                self._still[stage] = (mark, now)
        if say:
            idle = {stage: now - since for stage, (_, since) in self._still.items()}
            self.line = diagnose(
                counts, self._buffer.samplers(), self._buffer.services(), idle, waited, self._groups_per_batch
            )


def diagnose(
    counts: Mapping[str, int],
    samplers: Sequence[Sampler],
    services: Mapping[str, str],
    idle_seconds: Mapping[str, float],
    waited_seconds: float,
    groups_per_batch: int,
) -> str:
    """Returns one line with the reason for the trainer's wait, found by going backwards through the stages.

    `idle_seconds` gives, for `prompts` and `generated`, the seconds since the stage's last claim or completion.
    """
    start = f"trainer starved for {waited_seconds:.0f} s: "
    claimed = f"{counts['scored_claimed']} of {groups_per_batch} groups of the next batch are there; "
    if counts["generated_waiting"] or counts["generated_leased"]:
        return start + claimed + _reward_fault(counts, services, idle_seconds["generated"])
    if counts["prompts_waiting"] or counts["prompts_leased"]:
        return start + claimed + _sampler_fault(counts, samplers, idle_seconds["prompts"])
    if "feed" not in services:
        return start + claimed + "no prompt is admitted; the feed has not registered"
    return start + claimed + "no prompt is admitted; see the feed's log"


def _reward_fault(counts: Mapping[str, int], services: Mapping[str, str], idle: float) -> str:
    waiting, leased = counts["generated_waiting"], counts["generated_leased"]
    if not any(name.partition("-")[0] == "reward" for name in services):
        return f"{waiting} groups wait in generated; no reward service has registered"
    if not leased:
        return f"{waiting} groups wait in generated; reward has claimed none for {idle:.0f} s"
    return f"reward has held {leased} groups for {idle:.0f} s without completing one ({waiting} more wait in generated)"


def _sampler_fault(counts: Mapping[str, int], samplers: Sequence[Sampler], idle: float) -> str:
    waiting, leased, version = counts["prompts_waiting"], counts["prompts_leased"], counts["published_version"]
    alive = [sampler for sampler in samplers if sampler.alive]
    if not alive:
        return f"{waiting + leased} groups are in prompts and no sampler is alive ({len(samplers)} were registered)"
    if not any(sampler.state == "LIVE" and sampler.version == version for sampler in alive):
        states = ", ".join(f"{sampler.id} is {sampler.state} at version {sampler.version}" for sampler in alive)
        return f"{waiting} groups wait in prompts, but no sampler carries version {version}: {states}"
    if not leased:
        return f"{waiting} groups wait in prompts; the samplers have claimed none for {idle:.0f} s"
    return (
        f"samplers have held {leased} groups for {idle:.0f} s without completing one ({waiting} more wait in prompts)"
    )
