"""What the dashboard knows of one run: from its folder, its Redis and its services."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tandem.protos import control_pb2, control_pb2_grpc, reward_pb2, reward_pb2_grpc
from tandem.protos.errors import TandemError, UnavailableError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.starvation import Observation
from tandem.services.buffer.types import ALIVE_SECONDS
from tandem.services.config import Recipe, load_resolved
from tandem.services.dashboard.events import Events
from tandem.services.dashboard.figures import Figures
from tandem.services.dashboard.samples import Samples
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.tokens import Role, run_token
from tandem.services.run.endpoint import calling_credentials
from tandem.services.run.folder import CONFIG_FILE, SUMMARY_FILE, external_redis_url, running
from tandem.services.run.progress import HUNG_SECONDS
from tandem.services.run.watchdog import observe

Json = dict[str, object]

_RPC_SECONDS = 2.0
_ORDER_SECONDS = 30.0
_SECRET_SECONDS = 5.0  # strangers who try tokens cause no more questions to Redis
_MOST_JOBS = 100
_JOBS_SECONDS = 2.0
_WINDOW = 10  # looks over which rates of services are computed


@dataclass(slots=True)
class Seen:
    """What Redis and the controller said in one look."""

    known: Observation = field(default_factory=Observation)
    drop_errors: Mapping[str, str] = field(default_factory=dict)
    status: control_pb2.StatusReply | None = None


class RunSource:
    """One run. `look` reads its state; only one thread calls it.

    `stored_secret` reads the secret of a run that is not running, and raises TandemError if it cannot.
    """

    def __init__(self, folder: Path, stored_secret: Callable[[Path], str]) -> None:
        self.folder = folder
        self.key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self.recipe: Recipe = load_resolved(folder / CONFIG_FILE)
        self.name = self.recipe.run.run_id
        self.figures = Figures(folder, self.name)
        self.events = Events(folder, self.figures)
        self.samples = Samples(folder, Path(self.recipe.model.path))
        self._stored_secret = stored_secret
        self._secret = ""
        self._secret_known_until = 0.0
        self._buffer: Buffer | None = None
        self._url = ""
        self._lock = threading.Lock()
        self._channels: dict[tuple[str, Role], grpc.Channel] = {}
        self._addresses: dict[str, str] = {}
        self._asking_jobs = threading.Lock()
        self._jobs: list[Json] = []
        self._jobs_until = 0.0
        self._beats: deque[tuple[float, Mapping[str, Mapping[str, float]]]] = deque(maxlen=_WINDOW)

    # ---- access ----

    def secret(self) -> str:
        """The secret from which the run's tokens are made; "" if it cannot be read now."""
        with self._lock, suppress(TandemError):
            if time.monotonic() < self._secret_known_until:
                return self._secret
            self._secret_known_until = time.monotonic() + _SECRET_SECONDS
            buffer = self._connected()
            if buffer is not None:
                self._secret = buffer.secret()
            elif not self._secret:
                self._secret = self._stored_secret(self.folder)
        return self._secret

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self.samples.close()
        if self._buffer is not None:
            self._buffer.close()

    # ---- state ----

    def look(self) -> Json:
        """The state of the run as JSON. `fault` says why a part is missing."""
        self.figures.read()
        seen = Seen()
        fault = ""
        try:
            self._see(seen)
        except TandemError as error:
            fault = str(error)
        self.events.read(seen.status.decisions if seen.status else ())
        phase = self._phase(seen)
        runs = phase == "running"
        services = self._services(seen) if runs else []
        names = [str(one["name"]) for one in services]
        hung = [name for name in names if seen.known.silences.get(name, 0.0) > HUNG_SECONDS]
        counts = seen.known.counts or self.figures.final_counts()
        known = seen.known if runs else Observation(counts=counts)  # what does not run waits for nothing
        return {
            "key": self.key,
            "name": self.name,
            "time": time.time(),
            "phase": phase,
            "fault": fault,
            "plan": self._plan(),
            "counts": counts,
            "services": services,
            "desired": dict(seen.status.desired_replicas) if seen.status else {},
            "warnings": list(seen.status.warnings) if seen.status else [],
            "progress": self.figures.progress(known, self.recipe.run.total_batches, hung),
            "drop_errors": seen.drop_errors,
            "read": {**self.figures.sizes(), "event": self.events.listed[0].time if self.events.listed else 0.0},
        }

    def _see(self, seen: Seen) -> None:
        """Asks Redis, and the controller if the run has one."""
        with self._lock:
            buffer = self._connected()
        if buffer is None:
            return
        self.secret()
        seen.known = observe(buffer, self.recipe)
        self._addresses = buffer.services() | {one.id: one.address for one in seen.known.samplers}
        self._beats.append((time.monotonic(), seen.known.figures))
        seen.status = self._status()
        seen.drop_errors = buffer.drop_errors() if seen.known.counts.get("dropped") else {}

    def _connected(self) -> Buffer | None:
        """The run's buffer, or None if nothing runs there. A run that was started again has another Redis."""
        address = running(self.folder)
        url = external_redis_url(self.recipe) or (address.redis_url if address else "")
        if url != self._url or (url and self._buffer is None):
            if self._buffer is not None:
                self._buffer.close()
            self._buffer, self._url = None, url
            if url:
                self._buffer = Buffer(url, self.name, connect_timeout_seconds=_RPC_SECONDS)
        if self._buffer is not None and not self._buffer.exists():
            raise UnavailableError(f"Redis at {self._buffer.place} knows no run {self.name} yet")
        return self._buffer

    def _phase(self, seen: Seen) -> str:
        alive = any(seconds <= ALIVE_SECONDS for seconds in seen.known.silences.values())
        if seen.status is not None or running(self.folder) is not None or alive:
            return "running"
        return "finished" if (self.folder / SUMMARY_FILE).exists() else "stopped"

    def _plan(self) -> Json:
        run = self.recipe.run
        names = ("total_batches", "groups_per_batch", "staleness_budget", "hard_staleness_cap", "seed")
        return {**{name: getattr(run, name) for name in names}, "model": self.recipe.model.path}

    def _services(self, seen: Seen) -> list[Json]:
        """Every service and replica. Without a controller: those whose heartbeats come."""
        if seen.status is not None:
            found = [self._process(one) for one in seen.status.services]
        else:
            silences = seen.known.silences
            alive = [name for name, seconds in silences.items() if seconds < HUNG_SECONDS and name != "controller"]
            found = [{"name": name, "kind": name.partition("-")[0], "state": "running"} for name in sorted(alive)]
        samplers = {sampler.id: sampler for sampler in seen.known.samplers}
        for one in found:
            name = str(one["name"])
            sampler = samplers.get(name)
            one |= {"heartbeat_age": seen.known.silences.get(name), **self._rates(name)}
            one |= {} if sampler is None else {"weights": sampler.state, "version": sampler.version}
        return found

    @staticmethod
    def _process(one: control_pb2.StatusReply.Service) -> Json:
        fields = ("name", "kind", "state", "restarts", "activity", "paused")
        return {field: getattr(one, field) for field in fields}

    def _rates(self, name: str) -> Json:
        """Rates of a service over the last looks: share of time in which it worked, tokens a second; what it holds."""
        if not self._beats:
            return {}
        (then, before), (now, after) = self._beats[0], self._beats[-1]
        last, first, seconds = after.get(name, {}), before.get(name, {}), now - then
        rates: Json = {figure: last[figure] for figure in ("groups_held", "waiting_seconds") if figure in last}
        for figure, rate in (
            ("busy_seconds", "busy"),
            ("groups_busy_seconds", "busy"),
            ("sampled_tokens", "tokens_per_second"),
        ):
            if seconds > 0 and figure in last and last[figure] >= first.get(figure, 0.0) and first:
                rates.setdefault(rate, (last[figure] - first[figure]) / seconds)
        return rates

    # ---- calls ----

    def _status(self) -> control_pb2.StatusReply | None:
        if "controller" not in self._addresses:
            return None
        try:
            with self._controller(Role.read) as stub:
                reply: control_pb2.StatusReply = stub.Status(control_pb2.StatusRequest(), timeout=_RPC_SECONDS)
                return reply
        except TandemError:
            return None  # of an earlier life of the run, or it is busy: the registry still shows the services

    def order(self, role: Role, method: str, request: object) -> None:
        """Calls a method of ControlService with a token of this role. Raises TandemError if it is refused."""
        with self._controller(role) as stub:
            getattr(stub, method)(request, timeout=_ORDER_SECONDS)

    def jobs(self) -> list[Json]:
        """The newest reward jobs, newest first. Asks the reward service at most every two seconds, for all viewers.
        Raises TandemError if it does not answer.
        """
        with self._asking_jobs:
            if time.monotonic() > self._jobs_until:
                with self._called("reward", Role.read) as channel:
                    request = reward_pb2.ListJobsRequest(limit=_MOST_JOBS)
                    reply = reward_pb2_grpc.RewardServiceStub(channel).ListJobs(request, timeout=_RPC_SECONDS)
                self._jobs = [_job(job) for job in reply.jobs]
                self._jobs_until = time.monotonic() + _JOBS_SECONDS
            return self._jobs

    @contextmanager
    def _controller(self, role: Role) -> Iterator[control_pb2_grpc.ControlServiceStub]:
        with self._called("controller", role) as channel:
            yield control_pb2_grpc.ControlServiceStub(channel)

    @contextmanager
    def _called(self, service: str, role: Role) -> Iterator[grpc.Channel]:
        """A channel to a service of the run. Raises TandemError for what goes wrong inside."""
        address = self._addresses.get(service)
        if address is None:
            raise UnavailableError(f"run {self.name} has no {service} now; `tandem run` starts one")
        with self._lock:
            channel = self._channels.get((address, role))
            if channel is None:
                token, credentials = run_token(self._secret, role), calling_credentials(self.recipe)
                channel = connect(address, token, credentials, self.recipe.run.server_name)
                self._channels[address, role] = channel
        with translated():
            yield channel


def _job(job: reward_pb2.Job) -> Json:
    state = reward_pb2.Job.State.Name(job.state).lower()
    fields = ("job_id", "name", "priority", "num_items", "num_scored", "num_waiting", "mean_value", "created_at")
    return {**{name: getattr(job, name) for name in fields}, "state": state, "num_unscored": dict(job.num_unscored)}
