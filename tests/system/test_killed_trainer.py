"""A synchronous run whose trainer is killed at random moments ends with the weights of one that is not, to the bit."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.process import in_thread
from tests.support.killed_trainer import train_until_killed
from tests.support.trainer_ring import (
    P,
    different_rewards,
    lines_of,
    make_recipe,
    make_run,
    put_scored_as_credits_return,
    train,
)

pytestmark = pytest.mark.system

TOTAL = 6


def synchronous(folder: Path, url: str) -> tuple[Recipe, Buffer]:
    run = {"staleness_budget": 0, "total_batches": TOTAL}
    recipe = make_recipe(folder, run=run, trainer={"checkpoint_every": 2})
    return recipe, make_run(url, recipe, credits=0)


def weights_of(recipe: Recipe) -> tuple[dict[int, str], bytes]:
    """The digest of every version, and the file that the run exported."""
    digests = {line["step"]: line["weights_digest"] for line in lines_of(recipe)}
    return digests, (recipe.folder / "hf" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> tuple[dict[int, str], bytes]:
    recipe, buffer = synchronous(tmp_path_factory.mktemp("undisturbed"), redis_url)
    stop = threading.Event()
    feed = in_thread("feed", put_scored_as_credits_return, buffer, different_rewards(TOTAL * P), stop)
    assert train(recipe, redis_url)
    feed.result(10.0)
    return weights_of(recipe)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_trainer_killed_at_random_moments_changes_no_bit_of_the_weights(
    tmp_path: Path, redis_url: str, undisturbed: tuple[dict[int, str], bytes], seed: int
) -> None:
    recipe, buffer = synchronous(tmp_path, redis_url)
    chance, num_kills, stop = random.Random(seed), 0, threading.Event()
    feed = in_thread("feed", put_scored_as_credits_return, buffer, different_rewards(TOTAL * P), stop)
    try:
        while not train_until_killed(recipe, redis_url, chance.randint(20, 120), 60.0):
            num_kills += 1
            assert num_kills < 40, "it comes to no end"
    finally:
        stop.set()
    feed.result(10.0)
    assert num_kills >= 2
    assert weights_of(recipe) == undisturbed
    counts = buffer.counts()
    assert (counts["committed"], counts["admitted"], counts["outstanding"]) == (TOTAL * P, TOTAL * P, 0)
    assert buffer.verify() == []
