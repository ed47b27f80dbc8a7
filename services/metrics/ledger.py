"""The figures of a run as a whole, which the controller shows: ledger, credits, samplers, heartbeats."""

from __future__ import annotations

from collections import Counter

from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import STATES
from tandem.services.metrics.names import Figures


def ledger_figures(buffer: Buffer, num_credits: int) -> Figures:
    """Reads the run's figures from Redis. Raises UnavailableError if it cannot be reached."""
    counts = buffer.counts()
    samplers = Counter(f"samplers_{sampler.state}" for sampler in buffer.samplers() if sampler.alive)
    return {
        **counts,
        "mismatch": counts["admitted"] - sum(counts[state] for state in STATES),
        "credits": num_credits,
        **dict.fromkeys(("samplers_JOINING", "samplers_LIVE", "samplers_STALE"), 0),
        **samplers,
        **{f"silence_{name}": seconds for name, seconds in buffer.silences().items()},
    }
