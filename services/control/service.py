"""`tandem serve controller`: the controller of a run whose services were started without `tandem run`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Literal

from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.control.compose import Compose
from tandem.services.control.controller import Controller, Lease
from tandem.services.control.kubernetes import Kubernetes
from tandem.services.control.launcher import Launcher, StartedByHand
from tandem.services.control.server import control_server
from tandem.services.logging_setup import configure_logging
from tandem.services.process import stop_event

LauncherName = Literal["compose", "kubernetes", "none"]

_LAUNCHERS: Mapping[LauncherName, Callable[[Buffer], Launcher]] = {
    "compose": Compose,
    "kubernetes": Kubernetes,
    "none": StartedByHand,
}
_POLL_SECONDS = 0.5


def main(recipe: Recipe, redis_url: str, launcher: LauncherName) -> None:
    """Runs the controller until SIGTERM, or until the run ends.

    Raises UserError if the run has a controller already, or launcher or port cannot be used, FencedError if another
    controller takes over, and TandemError if Redis is unreachable.
    """
    configure_logging("controller", run=recipe.run.run_id)
    stop = stop_event()
    with ExitStack() as stack:
        buffer = stack.enter_context(closing(Buffer(redis_url, recipe.run.run_id, stop=stop)))
        made = _LAUNCHERS[launcher](buffer)
        lease = stack.enter_context(Lease(buffer, uuid.uuid4().hex))
        controller = stack.enter_context(Controller(recipe, buffer, made, lease))
        controller.carry_out()
        stack.enter_context(control_server(controller, stop))
        while not stop.wait(_POLL_SECONDS):
            if controller.failure is not None:
                raise controller.failure
