"""What the feed, the reward service and the trainer show of themselves: a gRPC address with Info, a place in the
registry, a heartbeat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import grpc

from tandem.protos import common_pb2
from tandem.protos.errors import TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.rpc.limits import DEFAULT_RPC_LIMITS, RpcLimits
from tandem.services.rpc.server import ServerThread
from tandem.services.run.control import software_version

_HEARTBEAT_SECONDS = 1.0


class ServiceInfo:
    """Context manager: listens, registers as `name`, and beats every second until it is left.

    Raises:
        EnvironmentLackError: on entry, if the port is in use.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        buffer: Buffer,
        *,
        figures: Callable[[], Mapping[str, float]],
        activity: Callable[[], str],
        policy_version: Callable[[], int] = lambda: -1,
        port: int = 0,
        register: Callable[[grpc.aio.Server], None] = lambda server: None,
        service_names: Sequence[str] = (),
        on_stop: Callable[[], None] = lambda: None,
        intake: RpcLimits = DEFAULT_RPC_LIMITS,
    ) -> None:
        self._name = name
        self._recipe = recipe
        self._buffer = buffer
        self._figures = figures
        self._activity = activity
        self._policy_version = policy_version
        self._port = port
        self._register = register
        self._service_names = service_names
        self._on_stop = on_stop
        self._intake = intake
        self._started_at = time.time()
        self._ended = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.address = ""

    def __enter__(self) -> ServiceInfo:
        self._server = ServerThread(
            self._recipe.run.host,
            self._port,
            info=self._info,
            register=self._register,
            service_names=self._service_names,
            on_stop=self._on_stop,
            intake=self._intake,
        )
        self.address = self._server.address
        self._buffer.register_service(self._name, self.address)
        self._pulse.start()
        print(f"{self._name}: listens on {self.address}", flush=True)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ended.set()
        self._server.stop(grace_seconds=0.5)
        self._pulse.join(timeout=5.0)

    def _beat(self) -> None:
        missed = False
        while not self._ended.wait(_HEARTBEAT_SECONDS):
            try:
                self._buffer.heartbeat(self._name, self._figures())
                missed = False
            except (
                TandemError
            ) as error:  # a missed beat harms nothing; whether Redis is gone for good is the main loop's to say
                if not missed:
                    print(f"{self._name}: heartbeat missed: {error}", flush=True)
                missed = True

    def _info(self) -> common_pb2.InfoReply:
        counts = self._buffer.counts()
        return common_pb2.InfoReply(
            service=self._name,
            software_version=software_version(),
            started_at=self._started_at,
            policy_version=self._policy_version(),  # -1: it carries no weights
            incarnation=counts["incarnation"],
            run_id=self._recipe.run.run_id,
            figures={**{name: float(number) for name, number in counts.items()}, **self._figures()},
            activity=self._activity(),
        )
