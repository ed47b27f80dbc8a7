"""A trainer that is killed while it encodes differences or sends weights: its successors and their samplers end with
the weights of a run without kills, to the bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
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


def prepared(folder: Path, url: str, **trainer: int) -> tuple[Recipe, Buffer]:
    """A run whose groups are all scored. Its weights change little in a step, and they are sent in several buckets."""
    recipe = make_recipe(
        folder,
        run={"staleness_budget": TOTAL, "total_batches": TOTAL},
        trainer={"checkpoint_every": 2, "learning_rate": 1e-6, **trainer},
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


def digests(recipe: Recipe) -> dict[int, str]:
    """Of every version."""
    return {line["step"]: line["weights_digest"] for line in lines_of(recipe)}


def equal(found: Mapping[str, torch.Tensor], file: Path) -> bool:
    expected = load_file(file)
    return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Recipe:
    """A run without samplers whose trainer is not killed. It exports every version."""
    recipe, _ = prepared(tmp_path_factory.mktemp("undisturbed"), redis_url, export_every=1)
    assert train(recipe, redis_url)
    return recipe


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_trainer_killed_while_it_publishes_changes_no_bit_of_the_weights(
    tmp_path: Path, redis_url: str, undisturbed: Recipe, seed: int
) -> None:
    recipe, buffer = prepared(tmp_path, redis_url)
    chance, num_kills = random.Random(seed), 0
    with two_samplers(recipe, buffer, redis_url) as samplers:
        while not train_until_killed(recipe, redis_url, chance.randint(2, 30), 60.0, PUBLICATION):
            num_kills += 1
            assert num_kills < 40, "it comes to no end"
    assert num_kills >= 2
    assert digests(recipe) == digests(undisturbed)
    assert equal(load_file(recipe.folder / "hf" / "model.safetensors"), undisturbed.folder / "hf" / "model.safetensors")
    assert max(sampler.version for sampler in samplers) == TOTAL
    for sampler in samplers:
        assert sampler.num_differences > 0
        assert equal(sampler.applied, undisturbed.folder / "exports" / f"{sampler.version:06d}" / "model.safetensors")
