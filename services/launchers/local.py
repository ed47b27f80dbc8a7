"""The launcher of `tandem run`: a process group whose samplers and environment services may be more or fewer while the
run goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice
from math import inf

from tandem.protos import environments_pb2, environments_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import ALIVE_SECONDS
from tandem.services.config import Recipe
from tandem.services.control.launcher import SAMPLERS, Replica, kind_of, number_of
from tandem.services.launchers.children import ChildSpec
from tandem.services.launchers.machines import THIS_MACHINE, Machines
from tandem.services.launchers.process_group import SCALED_SERVICES, ProcessGroup
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.tokens import Role, run_token
from tandem.services.run.endpoint import calling_credentials

log = logging.getLogger(__name__)

DRAIN_SECONDS = 60.0
"""How long a leaving sampler may finish its groups. It then gives them back with the answers that are finished. As long
may the episodes end that a leaving environment service has; then they go on elsewhere.
"""

SpecsOf = Callable[[Recipe], list[ChildSpec]]


class LocalLauncher:
    """Has a process group start and stop replicas on `machines`. `specs_of` makes the children of a recipe."""

    scalable: Sequence[str] = SCALED_SERVICES

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        buffer: Buffer,
        processes: ProcessGroup,
        specs_of: SpecsOf,
        machines: Machines = THIS_MACHINE,
    ) -> None:
        self.name = name
        self._recipe = recipe
        self._buffer = buffer
        self._processes = processes
        self._specs_of = specs_of
        self._machines = machines
        self._token = run_token(buffer.secret(), Role.operate)
        self._replicas: dict[str, list[str]] = {service: [] for service in SCALED_SERVICES}
        """The names of the wanted ones of each service, by number."""
        processes.drain = self._wait_until_drained

    def first_children(self, replicas: Mapping[str, int]) -> list[ChildSpec]:
        """The children with which the run starts, with so many replicas of each service."""
        recipe = self._recipe
        for service, number in replicas.items():
            self._replicas[service] = [f"{service}-{index}" for index in range(number)]
            recipe = _with_replicas(recipe, service, number)
        for line in self._machines.shared_cores(recipe).values():
            self._processes.report(line)
        return self._specs_of(recipe)

    def check(self, service: str, replicas: int) -> None:
        added = replicas - len(self._replicas[service])
        self._machines.check_added(_with_replicas(self._recipe, service, replicas), service, added)

    def set_replicas(self, service: str, replicas: int) -> None:
        """Further ones get the smallest free numbers; those with the highest numbers leave."""
        kept = self._replicas[service][:replicas]
        taken = {*kept, *self._others(service)}
        free = (name for index in count() if (name := f"{service}-{index}") not in taken)
        if service == SAMPLERS and replicas > len(kept):
            lines = self._machines.shared_cores(_with_replicas(self._recipe, service, replicas))
            if service in lines:  # the trainer is as it was
                self._processes.report(lines[service])
        self._want(service, sorted([*kept, *islice(free, replicas - len(kept))], key=number_of))

    def drain(self, sampler: str) -> None:
        self._want(SAMPLERS, [name for name in self._replicas[SAMPLERS] if name != sampler])

    def replicas(self) -> Mapping[str, Replica]:
        return {name: Replica(*state) for name, state in self._processes.states().items()}

    def request_stop(self) -> None:
        self._processes.request_stop()

    def _want(self, service: str, names: list[str]) -> None:
        number = max((number_of(name) for name in names), default=-1) + 1
        specs = self._specs_of(_with_replicas(self._recipe, service, number))
        self._replicas[service] = names
        self._processes.set_replicas(service, [spec for spec in specs if spec.name in names])

    def _others(self, service: str) -> set[str]:
        """The environment services of the run that somebody has started by hand. Such samplers have no numbers of their
        own while `tandem run` starts some.
        """
        if service == SAMPLERS:
            return set()
        silences, own = self._buffer.silences(), self._processes.states().keys()
        there = {name for name in self._buffer.services() if silences.get(name, inf) <= ALIVE_SECONDS}
        return {name for name in there - own if kind_of(name) == service}

    def _wait_until_drained(self, name: str) -> None:
        """Waits until a replica has no work left, at most `DRAIN_SECONDS`."""
        try:
            addresses = {one.id: one.address for one in self._buffer.samplers()} | self._buffer.services()
            credentials, server_name = calling_credentials(self._recipe), self._recipe.run.server_name
            with connect(addresses[name], self._token, credentials, server_name) as channel, translated():
                if kind_of(name) == SAMPLERS:
                    request = rollout_pb2.DrainRequest(timeout_seconds=DRAIN_SECONDS)
                    rollout_pb2_grpc.RolloutServiceStub(channel).Drain(request, timeout=DRAIN_SECONDS + 5.0)
                else:
                    leave = environments_pb2.DrainEnvironmentsRequest(timeout_seconds=DRAIN_SECONDS)
                    environments_pb2_grpc.EnvironmentServiceStub(channel).Drain(leave, timeout=DRAIN_SECONDS + 5.0)
        except (KeyError, TandemError) as error:  # it is still starting, or gone
            log.warning("%s leaves without draining: %s", name, error)


def _with_replicas(recipe: Recipe, service: str, replicas: int) -> Recipe:
    if service == SAMPLERS:
        return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"num_replicas": replicas})})
    changed = recipe.environment.model_copy(update={"num_replicas": replicas})
    return recipe.model_copy(update={"environment": changed})
