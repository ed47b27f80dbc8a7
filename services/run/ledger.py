"""Creates and removes a run's ledger in Redis: for the supervisor, or for the feed with `tandem serve`."""

from __future__ import annotations

import json
import logging
import shutil
import time
from contextlib import closing

from tandem.protos.errors import RunExistsError, TandemError, UnavailableError, UserError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.durability import check_room
from tandem.services.config import Recipe, dump_recipe, parse_recipe, without_secrets
from tandem.services.run.estimates import job_bytes, worst_case_redis_bytes
from tandem.services.run.folder import CONFIG_FILE, cannot_write, external_redis_url, running, step_taken, write_text
from tandem.services.run.inputs import INPUTS_FILE, join_inputs
from tandem.services.run.json_files import EVALUATIONS_FILE, EVENTS_FILE, GENERATIONS_FOLDER
from tandem.services.run.resume import FREE, check_joins, check_resumable, with_automatic_values

log = logging.getLogger(__name__)

JOIN_SECONDS = 300.0
"""How long a trainer started with `tandem serve` waits for the feed to create the run."""
_POLL_SECONDS = 0.25


def check_redis_room(buffer: Buffer, recipe: Recipe) -> None:
    """Checks that Redis has memory for the groups of the run and for its jobs; raises ConfigError if not, DataError if
    the training data cannot be read.
    """
    from tandem.services.data.dataset import Mixture  # loads pyarrow

    rows_per_epoch = len(Mixture(recipe.data.train_files))
    check_room(buffer.connection, job_bytes(recipe), worst_case_redis_bytes(recipe, rows_per_epoch))


def create_ledger(buffer: Buffer, recipe: Recipe, resume: bool) -> None:
    """Saves the recipe and creates the run's ledger, or updates its limits on resume.

    Replaces a run that was killed before its first batch. Raises UserError if Redis holds a run with this id or cannot
    hold this one; the folder then holds what it held before.
    """
    config = recipe.folder / CONFIG_FILE
    if not resume and config.exists() and not external_redis_url(recipe):
        assert not step_taken(recipe.folder), "check_run_folder refuses a folder with recorded batches"
        forget_run(recipe, buffer)
    before = config.read_text() if config.exists() else None
    write_text(config, dump_recipe(recipe), private=True)  # its Redis URL may hold a password
    try:
        _create(buffer, recipe, resume)
    except UserError:
        if before is not None:
            write_text(config, before, private=True)
        else:
            config.unlink()
        raise


def forget_run(recipe: Recipe, buffer: Buffer) -> None:
    """Removes a run that trained no batch from Redis and from its folder. Its logs stay."""
    try:
        buffer.delete()
    except TandemError:
        return  # Redis is gone; config.json stays, so that the folder still shows its run
    for name in (CONFIG_FILE, INPUTS_FILE, EVALUATIONS_FILE, EVENTS_FILE):
        (recipe.folder / name).unlink(missing_ok=True)
    shutil.rmtree(recipe.folder / GENERATIONS_FOLDER, ignore_errors=True)


def join_run(recipe: Recipe, redis_url: str, service: str) -> Recipe:
    """Joins a run from a service started with `tandem serve`. Returns the recipe with what "auto" stands for in the run
    of the folder, which may have been created meanwhile.

    The feed creates the run if Redis has none with this id; the trainer waits for it. Either saves the recipe in its
    folder, which may be on different machines. Samplers and the reward service do not need the run yet: they wait until
    there are groups to claim. Raises UserError if the run in Redis has another recipe or other files, Redis cannot hold
    the run, or the folder holds a run that Redis does not know; UnavailableError if the run was not created within five
    minutes.
    """
    with closing(Buffer(redis_url, recipe.run.run_id)) as buffer:
        if service in ("trainer", "controller"):
            _wait_for_the_feed(buffer)
        recipe = with_automatic_values(recipe, resume=True)
        if service == "feed":
            _create_or_find(buffer, recipe)
        if service == "trainer":
            if (recipe.folder / CONFIG_FILE).is_file():
                check_resumable(recipe)
            else:  # the feed writes into another machine's folder, or has not come that far
                _check_joins(buffer, recipe)
                _save_recipe(recipe)
        if service != "controller":
            join_inputs(buffer, recipe, service, FREE)
    return recipe


def _create_or_find(buffer: Buffer, recipe: Recipe) -> None:
    config = recipe.folder / CONFIG_FILE
    if config.is_file():
        if not buffer.exists():  # a new ledger would train again what the folder's checkpoints already contain
            raise RunExistsError(
                f"run folder {recipe.folder} holds a run that Redis at {buffer.place} knows nothing of; go on with it "
                f"by `tandem run {config} --resume`, choose another run.run_id, or delete the folder"
            )
        check_resumable(recipe)
        if running(recipe.folder) is None:  # a running supervisor has updated it already
            create_ledger(buffer, recipe, resume=True)
        return
    check_redis_room(buffer, recipe)
    try:
        _create(buffer, recipe, resume=False)
        log.info("run %s is new in Redis at %s: created", recipe.run.run_id, buffer.place)
    except RunExistsError:
        _check_joins(buffer, recipe)
        _create(buffer, recipe, resume=True)  # sets the limits again, and resumes a run that was stopped
        log.info("run %s is known in Redis at %s: goes on", recipe.run.run_id, buffer.place)
    # The folder is written after the ledger: else a feed killed in between would reject its own run when restarted.
    _save_recipe(recipe)


def _check_joins(buffer: Buffer, recipe: Recipe) -> None:
    """Nothing is known of the recipe of a ledger that an earlier version of Tandem has created."""
    if noted := buffer.connection.hash("recipe").get(b"resolved"):
        created_with = parse_recipe(json.loads(noted), f"the recipe of run {recipe.run.run_id} at {buffer.place}")
        check_joins(recipe, created_with, buffer.place)


def _save_recipe(recipe: Recipe) -> None:
    try:
        recipe.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(recipe.folder, error) from None
    write_text(recipe.folder / CONFIG_FILE, dump_recipe(recipe), private=True)  # its Redis URL may hold a password


def _wait_for_the_feed(buffer: Buffer) -> None:
    deadline = time.monotonic() + JOIN_SECONDS
    if not buffer.exists():
        log.info("waits for run %s, which `tandem serve feed` or `tandem run` creates", buffer.run_id)
    while not buffer.exists():
        if time.monotonic() > deadline:
            waited = f"run {buffer.run_id} in Redis at {buffer.place}: nobody has created it for {JOIN_SECONDS:.0f} s"
            raise UnavailableError(f"{waited}; start `tandem serve feed` on the same recipe and Redis")
        time.sleep(_POLL_SECONDS)


def _create(buffer: Buffer, recipe: Recipe, resume: bool) -> None:
    run, reward = recipe.run, recipe.reward
    buffer.create(
        groups_per_batch=run.groups_per_batch,
        staleness_budget=run.staleness_budget,
        target_groups=run.total_batches * run.groups_per_batch,
        failure_budget={"infrastructure": reward.infrastructure_attempts, "data": reward.max_attempts},
        resume=resume,
    )
    key, noted = buffer.connection.key("recipe"), dump_recipe(without_secrets(recipe))
    buffer.connection.retried(lambda: buffer.connection.redis.hsetnx(key, "resolved", noted))
