"""Episodes whose Redis is killed in the middle of them, with real vLLM, DeepSpeed and Redis."""

from __future__ import annotations

import string
import subprocess
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from redis.exceptions import RedisError

from tandem.protos.codec import decode_group
from tandem.protos.errors import UnavailableError
from tandem.protos.types import Trajectory
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import load_recipe
from tandem.services.run.folder import redis_url_of
from tests.support.whole_run import WholeRun

BATCHES, GROUPS, SAMPLES, TURNS = 30, 4, 4, 6
pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def redis_of(supervisor: subprocess.Popen[str]) -> psutil.Process:
    (found,) = [one for one in psutil.Process(supervisor.pid).children() if "redis-server" in " ".join(one.cmdline())]
    return found


def answered(url: str) -> set[tuple[str, int]]:
    """The episodes, by group and trajectory, that are saved in Redis with an answered turn, and have not ended; none
    while Redis is away.
    """
    payloads: list[bytes] = []
    with suppress(UnavailableError, RedisError), closing(Buffer(url, "redis-killed")) as buffer:
        redis, pattern = buffer.connection.redis, buffer.connection.key("partial:*")
        payloads += [payload for key in redis.scan_iter(match=pattern) if (payload := redis.get(key)) is not None]
    return {
        (group.group_id, row.trajectory_id)
        for group in map(decode_group, payloads)
        for row in group.rows
        if isinstance(row, Trajectory) and row.finish_reason == "abort" and row.metadata["episode"]["rewards"]
    }


def test_episodes_go_on_after_redis_was_killed_and_weights_arrive_between_their_turns(tmp_path: Path) -> None:
    run = WholeRun(
        tmp_path,
        run={"run_id": "redis-killed", "total_batches": BATCHES, "groups_per_batch": GROUPS, "staleness_budget": 2},
        rollout={"samples_per_prompt": SAMPLES, "stop": tuple(string.ascii_letters)},
        environment={
            "path": "tests.support.environments:Unhurried",
            "arguments": {"marks": str(tmp_path)},
            "max_turns": TURNS,
            "max_turn_tokens": 16,
        },
        reward={"scorer": "earned"},
    )
    supervisor = run.start("run", str(run.recipe))
    run.wait_for(lambda: bool(run.metrics()), supervisor)
    url = redis_url_of(load_recipe(run.recipe))
    interrupted: set[tuple[str, int]] = set()
    for _ in range(2):
        run.wait_for(lambda: bool(answered(url)), supervisor)
        interrupted |= answered(url)
        redis_of(supervisor).kill()
        trained_before = len(run.metrics())
        run.wait_for(lambda: len(run.metrics()) > trained_before, supervisor)  # noqa: B023
    run.wait_for(lambda: (run.folder / "summary.json").exists(), supervisor)
    assert supervisor.wait(30) == 0, (run.scratch / "run.out").read_text() + run.logs()
    assert run.summary()["groups"]["committed"] == BATCHES * GROUPS
    assert max(run.instances().values()) == 1
    run.ledger()

    resets = Counter(line.rpartition("/")[0] for line in (tmp_path / "calls").read_text().splitlines())
    trained = {
        (group.group_id, row.trajectory.trajectory_id): row.trajectory
        for groups in run.records().values()
        for group in groups
        for row in group.scored_rows
    }
    assert interrupted and interrupted <= trained.keys(), "none is lost"
    for group_id, number in interrupted:
        resumed_at = trained[group_id, number].metadata["resumed_at"]
        began_once = resets[f"reset {group_id}/{number}"] == 1
        assert began_once or min(resumed_at, default=0) >= 1, "it did not begin anew"

    undisturbed = [one for one in trained.values() if not one.metadata["resumed_at"]]
    versions = [[span.policy_version for span in one.segments[0].spans] for one in undisturbed]
    assert all(one == sorted(one) for one in versions)
    assert max(len(set(one)) for one in versions) > 1, "a version arrived between two turns of an episode"
