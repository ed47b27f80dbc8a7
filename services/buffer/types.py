"""What the buffer's verbs take and return: stages, states, claims, samplers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.protos.types import RowHeader

Stage = Literal["prompts", "generated"]
FailureKind = Literal["infrastructure", "data", "voluntary"]
Released = Literal["requeued", "dropped", "refused"]
SamplerState = Literal["JOINING", "LIVE", "STALE"]
Told = Literal["", "replaced", "left", "finished", "stopped"]
"""The answer to a heartbeat: a later start has the service's name, the service is to leave, or the run has ended, by
itself or by an order.
"""

ALIVE_SECONDS = 10.0
"""A service counts as alive for so long after its last heartbeat."""

LIVE_STATES = (
    *("prompts_waiting", "prompts_leased", "generated_waiting", "generated_leased"),
    *("scored_waiting", "scored_claimed"),
)
STATES = (*LIVE_STATES, "trained", "committed", "dropped")
"""The states of a group, in order. `admitted` is always the sum over them."""


@dataclass(frozen=True, slots=True)
class Admission:
    """State for the feed: `free` credits, `wanted` groups that the run still needs, the next position `cursor`, and the
    number of prompts that are set aside.
    """

    free: int
    wanted: int
    cursor: int
    num_set_aside: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A leased group. `partial` has the partial results that an earlier holder saved by `renew`."""

    group_id: str
    stage: Stage
    token: int
    payload: bytes
    partial: bytes | None


@dataclass(frozen=True, slots=True)
class ScoredClaim:
    """A scored group claimed by the trainer; `Buffer.read` fetches its payload."""

    group_id: str
    headers: tuple[RowHeader, ...]


@dataclass(frozen=True, slots=True)
class Sampler:
    """One rollout replica. `version` and `incarnation` are those of its last completed update, -1 before the first."""

    id: str
    address: str
    state: SamplerState
    version: int
    incarnation: int
    tensor_parallel_size: int
    alive: bool
    """Whether it sent a heartbeat within the requested time."""
    generation: int
    """Of the process that registered last under this id. A later one has a higher one."""
    num_starts: int = 1
    """Number of processes that have registered under this id."""
