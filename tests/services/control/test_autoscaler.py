"""The autoscaler gives orders, explains them, and stays quiet where it should; the run is a file of metrics."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal

import pytest

from tandem.protos.errors import ConfigError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.control.autoscaler import Autoscaler
from tandem.services.control.compose import Compose
from tandem.services.control.controller import Controller, Lease
from tandem.services.control.launcher import Launcher, StartedByHand
from tandem.services.launchers.local import LocalLauncher
from tandem.services.launchers.process_group import ProcessGroup
from tests.services.control.conftest import calls
from tests.support.redis_ring import SAMPLER


def scaled(recipe: Recipe, mode: Literal["on", "dry_run"], max_scorers: int = 1) -> Recipe:
    options = recipe.autoscale.model_copy(update={"mode": mode, "max_samplers": 4, "max_scorers": max_scorers})
    return recipe.model_copy(update={"autoscale": options})


def write_starved_batches(recipe: Recipe) -> None:
    """Batches whose trainer waits 8 of 10 s for one sampler, which is always busy."""
    recipe.folder.mkdir(exist_ok=True)
    with open(recipe.folder / "metrics.jsonl", "w") as out:
        for step in range(1, 9):
            line = {
                "step": step,
                "time": time.time() - 80 + 10 * step,
                "seconds_total": 10.0,
                "seconds_claim": 8.0,
                "seconds_train": 2.0,
                "trainer_idle_seconds": 8.0,
                "samplers_acknowledged": 1,
                "sampler_busy_seconds": 10.0 * step,
                "sampler_idle_seconds": 0.0,
                "staleness_mean": 1.0,
            }
            out.write(json.dumps(line) + "\n")


def look(autoscaler: Autoscaler, times: int = 6) -> list[tuple[int, int, bool]]:
    """Looks several times, as within as many seconds; returns the decisions so far."""
    for _ in range(times):
        autoscaler._look()
    return [(one.from_replicas, one.to_replicas, one.dry_run) for one in autoscaler.decisions()]


@pytest.fixture
def one_sampler(buffer: Buffer) -> Buffer:
    """The run with one sampler; rollout-1 has never started."""
    redis, key = buffer.connection.redis, buffer.connection.key
    redis.srem(key("samplers"), "rollout-1")
    return buffer


def test_a_starved_trainer_gets_more_samplers(compose: Path, recipe: Recipe, one_sampler: Buffer) -> None:
    recipe = scaled(recipe, "on")
    write_starved_batches(recipe)
    said: list[str] = []
    with Lease(one_sampler, "test") as lease:
        controller = Controller(recipe, one_sampler, Compose(one_sampler), lease)
        autoscaler = Autoscaler(recipe, controller, said.append)
        found = look(autoscaler)
        assert found[-2:] == [(1, 2, False), (2, 2, False)], said
        assert [call[-2:] for call in calls(compose)] == [["rollout=2", "rollout"]]
        assert controller.desired()["rollout"] == 2
        changes = [line for line in said if "->" in line]
        (change,) = changes
        assert change.startswith("autoscaler: rollout 1 -> 2: the trainer waits for scored groups 80% of its time")
        lines = [json.loads(line) for line in (recipe.folder / "decisions.jsonl").read_text().splitlines()]
        assert [(line["from_replicas"], line["to_replicas"], line["dry_run"]) for line in lines] == found
        again = Autoscaler(recipe, controller, said.append)
        assert again.decisions() == autoscaler.decisions(), "a controller that restarts shows the earlier ones"


def test_a_dry_run_says_what_it_would_do(compose: Path, recipe: Recipe, one_sampler: Buffer) -> None:
    recipe = scaled(recipe, "dry_run")
    write_starved_batches(recipe)
    said: list[str] = []
    with Lease(one_sampler, "test") as lease:
        controller = Controller(recipe, one_sampler, Compose(one_sampler), lease)
        assert (1, 2, True) in look(Autoscaler(recipe, controller, said.append))
        assert controller.desired()["rollout"] == 1 and calls(compose) == []
        assert any(line.startswith("autoscaler: would order rollout 1 -> 2: ") for line in said)


def test_an_order_that_the_launcher_refuses_is_explained(compose: Path, recipe: Recipe, one_sampler: Buffer) -> None:
    (compose / "fails").touch()
    recipe = scaled(recipe, "on")
    write_starved_batches(recipe)
    with Lease(one_sampler, "test") as lease:
        controller = Controller(recipe, one_sampler, Compose(one_sampler), lease)
        autoscaler = Autoscaler(recipe, controller, print)
        look(autoscaler)
        (change,) = [one for one in autoscaler.decisions() if one.from_replicas != one.to_replicas]
        assert change.reason.endswith("no such image: tandem") and "; refused: rollout=2: " in change.reason
        assert controller.desired()["rollout"] == 1


def test_while_samplers_are_paused_nothing_is_decided(compose: Path, recipe: Recipe, one_sampler: Buffer) -> None:
    recipe = scaled(recipe, "on")
    write_starved_batches(recipe)
    with Lease(one_sampler, "test") as lease:
        controller = Controller(recipe, one_sampler, Compose(one_sampler), lease)
        controller.pause(SAMPLER)
        autoscaler = Autoscaler(recipe, controller, print)
        assert look(autoscaler, 8) == [(1, 1, False)] and calls(compose) == []
        assert autoscaler.decisions()[0].reason == "no change: an operator has paused rollout-0"


@pytest.mark.parametrize(
    ("by_hand", "max_scorers", "fault"),
    [(True, 1, "the launcher none starts no samplers"), (False, 2, "the launcher local runs one reward service")],
)
def test_a_launcher_that_cannot_do_it_is_refused(
    recipe: Recipe, buffer: Buffer, by_hand: bool, max_scorers: int, fault: str
) -> None:
    local = LocalLauncher("local", recipe, buffer, ProcessGroup(report=print), lambda scaled: [])
    made: Launcher = StartedByHand(buffer) if by_hand else local
    recipe = scaled(recipe, "on", max_scorers)
    with Lease(buffer, "test") as lease, pytest.raises(ConfigError, match=fault):
        Autoscaler(recipe, Controller(recipe, buffer, made, lease), print)
