"""The figures of a run as a whole, which the controller shows: ledger, credits, samplers, heartbeats."""

from __future__ import annotations

from collections import Counter

from tandem.services.buffer.starvation import CAUSES, Observation, diagnose
from tandem.services.buffer.types import STATES
from tandem.services.metrics.names import Figures


def ledger_figures(seen: Observation) -> Figures:
    """The figures of what is known of a run; without an answer of Redis, only what is starved."""
    verdict, counts = diagnose(seen), seen.counts
    starved = {f"starved_{cause}": verdict.seconds if cause == verdict.cause else 0.0 for cause in CAUSES}
    if not counts:
        return starved
    samplers = Counter(f"samplers_{sampler.state}" for sampler in seen.samplers if sampler.alive)
    return {
        **starved,
        **counts,
        "mismatch": counts["admitted"] - sum(counts[state] for state in STATES),
        "credits": seen.num_credits,
        **dict.fromkeys(("samplers_JOINING", "samplers_LIVE", "samplers_STALE"), 0),
        **samplers,
        **{f"silence_{name}": seconds for name, seconds in seen.silences.items()},
    }
