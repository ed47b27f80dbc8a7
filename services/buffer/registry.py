"""The registry of a run: samplers with their versions, services with their addresses, and their figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from tandem.services.buffer.connection import Connection

SamplerState = Literal["JOINING", "LIVE", "STALE"]


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
    """Number of processes that have registered under this id."""


class Registry:
    """Registration and heartbeats of services, and the admission of samplers."""

    connection: Connection

    def __init__(self) -> None:
        self._generations: dict[str, int] = {}

    def register_sampler(self, sampler_id: str, address: str, tensor_parallel_size: int) -> None:
        """Registers a sampler that has just started, as JOINING, and requeues the leases of its predecessor.

        From then on, claims of the earlier process are refused (FencedError) and its heartbeats are ignored.
        """
        self._generations[sampler_id] = int(
            self.connection.run("register_sampler", sampler_id, address, tensor_parallel_size)
        )

    def register_service(self, name: str, address: str) -> None:
        """Registers a service that has just started, and requeues the leases of its predecessor."""
        self.connection.run("register_service", name, address)

    def heartbeat(self, name: str, figures: Mapping[str, float]) -> None:
        """Reports that `name` is alive and stores its figures: sums since its process started. Send one per second."""
        self.connection.run("heartbeat", name, self._generation(name), json.dumps(dict(figures)))

    def samplers(self, alive_within_seconds: float = 10) -> list[Sampler]:
        """Returns all samplers that have ever registered, ordered by id."""
        reply = self.connection.run("samplers_alive", str(alive_within_seconds))
        found = []
        for sampler_id, alive, address, state, version, incarnation, width, generation in _rows(reply, 8):
            found.append(
                Sampler(
                    id=sampler_id.decode(),
                    address=address.decode(),
                    state=cast(SamplerState, state.decode()),
                    version=int(version),
                    incarnation=int(incarnation),
                    tensor_parallel_size=int(width),
                    alive=bool(int(alive)),
                    generation=int(generation),
                )
            )
        return found

    def admit_sampler(self, incarnation: int, sampler_id: str | Sampler, version: int) -> bool:
        """Makes a sampler that was updated to `version` LIVE, if that is still the published version.

        Pass the `Sampler` as read when its update began, so that a sampler that has restarted since is not admitted.
        Raises FencedError.
        """
        return bool(self.connection.run("admit_sampler", incarnation, *with_generations([sampler_id]), version))

    def services(self) -> dict[str, str]:
        """Returns the address of every registered service by name."""
        return {name.decode(): address.decode() for name, address in self.connection.hash("services").items()}

    def figures(self) -> dict[str, dict[str, float]]:
        """Returns the latest figures of every service and sampler by name."""
        return {name.decode(): json.loads(text) for name, text in self.connection.hash("figures").items()}

    def silences(self) -> dict[str, float]:
        """Returns the seconds since the last heartbeat of every service and sampler by name."""
        seconds, microseconds = self.connection.retried(self.connection.redis.time)
        now_ms = seconds * 1000 + microseconds / 1000
        return {name.decode(): (now_ms - float(beat)) / 1000 for name, beat in self.connection.hash("beats").items()}

    def published_version(self) -> int:
        """The published policy version, -1 before the first publication."""
        return int(self.connection.hash("meta").get(b"published_version", -1))

    def _generation(self, name: str) -> int | str:
        return self._generations.get(name, "")


def with_generations(samplers: Sequence[str | Sampler]) -> list[str | int]:
    """Returns id and generation of each sampler for the scripts. The generation of a plain id is not checked."""
    pairs: list[str | int] = []
    for sampler in samplers:
        pairs.extend((sampler.id, sampler.generation) if isinstance(sampler, Sampler) else (sampler, ""))
    return pairs


def _rows(reply: Sequence[bytes], width: int) -> list[Sequence[bytes]]:
    return [reply[first : first + width] for first in range(0, len(reply), width)]
