"""Where the services of a run are started: on this machine, or somewhere in a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tandem.services.config import Recipe
from tandem.services.launchers.children import Child, ChildSpec, LocalChild
from tandem.services.run.model_check import ModelFacts
from tandem.services.run.placement import place
from tandem.services.run.preflight import check_added_samplers, check_machine
from tandem.services.run.threads import shared_cores


class Machines(Protocol):
    """The machines of a run."""

    num_trainers: int
    """How many of the trainer's machines are started here; others are started by hand."""

    def fitted(self, recipe: Recipe, facts: ModelFacts | None) -> Recipe:
        """The recipe as the services need it there. Raises UserError if the machines do not suffice."""

    def check_shared(self, recipe: Recipe, redis_url: str) -> None:
        """Raises EnvironmentLackError if a machine does not see the run's folder, or its Redis."""

    def check_added(self, recipe: Recipe, service: str, added: int) -> None:
        """Raises UserError if there is no room for `added` replicas more of the service; `recipe` counts them in."""

    def shared_cores(self, recipe: Recipe) -> Mapping[str, str]:
        """What to tell, by service, if threads of the trainer, or of the samplers, share cores."""

    def place(self, recipe: Recipe, name: str) -> Mapping[str, str]:
        """Environment variables that assign GPUs or cores to the service `name`."""

    def make_child(self, spec: ChildSpec, run_token: str) -> Child:
        """The child that the process group starts."""


class ThisMachine:
    """All services run on the machine of `tandem run`."""

    num_trainers = 1

    def fitted(self, recipe: Recipe, facts: ModelFacts | None) -> Recipe:
        check_machine(recipe, facts)
        return recipe

    def check_shared(self, recipe: Recipe, redis_url: str) -> None:
        """It does."""

    def check_added(self, recipe: Recipe, service: str, added: int) -> None:
        if service == "rollout":  # nobody knows what environments need
            check_added_samplers(recipe, added)

    def shared_cores(self, recipe: Recipe) -> Mapping[str, str]:
        return shared_cores(recipe)

    def place(self, recipe: Recipe, name: str) -> Mapping[str, str]:
        return place(recipe, name)

    def make_child(self, spec: ChildSpec, run_token: str) -> Child:
        return LocalChild(spec, run_token)


THIS_MACHINE = ThisMachine()
