"""The run's ledger in Redis: created once, by the supervisor, or by the feed where every service is started by
itself.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing

from tandem.protos.errors import RunExistsError, UnavailableError, UserError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.durability import check_group_room, check_room
from tandem.services.config import Recipe, dump_recipe
from tandem.services.run.folder import (
    CONFIG_FILE,
    cannot_write,
    external_redis_url,
    running,
    step_taken,
    write_text,
)
from tandem.services.run.outcome import forget_run
from tandem.services.run.preflight import job_bytes, worst_case_redis_bytes
from tandem.services.run.resume import check_resumable

log = logging.getLogger(__name__)

JOIN_SECONDS = 300.0
"""How long a trainer that was started by itself waits for the feed, which creates the run."""
_POLL_SECONDS = 0.25


def check_redis_room(buffer: Buffer, recipe: Recipe) -> None:
    """Redis can hold the groups of the run, with its jobs beside them.

    Raises:
        ConfigError: it cannot.
    """
    groups = worst_case_redis_bytes(recipe)
    check_group_room(buffer.connection, groups)
    check_room(buffer.connection, job_bytes(recipe), groups)


def create_ledger(buffer: Buffer, recipe: Recipe, resume: bool) -> None:
    """Saves the resolved recipe and creates the run's ledger in Redis. On resume, updates the limits of the one there.

    An earlier run in this folder that was killed before its first batch is replaced.

    Raises:
        UserError: Redis holds a run of that id already, or cannot hold this one; no run is left in the folder then.
    """
    config = recipe.folder / CONFIG_FILE
    if not resume and config.exists() and not external_redis_url(recipe):
        assert not step_taken(recipe.folder), "check_run_folder refuses a folder with recorded batches"
        forget_run(recipe, buffer)
    write_text(config, dump_recipe(recipe))
    try:
        _create(buffer, recipe, resume)
    except UserError:
        if not resume:
            config.unlink()
        raise


def join_run(recipe: Recipe, redis_url: str, service: str) -> None:
    """For a service that was started by itself: the feed creates the run if Redis knows none of that id, the trainer
    waits for it.

    Samplers and the reward service need no run to be there: they claim as soon as there is something.

    Raises:
        UserError: the run there has another recipe, Redis cannot hold it, or what the folder holds of it is unknown to
            Redis.
        UnavailableError: nobody has created it for five minutes.
    """
    if service not in ("feed", "trainer"):
        return
    with closing(Buffer(redis_url, recipe.run.run_id)) as buffer:
        if service == "feed":
            _create_or_find(buffer, recipe)
        else:
            _wait_for_the_feed(buffer)
            if (recipe.folder / CONFIG_FILE).is_file():  # on a machine that does not share the folder it is not
                check_resumable(recipe)


def _create_or_find(buffer: Buffer, recipe: Recipe) -> None:
    config = recipe.folder / CONFIG_FILE
    if config.is_file():
        if not buffer.exists():  # created anew, it would train again what the folder's checkpoints contain
            raise RunExistsError(
                f"run folder {recipe.folder} holds a run that Redis at {buffer.place} "
                "knows nothing of; go on with it by "
                f"`tandem run {config} --resume`, choose another run.run_id, or delete the folder"
            )
        check_resumable(recipe)
        if running(recipe.folder) is None:  # else it is as the supervisor has it
            create_ledger(buffer, recipe, resume=True)
        return
    check_redis_room(buffer, recipe)
    try:
        _create(buffer, recipe, resume=False)
        log.info("run %s is new in Redis at %s: created", recipe.run.run_id, buffer.place)
    except RunExistsError:
        log.info("run %s is known in Redis at %s: goes on", recipe.run.run_id, buffer.place)
    # Not before: a feed killed in between would find its own run to be another's.
    try:
        recipe.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(recipe.folder, error) from None
    write_text(config, dump_recipe(recipe))


def _wait_for_the_feed(buffer: Buffer) -> None:
    deadline = time.monotonic() + JOIN_SECONDS
    if not buffer.exists():
        log.info("waits for run %s, which `tandem serve feed` or `tandem run` creates", buffer.run_id)
    while not buffer.exists():
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"run {buffer.run_id} in Redis at {buffer.place}: nobody has created it for {JOIN_SECONDS:.0f} s; "
                "start `tandem serve feed` on the same recipe and Redis"
            )
        time.sleep(_POLL_SECONDS)


def _create(buffer: Buffer, recipe: Recipe, resume: bool) -> None:
    run, reward = recipe.run, recipe.reward  # whose stage gives a group back after each attempt in vain
    buffer.create(
        groups_per_batch=run.groups_per_batch,
        staleness_budget=run.staleness_budget,
        target_groups=run.total_batches * run.groups_per_batch,
        failure_budget={"infrastructure": reward.infrastructure_attempts, "data": reward.max_attempts},
        resume=resume,
    )
