"""The controller of a run: takes the orders of operators and of the autoscaler, keeps them in Redis, and has the
launcher carry them out. There is one controller at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import AbstractContextManager, suppress

from tandem.protos.errors import FencedError, RunExistsError, TandemError, UnavailableError, UserError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.orders import ALL, Orders, ReplicaOrder, SamplerOrder
from tandem.services.buffer.starvation import REDIS_AWAY_SECONDS, Observation
from tandem.services.config import Recipe
from tandem.services.control.launcher import ENVIRONMENTS, SAMPLERS, Launcher, StartedByHand, kind_of, working_samplers
from tandem.services.process import Repeated
from tandem.services.run.watchdog import observe

log = logging.getLogger(__name__)

LEASE_SECONDS = 6.0
"""After this time without a sign of its controller a run may have another one."""
_TICK_SECONDS = 1.0
_POLL_SECONDS = 0.1


class Lease(AbstractContextManager["Lease"]):
    """Makes this process the run's controller. Waits for the lease of one that was killed. An `owner` that takes over
    from itself need not wait. Raises RunExistsError if another controller is alive.
    """

    def __init__(self, buffer: Buffer, owner: str) -> None:
        self.owner = owner
        self._buffer = buffer
        self._orders = Orders(buffer.connection)

    def __enter__(self) -> Lease:
        deadline = time.monotonic() + LEASE_SECONDS + _TICK_SECONDS
        while not self._orders.hold(self.owner, LEASE_SECONDS):
            if time.monotonic() > deadline:
                place = self._buffer.services().get("controller", "an unknown address")
                remedy = "use that one, or stop it first"
                raise RunExistsError(f"run {self._buffer.run_id} has a controller already, at {place}; {remedy}")
            time.sleep(_POLL_SECONDS)
        return self

    def renew(self) -> None:
        """Raises FencedError if another controller has the run now: this one was silent for too long."""
        if not self._orders.hold(self.owner, LEASE_SECONDS):
            raise FencedError(f"run {self._buffer.run_id} has another controller now")

    def __exit__(self, *_exception: object) -> None:
        with suppress(TandemError):  # it expires
            self._orders.hold(self.owner, 0.0)


class Controller(AbstractContextManager["Controller"]):
    """Takes orders, one at a time. Within the `with` block it renews its lease every second."""

    def __init__(self, recipe: Recipe, buffer: Buffer, launcher: Launcher, lease: Lease) -> None:
        self.recipe = recipe
        self.buffer = buffer
        self.launcher = launcher
        self.orders = Orders(buffer.connection)
        self.failure: FencedError | None = None
        """Set once another controller has taken over; this one's orders are then refused."""
        self._lease = lease
        self._one_at_a_time = threading.Lock()
        self._ticking = Repeated("controller", _TICK_SECONDS, self._tick)
        self._fault = ""
        self._answered_at = time.monotonic()

    def __enter__(self) -> Controller:
        self._ticking.__enter__()
        return self

    def __exit__(self, kind: object, leaving: object, traceback: object) -> None:
        self._ticking.__exit__(kind, leaving, traceback)

    def observe(self) -> Observation:
        """What is known of the run. Nothing but its silence if Redis is away. Raises UnavailableError if it goes away
        now.
        """
        silence = self._redis_silence
        return Observation(redis_silence=silence) if silence > REDIS_AWAY_SECONDS else observe(self.buffer, self.recipe)

    def published_version(self) -> int:
        """-1 before the first publication, and while Redis is away."""
        return -1 if self._redis_silence > REDIS_AWAY_SECONDS else self.buffer.published_version()

    def desired(self) -> dict[str, int]:
        """The wanted number of replicas by service: as ordered, else as many as there are."""
        ordered, replicas = self.orders.replicas(), self.launcher.replicas()
        there = {
            service: sum(kind_of(name) == service and one.state != "stopped" for name, one in replicas.items())
            for service in self._scalable
        }
        there[SAMPLERS] = len(working_samplers(replicas))
        return {service: ordered[service].replicas if service in ordered else there[service] for service in there}

    def scale(self, service: str, replicas: int) -> None:
        """Orders the number of replicas. Raises UserError for a service that cannot have several, and for more than the
        launcher can start.
        """
        scalable = self._scalable
        if service not in scalable:
            can = f"only {' and '.join(scalable)} can under the launcher {self.launcher.name}"
            if service in self.launcher.scalable:
                can = "environment.service is false: the samplers run the environments"
            raise UserError(f"{service or 'a service without a name'} cannot be scaled; {can}")
        least = 0 if service == SAMPLERS else 1
        if replicas < least:
            raise UserError(f"{service}={replicas}: there must be at least {least}")
        with self._one_at_a_time:
            self.launcher.check(service, replicas)
            now = ReplicaOrder(self.desired()[service], self._configured(service), pending=False)
            before = self.orders.replicas().get(service, now)
            self._order_replicas(service, replicas, pending=True)
            try:
                self.launcher.set_replicas(service, replicas)
            except UserError:
                self.orders.order_replicas(self._lease.owner, service, before)
                raise
            self._order_replicas(service, replicas, pending=False)
        log.info("%s: %d replicas ordered", service, replicas)

    def drain(self, sampler: str) -> None:
        """Lets a sampler leave for good. Raises UserError if there is none of this name."""
        with self._one_at_a_time:
            self._check_sampler(sampler)
            wanted = max(0, self.desired()[SAMPLERS] - 1)
            self.launcher.drain(sampler)
            self._order_replicas(SAMPLERS, wanted, pending=False)
            if isinstance(self.launcher, StartedByHand):
                self.orders.order_samplers(self._lease.owner, "left", {*self.orders.samplers("left"), sampler})
        log.info("%s is to leave", sampler)

    def pause(self, sampler: str) -> list[str]:
        """Lets a sampler, or with "" all, claim no more prompts. Returns the samplers that are paused by that."""
        with self._one_at_a_time:
            paused = self.orders.samplers("paused")
            samplers = self._samplers()
            if sampler:
                self._check_sampler(sampler)
                samplers = [sampler]
            self.orders.order_samplers(self._lease.owner, "paused", {*paused, sampler or ALL})
        log.info("paused: %s", ", ".join(samplers))
        return samplers

    def resume(self, sampler: str) -> list[str]:
        """Lets a paused sampler, or with "" all, claim prompts again. Returns the samplers that are resumed by that."""
        with self._one_at_a_time:
            samplers, paused = self._samplers(), self.orders.samplers("paused")
            if ALL in paused:
                paused = set(samplers)
            if sampler:
                if sampler not in paused:  # one that is paused may be down
                    self._check_sampler(sampler)
                samplers = [sampler]
            self.orders.order_samplers(self._lease.owner, "paused", paused - {sampler} if sampler else ())
        log.info("resumed: %s", ", ".join(samplers))
        return [one for one in samplers if one in paused]

    def checkpoint(self) -> None:
        """Lets the trainer write a checkpoint after the batch at hand."""
        with self._one_at_a_time:
            self.orders.order_checkpoint(self._lease.owner)
        log.info("the trainer is to write a checkpoint")

    def stop(self) -> None:
        """Ends the run."""
        log.info("the run is to stop")
        self.launcher.request_stop()

    def first_replicas(self, service: str, configured: int) -> int:
        """The number to start a service with: the one last ordered, but that of the recipe if it has changed since."""
        ordered = self.orders.replicas().get(service)
        if ordered is not None and ordered.configured == configured:
            return ordered.replicas
        self.orders.order_replicas(self._lease.owner, service, ReplicaOrder(configured, configured, pending=False))
        return configured

    def carry_out(self) -> None:
        """Carries out the orders that an earlier controller took before it was killed."""
        with self._one_at_a_time:
            for service, order in self.orders.replicas().items():
                if order.pending and service in self._scalable:
                    self.launcher.set_replicas(service, order.replicas)
                    self._order_replicas(service, order.replicas, pending=False)

    @property
    def _scalable(self) -> list[str]:
        """The services of this run that may have several replicas."""
        served = self.recipe.environment.service
        return [service for service in self.launcher.scalable if served or service != ENVIRONMENTS]

    @property
    def _redis_silence(self) -> float:
        """Seconds since Redis last answered."""
        return time.monotonic() - self._answered_at

    def _order_replicas(self, service: str, replicas: int, *, pending: bool) -> None:
        order = ReplicaOrder(replicas, self._configured(service), pending)
        self.orders.order_replicas(self._lease.owner, service, order)

    def _configured(self, service: str) -> int:
        recipe = self.recipe
        numbers = {SAMPLERS: recipe.rollout.num_replicas, ENVIRONMENTS: recipe.environment.num_replicas}
        return numbers.get(service, 1)

    def _samplers(self) -> list[str]:
        return working_samplers(self.launcher.replicas())

    def _check_sampler(self, name: str) -> None:
        samplers = self._samplers()
        if name not in samplers:
            there = f"there are {', '.join(samplers)}" if samplers else "no sampler is running"
            raise UserError(f"no sampler {name!r} runs; {there}")

    def _tick(self) -> None:
        try:
            self._lease.renew()
            self._answered_at = time.monotonic()
            if isinstance(self.launcher, StartedByHand):
                with self._one_at_a_time:
                    self._tell_samplers(self.launcher)
            self._fault = ""
        except FencedError as error:
            self._answered_at = time.monotonic()
            if self.failure is None:
                log.error("%s; this one takes no more orders", error)
            self.failure = error
        except TandemError as error:  # Redis is restarting or full, or the launcher refuses
            if not isinstance(error, UnavailableError):
                self._answered_at = time.monotonic()
            if str(error) != self._fault:
                log.warning("%s", error)
            self._fault = str(error)

    def _tell_samplers(self, launcher: StartedByHand) -> None:
        """Says who stands by, and forgets who has left: another process may get its name."""
        order, states = self.orders.replicas().get(SAMPLERS), launcher.replicas()
        wanted: dict[SamplerOrder, set[str]] = {
            "standby": set(launcher.standby(order.replicas)) if order is not None else set(),
            "left": {
                name for name in self.orders.samplers("left") if name in states and states[name].state != "stopped"
            },
        }
        for what, samplers in wanted.items():
            if samplers != self.orders.samplers(what):
                self.orders.order_samplers(self._lease.owner, what, samplers)
