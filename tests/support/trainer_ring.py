"""Shared by the trainer's tests: a run whose groups are already scored, and one rank that trains in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tandem.protos.codec import EncodedGroups, encode_group
from tandem.protos.errors import FencedError, NotAdmittedError
from tandem.protos.row_headers import encode_headers, group_headers
from tandem.protos.types import TrajectoryGroup
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import Claim
from tandem.services.config import Recipe, dump_recipe
from tandem.services.data.tiny_model import build_tiny_model
from tandem.services.run.folder import CONFIG_FILE
from tandem.services.trainer.service import run_rank
from tandem.trainer.batch.record import write_record
from tests.support.redis_ring import LEASE_SECONDS, SAMPLER, claim
from tests.support.redis_ring import train as record_next
from tests.support.run_inputs import recipe_of
from tests.support.training_groups import make_batch, make_group, make_payloads

P = 2


_MODELS = TemporaryDirectory(prefix="tandem-models-")


@cache
def shared_model() -> str:
    """The folder of a tiny model, which no test changes."""
    return str(build_tiny_model(Path(_MODELS.name) / "model"))


def make_recipe(folder: Path, **sections: dict[str, Any]) -> Recipe:
    """A recipe of the tiny model with two groups per batch, in a run folder that holds its config.json."""
    run = {"run_id": f"run-{folder.name}"[:60], "folder": str(folder / "run"), "total_batches": 4}
    values: dict[str, dict[str, Any]] = {
        "run": {**run, "groups_per_batch": P},
        "model": {"path": shared_model()},
        "data": {"train_file": "none.parquet", "max_prompt_tokens": 16},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 16, "num_replicas": 0},
        "trainer": {"learning_rate": 1e-2, "tokens_per_micro_batch": 128},
        "weights": {"deadline_seconds": 5.0},
    }
    recipe = recipe_of(values, **sections)
    recipe.folder.mkdir(exist_ok=True)
    (recipe.folder / CONFIG_FILE).write_text(dump_recipe(recipe))
    return recipe


def make_run(url: str, recipe: Recipe, *, credits: int = 100) -> Buffer:
    """The recipe's run in Redis with plenty of credits; version 0 is published so that groups may be sampled."""
    buffer = Buffer(url, recipe.run.run_id)
    buffer.create(
        groups_per_batch=recipe.run.groups_per_batch,
        staleness_budget=credits,
        target_groups=recipe.run.total_batches * recipe.run.groups_per_batch,
        failure_budget={"infrastructure": 1, "data": 1},
        resume=False,
    )
    return buffer


def put_scored(buffer: Buffer, groups: Iterable[TrajectoryGroup]) -> None:
    """Moves the groups to `scored`, in their order."""
    incarnation = buffer.begin_incarnation()
    buffer.register_sampler(SAMPLER, "127.0.0.1:1", 1)
    buffer.publish(incarnation, max(0, buffer.published_version()), [SAMPLER])
    for group in groups:
        assert buffer.admit([(group.group_id, b"prompt")], group.prompt.index + 1) == 1
        (sampled,) = buffer.claim("prompts", SAMPLER, 1, LEASE_SECONDS, 0)
        _score(buffer, sampled, group)


def _score(buffer: Buffer, sampled: Claim, group: TrajectoryGroup) -> None:
    assert buffer.complete(sampled, encode_group(group))
    (scored,) = claim(buffer, "generated")
    assert buffer.complete(scored, encode_group(group), encode_headers(group_headers(group)))


def put_scored_as_credits_return(buffer: Buffer, groups: Iterable[TrajectoryGroup], stop: threading.Event) -> None:
    """Moves the groups to `scored`, in their order, whenever there is credit for one and a version is published."""
    buffer.register_sampler(SAMPLER, "127.0.0.1:1", 1)
    for group in groups:
        sampled: list[Claim] = []
        while not sampled:
            if stop.wait(0.01):
                return
            buffer.admit([(group.group_id, b"prompt")], group.prompt.index + 1, after=group.prompt.index)
            # In the name of whichever trainer there is, because there is no sampler that it could update.
            trainer, version = buffer.counts()["incarnation"], buffer.published_version()
            with suppress(FencedError, NotAdmittedError):
                buffer.connection.run("admit_sampler", trainer, SAMPLER, "", version, 0, 0)
                sampled = buffer.claim("prompts", SAMPLER, 1, LEASE_SECONDS, 0)
        _score(buffer, sampled[0], group)


def different_rewards(count: int, *, start: int = 0, **more: Any) -> list[TrajectoryGroup]:
    """Groups whose rewards differ, so that every batch changes the weights."""
    return [make_group(index, rewards=(0.0, 1.0, 1.0, 0.0), **more) for index in range(start, start + count)]


class Predecessor:
    """A trainer that has trained version 1, of a run with groups for two more."""

    def __init__(self, recipe: Recipe, url: str) -> None:
        self.recipe, self.groups = recipe, different_rewards(3 * P)
        self.buffer = make_run(url, recipe)
        put_scored(self.buffer, self.groups)
        self.incarnation = self.buffer.begin_incarnation()
        self.train(1)

    def train(self, version: int, world_size: int = 1) -> None:
        groups = self.groups[(version - 1) * P : version * P]
        self.write_record(version, groups, world_size)
        group_ids = record_next(self.buffer, self.incarnation, version, P)
        self.buffer.publish(self.incarnation, version, [SAMPLER], group_ids)

    def write_record(self, version: int, groups: Sequence[TrajectoryGroup], world_size: int = 1) -> None:
        batch, _ = make_batch(groups, policy_version=version, world_size=world_size)
        write_record(self.recipe.folder, batch, EncodedGroups.of(make_payloads(groups)))

    def is_current(self) -> bool:
        self.buffer.check_incarnation(self.incarnation)
        return True


def train(recipe: Recipe, url: str, stop: threading.Event | None = None) -> bool:
    """Trains with one rank in this process until the run ends."""
    return run_rank(recipe, url, stop or threading.Event())


def lines_of(recipe: Recipe) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl."""
    return [json.loads(text) for text in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
