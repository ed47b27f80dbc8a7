"""`tandem serve`: one service of a run in the foreground. Imports nothing heavy up here, for `--help` loads it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tandem.services.command_line import full_disk_named

if TYPE_CHECKING:
    from tandem.services.config import Recipe

Service = Literal["feed", "rollout", "environments", "reward", "trainer", "controller"]
LauncherName = Literal["compose", "kubernetes", "none"]
_REPLICATED: tuple[Service, ...] = ("rollout", "environments", "reward")


def serve_one(
    service: Service, recipe_file: Path, overrides: Sequence[str], replica: int | None, launcher: LauncherName
) -> None:
    """Runs the service until it is told to stop. Without a `replica` it takes the smallest number that is free.
    `launcher` is the controller's.
    """
    from tandem.protos.child_environment import drop_secrets
    from tandem.services.config import load_recipe
    from tandem.services.logging_setup import configure_logging
    from tandem.services.process import PARENT_VARIABLE, die_with_parent, yield_to_others
    from tandem.services.run.endpoint import with_own_host
    from tandem.services.run.folder import redis_url_of
    from tandem.services.run.placement import gpu_ids, place_on_cores, set_allocator
    from tandem.services.run.resume import with_automatic_values

    supervisor = os.environ.get(PARENT_VARIABLE)
    if supervisor is not None:
        die_with_parent(int(supervisor))
        if service == "feed":
            yield_to_others()  # the sampler takes four times as long to start, and later the feed has little to do
    elif service == "rollout" and not gpu_ids():
        set_allocator(service)  # before threads start
    written = load_recipe(recipe_file, overrides)
    if supervisor is not None:
        written = with_automatic_values(written, resume=True)
    configure_logging(service, run=written.run.run_id, replica=replica if service == "rollout" else None)
    redis_url = redis_url_of(written)
    recipe = with_own_host(written, redis_url)
    with ExitStack() as stack:
        stack.enter_context(full_disk_named(recipe.folder))
        if replica is None and service in _REPLICATED:
            replica = _free_number(stack, recipe, redis_url, service)
        elif replica is not None and service == "environments" and supervisor is not None:
            _hold_number(stack, recipe, redis_url, service, replica)  # others may be started by hand
        if supervisor is None:
            from tandem.services.run.ledger import join_run
            from tandem.services.run.preflight import check_service

            check_service(recipe, service, replica or 0)
            written = join_run(written, redis_url, service)
            recipe = with_own_host(written, redis_url)
            if service == "rollout" and not gpu_ids():
                os.environ.update(place_on_cores(recipe, f"rollout-{replica or 0}"))
        if service in ("rollout", "environments"):
            # It has read them. What it starts needs none but those of its environments.
            drop_secrets(recipe.environment.variables if service == recipe.environment.run_by else ())
        own_host = () if recipe is written else (f"run.host={recipe.run.host}",)
        if service == "controller":
            from tandem.services.control import service as controller_service

            controller_service.main(recipe, redis_url, launcher)
            return
        _serve(service, recipe, redis_url, replica or 0, [str(recipe_file), *overrides, *own_host])


def take_over(run_folder: Path, overrides: Sequence[str]) -> None:
    """Runs the trainer of a run here, in place of the one that runs now. Raises RunExistsError if a supervisor runs in
    the folder: it would start its trainer again. Raises ConfigError if the trainer runs on several machines.
    """
    from tandem.protos.errors import ConfigError, RunExistsError
    from tandem.services.config import load_recipe
    from tandem.services.run.folder import CONFIG_FILE, running
    from tandem.services.trainer.takeover import TAKEOVER_VARIABLE

    if owner := running(run_folder):
        raise RunExistsError(
            f"run folder {run_folder}: `tandem run` (pid {owner.pid}) starts its own trainer; end that one, and it is "
            "started again"
        )
    if (nodes := load_recipe(run_folder / CONFIG_FILE, overrides).trainer.num_nodes) > 1:
        raise ConfigError(
            f"run folder {run_folder}: its trainer runs on {nodes} machines, whose seats a second one cannot have; end "
            "it on all of them, and start it again by `tandem serve trainer`"
        )
    os.environ[TAKEOVER_VARIABLE] = "1"  # for the ranks, too
    serve_one("trainer", run_folder / CONFIG_FILE, overrides, None, "none")


def _free_number(stack: ExitStack, recipe: Recipe, redis_url: str, service: Service) -> int:
    """A number that no other replica has, held until the stack is closed."""
    from tandem.services.run.folder import redis_required
    from tandem.services.run.replica import free_replica_number

    with redis_required():
        return stack.enter_context(free_replica_number(redis_url, recipe.run.run_id, service))


def _hold_number(stack: ExitStack, recipe: Recipe, redis_url: str, service: Service, replica: int) -> None:
    from tandem.services.run.folder import redis_required
    from tandem.services.run.replica import given_replica_number

    with redis_required():
        stack.enter_context(given_replica_number(redis_url, recipe.run.run_id, service, replica))


def _serve(service: Service, recipe: Recipe, redis_url: str, replica: int, recipe_arguments: list[str]) -> None:
    from tandem.services.process import starting

    if service == "feed":
        with starting():
            from tandem.services import feed_service

        feed_service.main(recipe, redis_url)
    elif service == "rollout":
        with starting():
            from tandem.services.rollout import service as rollout_service

        rollout_service.main(recipe, redis_url, replica)
    elif service == "environments":
        from tandem.services.environments import service as environment_service
        from tandem.services.process import PARENT_VARIABLE

        drains = PARENT_VARIABLE not in os.environ  # a supervisor asks for it by a call
        environment_service.main(recipe, redis_url, replica, drains=drains)
    elif service == "reward":
        with starting():
            from tandem.services.reward import service as reward_service

        reward_service.main(recipe, redis_url, replica)
    else:
        from tandem.services.trainer.launch import run_trainer

        run_trainer(recipe, redis_url, recipe_arguments)
