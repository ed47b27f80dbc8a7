"""The launcher of `tandem run`: a process group whose samplers may be more or fewer while the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from tandem.protos import rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.control.launcher import Replica, number_of
from tandem.services.launchers.children import ChildSpec
from tandem.services.launchers.machines import THIS_MACHINE, Machines
from tandem.services.launchers.process_group import SCALED_SERVICE, ProcessGroup
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.tokens import Role, run_token
from tandem.services.run.endpoint import calling_credentials

log = logging.getLogger(__name__)

DRAIN_SECONDS = 60.0
"""How long a leaving sampler may finish its groups. It then gives them back with the answers that are finished."""

SpecsOf = Callable[[Recipe], list[ChildSpec]]


class LocalLauncher:
    """Has a process group start and stop samplers on `machines`. `specs_of` makes the children of a recipe."""

    scalable: Sequence[str] = (SCALED_SERVICE,)

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
        self._samplers: list[str] = []
        """The names of the wanted ones, by number."""
        processes.drain = self._wait_until_drained

    def first_children(self, samplers: int) -> list[ChildSpec]:
        """The children with which the run starts."""
        self._samplers = _names(samplers)
        return self._specs_of(self._with_samplers(samplers))

    def check(self, service: str, replicas: int) -> None:
        self._machines.check_added(self._with_samplers(replicas), replicas - len(self._samplers))

    def set_replicas(self, service: str, replicas: int) -> None:
        """Further ones get the smallest free numbers; those with the highest numbers leave."""
        kept = self._samplers[:replicas]
        free = [name for name in _names(replicas + len(kept)) if name not in kept]
        self._want(sorted([*kept, *free[: replicas - len(kept)]], key=number_of))

    def drain(self, sampler: str) -> None:
        self._want([name for name in self._samplers if name != sampler])

    def replicas(self) -> Mapping[str, Replica]:
        return {name: Replica(*state) for name, state in self._processes.states().items()}

    def request_stop(self) -> None:
        self._processes.request_stop()

    def _want(self, samplers: list[str]) -> None:
        numbers = [number_of(name) for name in samplers]
        specs = self._specs_of(self._with_samplers(max(numbers, default=-1) + 1))
        self._samplers = samplers
        self._processes.set_replicas([spec for spec in specs if spec.name in samplers])

    def _with_samplers(self, replicas: int) -> Recipe:
        changed = self._recipe.rollout.model_copy(update={"num_replicas": replicas})
        return self._recipe.model_copy(update={"rollout": changed})

    def _wait_until_drained(self, name: str) -> None:
        """Waits until a sampler has finished the groups it holds, at most `DRAIN_SECONDS`."""
        try:
            address = next(one.address for one in self._buffer.samplers() if one.id == name)
            credentials, server_name = calling_credentials(self._recipe), self._recipe.run.server_name
            with connect(address, self._token, credentials, server_name) as channel, translated():
                request = rollout_pb2.DrainRequest(timeout_seconds=DRAIN_SECONDS)
                rollout_pb2_grpc.RolloutServiceStub(channel).Drain(request, timeout=DRAIN_SECONDS + 5.0)
        except (StopIteration, TandemError) as error:  # it is still starting, or gone
            log.warning("%s leaves without draining: %s", name, error)


def _names(samplers: int) -> list[str]:
    return [f"{SCALED_SERVICE}-{number}" for number in range(samplers)]
