"""A run whose trainer is killed at random moments ends with the weights of one that is not, to the bit. With the groups
of all batches at hand, a trainer claims and records the next batch while it trains one.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tandem.services.process import in_thread
from tests.support.killed_trainer import train_until_killed
from tests.support.trainer_ring import (
    P,
    different_rewards,
    lines_of,
    make_recipe,
    make_run,
    put_scored,
    put_scored_as_credits_return,
    train,
)

pytestmark = pytest.mark.system

TOTAL = 6


class Run:
    """A run whose groups are scored one by one as the versions before are published (synchronous), or all before the
    trainer begins (ahead).
    """

    def __init__(self, folder: Path, url: str, order: str) -> None:
        ahead = order == "ahead"
        run = {"staleness_budget": TOTAL if ahead else 0, "total_batches": TOTAL}
        self.recipe = make_recipe(folder, run=run, trainer={"checkpoint_every": 2})
        self.buffer = make_run(url, self.recipe, credits=100 if ahead else 0)
        self.stop = threading.Event()
        groups = different_rewards(TOTAL * P)
        if ahead:
            put_scored(self.buffer, groups)
        else:
            self.feed = in_thread("feed", put_scored_as_credits_return, self.buffer, groups, self.stop)

    def weights(self) -> tuple[dict[int, str], bytes]:
        """The digest of every version, and the file that the run exported."""
        digests = {line["step"]: line["weights_digest"] for line in lines_of(self.recipe)}
        return digests, (self.recipe.folder / "hf" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> tuple[dict[int, str], bytes]:
    """The weights of a synchronous run; sampling ahead changes none, because its groups are made up."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), redis_url, "synchronous")
    assert train(run.recipe, redis_url)
    run.feed.result(10.0)
    return run.weights()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("order", ["synchronous", "ahead"])
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_a_trainer_killed_at_random_moments_changes_no_bit_of_the_weights(
    tmp_path: Path, redis_url: str, undisturbed: tuple[dict[int, str], bytes], order: str, seed: int
) -> None:
    run, chance, num_kills = Run(tmp_path, redis_url, order), random.Random(seed), 0
    try:
        while not train_until_killed(run.recipe, redis_url, chance.randint(20, 120), 60.0):
            num_kills += 1
            assert num_kills < 40, "it comes to no end"
    finally:
        run.stop.set()
    if order == "synchronous":
        run.feed.result(10.0)
    assert num_kills >= 2
    assert run.weights() == undisturbed
    counts = run.buffer.counts()
    assert (counts["committed"], counts["admitted"], counts["outstanding"]) == (TOTAL * P, TOTAL * P, 0)
    assert run.buffer.verify() == []
