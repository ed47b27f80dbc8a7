"""What the controller demands of a launcher, and launchers for services that others have started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

from tandem.protos.errors import UserError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.orders import Orders
from tandem.services.buffer.types import ALIVE_SECONDS

SAMPLERS = "rollout"
"""The kind of service whose replicas are samplers."""
ENVIRONMENTS = "environments"
"""The kind of service that runs environments, if the recipe has such services."""
_FORGOTTEN_SECONDS = 300.0  # a replica that is silent for longer is not shown


class Replica(NamedTuple):
    """One service of a run. `state` is one of StatusReply.Service."""

    state: str
    pid: int
    restarts: int


class Launcher(Protocol):
    """Starts and stops replicas. Raises UserError for what it cannot do. Thread-safe."""

    @property
    def name(self) -> str: ...

    @property
    def scalable(self) -> Sequence[str]:
        """The kinds of services that may have several replicas."""

    def check(self, service: str, replicas: int) -> None:
        """Raises UserError if a scalable service cannot have so many replicas."""

    def set_replicas(self, service: str, replicas: int) -> None:
        """Begins to start or stop replicas until there are so many. May be called again with the same number."""

    def drain(self, sampler: str) -> None:
        """Begins to let a sampler finish its groups and leave for good. The others stay."""

    def replicas(self) -> Mapping[str, Replica]:
        """The services of the run by name."""

    def request_stop(self) -> None:
        """Begins to stop all services of the run."""


class Registered:
    """Services that somebody else has started, as the registry shows them. They end when the run does."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.orders = Orders(buffer.connection)

    def replicas(self) -> dict[str, Replica]:
        leaving, services, samplers = self.orders.samplers("left"), self.buffer.services(), self.buffer.samplers()
        silences = self.buffer.silences()  # last: a service that registers meanwhile has none in an earlier look
        found = {}
        for name in services:
            found[name] = Replica("running" if silences.get(name, inf) <= ALIVE_SECONDS else "stopped", 0, 0)
        for sampler in samplers:
            state = "stopped"
            if sampler.alive:
                state = "draining" if sampler.id in leaving else "running" if sampler.version >= 0 else "starting"
            found[sampler.id] = Replica(state, 0, sampler.num_starts - 1)
        found.pop("controller", None)
        return {name: one for name, one in found.items() if silences.get(name, inf) <= _FORGOTTEN_SECONDS}

    def request_stop(self) -> None:
        self.orders.end_run("stopped")


class StartedByHand(Registered):
    """The launcher `none`. Of the samplers that exist, the first ones work, as many as are ordered; the others stand
    by: they claim nothing, but receive weights. A sampler that is drained ends by itself.
    """

    name = "none"
    scalable: Sequence[str] = (SAMPLERS,)

    def check(self, service: str, replicas: int) -> None:
        existing = len(working_samplers(self.replicas()))
        if replicas > existing:
            up = f"docker compose up --detach --no-recreate --scale {service}={replicas} {service}"
            remedy = f"start more with `tandem serve {service} RECIPE`, or under compose with `{up}` (with the profile "
            remedy += f"gpu the name is {service}-gpu), then order again"
            raise UserError(f"{service}={replicas}: {existing} are running, and this controller starts none; {remedy}")

    def set_replicas(self, service: str, replicas: int) -> None:
        """Nothing starts or stops: `standby` says who works."""

    def standby(self, replicas: int) -> list[str]:
        """The samplers that are to stand by if so many are ordered."""
        return working_samplers(self.replicas())[replicas:]

    def drain(self, sampler: str) -> None:
        """It learns the order with its next heartbeat."""


def kind_of(name: str) -> str:
    """The kind of service of a replica: `rollout` for `rollout-1`."""
    return name.partition("-")[0]


def number_of(name: str) -> int:
    """The number of a replica: 1 for `rollout-1`, 0 for `reward`."""
    return int(name.partition("-")[2] or 0)


def working_samplers(replicas: Mapping[str, Replica]) -> list[str]:
    """The samplers that run or start, and do not leave, by number."""
    gone = ("stopped", "failed", "draining")
    names = [name for name, one in replicas.items() if kind_of(name) == SAMPLERS and one.state not in gone]
    return sorted(names, key=number_of)
