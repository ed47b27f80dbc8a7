"""The order of the test files, a Redis for those that need one, and which tests are skipped: those marked `gpu`, with the reason, where
torch sees no CUDA device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before torch is loaded. As many processes as there are cores run tests: threads of one would spin against the other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONGEST_FIRST: tuple[str, ...] = (
    "test_algorithms",
    "test_learner",
    "test_flat_rows",
    "test_engine_options",
    "test_scorer_pool_judges",
    "test_scorer_pool",
    "test_sandbox_attacks",
    "test_sandbox_view",
    "test_reward_client",
    "test_reward_client_jobs",
    "test_system_kills",
    "test_rollout_process",
    "test_weight_updates",
    "test_adapter_updates",
    "test_run_recipe",
    "test_token_model",
    "test_engine_ranks",
    "test_engine",
    "test_training_server",
    "test_ring",
    "test_rule_scorer_laws",
    "test_reward_fuzz",
    "test_reward_model",
    "test_critic",
)
"""Files that take longest, longest first. Several processes take turns at whole files: a long one that came last would leave the
others without work. What it holds is a matter of speed alone."""


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for one file of tests, which need not survive a crash."""
    from tests.redis_ring import running_redis  # here, for most files need none

    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = (
            False  # else those with the most tests come first, and whole runs, one a file, last
        )


@pytest.hookimpl(trylast=True)  # after -m and -k: torch is imported only if a gpu test is really about to run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(
        key=lambda item: places.get(item.path.stem, len(places))
    )  # of the others, and within a file, nothing changes
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))
