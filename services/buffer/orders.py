"""Orders of an operator, which every service of the run follows, also one that starts later: they are in Redis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, cast

from tandem.services.buffer.connection import Connection, milliseconds

ALL = "*"
"""In a set of paused samplers: every sampler, also one that joins later."""

SamplerOrder = Literal["paused", "standby", "left"]
"""They claim no prompts: until they are resumed, while more samplers run than are ordered, or because they leave."""

_CHECKPOINT = "checkpoint_wanted"


class ReplicaOrder(NamedTuple):
    """The ordered number of replicas of a service."""

    replicas: int
    configured: int
    """The number in the recipe when it was ordered; -1: unknown."""
    pending: bool
    """It may not have been carried out yet."""


class Orders:
    """The orders of one run. Thread-safe. Those that a controller gives raise FencedError if it is not the current one,
    and UnavailableError if the run does not exist yet.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def end_run(self, how: Literal["finished", "stopped"]) -> None:
        """Ends the run: its services learn it with their next heartbeat, and exit with code 0."""
        self._connection.run("end_run", how)

    def ended(self) -> str:
        """How the run ended: `finished` or `stopped`, "" while it goes on."""
        return self._connection.hash("meta").get(b"ended", b"").decode()

    def hold(self, owner: str, lease_seconds: float) -> bool:
        """Makes `owner` the run's controller for this time, 0: no longer. False if another one is."""
        return bool(self._connection.run("hold_controller", owner, milliseconds(lease_seconds)))

    def has_controller(self) -> bool:
        """Whether a controller holds the run. One that was killed still does for the rest of its lease."""
        redis, key = self._connection.redis, self._connection.key("controller")
        return self._connection.retried(lambda: redis.get(key)) is not None

    def replicas(self) -> dict[str, ReplicaOrder]:
        """The ordered numbers of replicas by service."""
        fields = {name.decode(): int(value) for name, value in self._connection.hash("orders").items()}
        return {
            name.removeprefix("replicas:"): ReplicaOrder(
                number,
                fields.get(name.replace("replicas", "configured"), -1),
                bool(fields.get(name.replace("replicas", "pending"), 0)),
            )
            for name, number in fields.items()
            if name.startswith("replicas:")
        }

    def order_replicas(self, owner: str, service: str, order: ReplicaOrder) -> None:
        fields = {"replicas": order.replicas, "configured": order.configured, "pending": int(order.pending)}
        flat = [value for name, number in fields.items() for value in (f"{name}:{service}", number)]
        self._connection.run("order", owner, "replicas", *flat)

    def samplers(self, order: SamplerOrder) -> set[str]:
        """The samplers to which an order applies."""
        redis, key = self._connection.redis, self._connection.key(order)
        members = self._connection.retried(lambda: cast("set[bytes]", redis.smembers(key)))
        return {member.decode() for member in members}

    def order_samplers(self, owner: str, order: SamplerOrder, samplers: Iterable[str]) -> None:
        """From now on the order applies to these samplers only."""
        self._connection.run("order", owner, order, *sorted(samplers))

    def order_checkpoint(self, owner: str) -> None:
        """The trainer is to write a checkpoint."""
        self._connection.run("order", owner, _CHECKPOINT, "wanted")

    def checkpoint_wanted(self) -> bool:
        """Whether a checkpoint was ordered and is not written yet."""
        redis, key = self._connection.redis, self._connection.key(_CHECKPOINT)
        return bool(self._connection.retried(lambda: redis.exists(key)))

    def checkpoint_written(self) -> None:
        """Ends the order of a checkpoint, if there is one."""
        redis, key = self._connection.redis, self._connection.key(_CHECKPOINT)
        self._connection.retried(lambda: redis.delete(key))
