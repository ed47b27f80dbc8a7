"""The launcher `compose`: services are containers of a compose project; `docker compose up --scale` changes them."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence

from tandem.protos.errors import EnvironmentLackError, UserError
from tandem.services.buffer.buffer import Buffer
from tandem.services.control.launcher import ENVIRONMENTS, SAMPLERS, Registered

COMMAND_VARIABLE = "TANDEM_COMPOSE"
"""Command line in place of `docker compose`, e.g. `docker compose --file compose.yaml --profile cpu`."""
SAMPLERS_VARIABLE = "TANDEM_COMPOSE_SAMPLERS"
"""Name of the samplers' service in the compose file; default `rollout`."""
DEADLINE_SECONDS = 90.0


class Compose(Registered):
    """Runs in the project's directory, or with a command that names the project."""

    name = "compose"
    scalable: Sequence[str] = (SAMPLERS, ENVIRONMENTS, "reward")

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        self._command = shlex.split(os.environ.get(COMMAND_VARIABLE, "")) or ["docker", "compose"]
        self._services = {SAMPLERS: os.environ.get(SAMPLERS_VARIABLE) or SAMPLERS}

    def check(self, service: str, replicas: int) -> None:
        """Nobody knows how many containers the host can hold."""

    def set_replicas(self, service: str, replicas: int) -> None:
        """Returns once the containers were started or stopped. Raises EnvironmentLackError if that failed."""
        name = self._services.get(service, service)
        # Not the other services: those that have ended would be started again.
        scaled = ("up", "--detach", "--no-recreate", "--no-deps", "--scale", f"{name}={replicas}", name)
        program = self._command[0]
        try:
            done = subprocess.run(
                [*self._command, *scaled],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=DEADLINE_SECONDS,
                check=False,
            )
        except OSError as error:
            remedy = f"set {COMMAND_VARIABLE} to the command of the compose project"
            raise EnvironmentLackError(f"{program}: {error.strerror}; {remedy}") from None
        except subprocess.TimeoutExpired:
            fault = f"`{shlex.join(self._command)} up` has not ended within {DEADLINE_SECONDS:.0f} s"
            raise EnvironmentLackError(f"{service}={replicas}: {fault}; see the containers' states") from None
        if done.returncode:
            said = (done.stderr.strip() or "it said nothing").splitlines()[-1]
            raise EnvironmentLackError(f"{service}={replicas}: {program} failed (exit code {done.returncode}): {said}")

    def drain(self, sampler: str) -> None:
        """Raises UserError: compose chooses which container it removes."""
        raise UserError(f"compose chooses which sampler leaves, not {sampler}; order fewer by `tandem scale`")
