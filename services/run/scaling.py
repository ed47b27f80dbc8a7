"""Changes the number of a running run's samplers: further ones join, those with the highest numbers drain and leave."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tandem.protos import rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import TandemError, UserError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe, dump_recipe
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.tokens import Role, run_token
from tandem.services.run.children import ChildSpec
from tandem.services.run.endpoint import calling_credentials
from tandem.services.run.folder import CONFIG_FILE, write_text
from tandem.services.run.preflight import check_added_samplers
from tandem.services.run.process_group import SCALED_SERVICE, ProcessGroup

log = logging.getLogger(__name__)

DRAIN_SECONDS = 60.0
"""How long a leaving sampler may finish its groups. It then gives them back with the answers that are finished."""

SpecsOf = Callable[[Recipe], list[ChildSpec]]


class Scaling:
    """Scales the samplers of a local run. `specs_of` makes the children of a recipe.

    The number is written to the run's config.json, so that it holds when the run is resumed from there.
    """

    def __init__(self, recipe: Recipe, buffer: Buffer, processes: ProcessGroup, specs_of: SpecsOf) -> None:
        self._recipe = recipe
        self._buffer = buffer
        self._processes = processes
        self._specs_of = specs_of
        self._token = run_token(buffer.secret(), Role.operate)
        self._one_at_a_time = threading.Lock()
        processes.drain = self.drain

    def scale(self, service: str, replicas: int) -> None:
        """Orders the number of samplers; the supervisor starts and stops them. Raises UserError for another service and
        for more samplers than this machine can hold.
        """
        if service != SCALED_SERVICE:
            raise UserError(f"{service or 'a service without a name'} cannot be scaled; only {SCALED_SERVICE} can")
        if replicas < 0:
            raise UserError(f"{service}={replicas}: the number of samplers is at least 0")
        with self._one_at_a_time:
            self._order(replicas)

    def _order(self, replicas: int) -> None:
        changed = self._recipe.rollout.model_copy(update={"num_replicas": replicas})
        scaled = self._recipe.model_copy(update={"rollout": changed})
        check_added_samplers(scaled, replicas - self._recipe.rollout.num_replicas)
        write_text(self._recipe.folder / CONFIG_FILE, dump_recipe(scaled), private=True)
        self._recipe = scaled
        self._processes.set_replicas([spec for spec in self._specs_of(scaled) if spec.name.startswith(SCALED_SERVICE)])

    def drain(self, name: str) -> None:
        """Waits until a sampler has finished the groups it holds, at most `DRAIN_SECONDS`."""
        try:
            address = next(one.address for one in self._buffer.samplers() if one.id == name)
            with connect(address, self._token, calling_credentials(self._recipe)) as channel, translated():
                request = rollout_pb2.DrainRequest(timeout_seconds=DRAIN_SECONDS)
                rollout_pb2_grpc.RolloutServiceStub(channel).Drain(request, timeout=DRAIN_SECONDS + 5.0)
        except (StopIteration, TandemError) as error:  # it is still starting, or gone
            log.warning("%s leaves without draining: %s", name, error)
