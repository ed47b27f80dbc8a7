"""A trainer that is killed while it encodes differences or sends weights: its successors end the run with the weights
of one that is not killed, to the bit, and both samplers receive the last version.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.store_source import redis_store
from tandem.services.config import Recipe
from tandem.services.process import Repeated
from tests.support.killed_trainer import PUBLICATION, train_until_killed
from tests.support.publishing_ring import FakeSampler
from tests.support.trainer_ring import P, different_rewards, lines_of, make_recipe, make_run, put_scored, train

pytestmark = pytest.mark.system

TOTAL = 6


def prepared(folder: Path, url: str) -> tuple[Recipe, Buffer]:
    """A run whose groups are all scored. Its weights change little in a step, and they are sent in several buckets."""
    recipe = make_recipe(
        folder,
        run={"staleness_budget": TOTAL, "total_batches": TOTAL},
        trainer={"checkpoint_every": 2, "learning_rate": 1e-6},
        weights={"encoding": "delta", "bucket_bytes": 1 << 15, "deadline_seconds": 30.0},
    )
    buffer = make_run(url, recipe)
    put_scored(buffer, different_rewards(TOTAL * P))
    return recipe, buffer


@contextmanager
def two_samplers(recipe: Recipe, buffer: Buffer, url: str) -> Iterator[list[FakeSampler]]:
    """They receive weights with the real receiver, and live through the kills."""
    with ExitStack() as stack:
        store = redis_store(url, recipe.run.run_id, "weights")
        samplers = [FakeSampler(buffer, f"rollout-{number}", store) for number in range(2)]
        for sampler in samplers:
            stack.callback(sampler.stop)
            beat = Repeated(sampler.id, 0.2, lambda sampler=sampler: buffer.heartbeat(sampler.id, {}))
            stack.enter_context(beat)
        yield samplers


def weights(recipe: Recipe) -> tuple[dict[int, str], dict[str, torch.Tensor]]:
    """The digest of every version, and what the run exported."""
    digests = {line["step"]: line["weights_digest"] for line in lines_of(recipe)}
    return digests, load_file(recipe.folder / "hf" / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> tuple[dict[int, str], dict[str, torch.Tensor]]:
    """Of a run without samplers whose trainer is not killed."""
    recipe, _ = prepared(tmp_path_factory.mktemp("undisturbed"), redis_url)
    assert train(recipe, redis_url)
    return weights(recipe)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_trainer_killed_while_it_publishes_changes_no_bit_and_samplers_get_the_last_version(
    tmp_path: Path, redis_url: str, undisturbed: tuple[dict[int, str], dict[str, torch.Tensor]], seed: int
) -> None:
    recipe, buffer = prepared(tmp_path, redis_url)
    chance, num_kills = random.Random(seed), 0
    with two_samplers(recipe, buffer, redis_url) as samplers:
        while not train_until_killed(recipe, redis_url, chance.randint(2, 30), 60.0, PUBLICATION):
            num_kills += 1
            assert num_kills < 40, "it comes to no end"
        for sampler in samplers:
            assert sampler.version == TOTAL
    assert num_kills >= 2
    digests, exported = weights(recipe)
    expected_digests, expected = undisturbed
    assert digests == expected_digests
    assert exported.keys() == expected.keys() and all(exported[name].equal(expected[name]) for name in expected)
    for sampler in samplers:
        assert sampler.num_differences > 0
        assert all(tensor.equal(expected[name]) for name, tensor in sampler.applied.items())
