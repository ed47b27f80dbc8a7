"""A run whose policy answers an environment in several turns, with real vLLM, DeepSpeed and Redis."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem.protos.codec import decode_group
from tandem.protos.types import Trajectory
from tandem.rollout.environments.limits import LENGTH_STOPS
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import load_recipe
from tandem.services.run.folder import redis_url_of
from tandem.services.run.json_files import EVALUATIONS_FILE, GENERATIONS_FOLDER, JsonLines
from tests.support.tampered import other_last_token, tamper, with_last_segment
from tests.support.whole_run import WholeRun, service_process

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
BATCHES = 12
pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


def num_opened(redis_url: str) -> float:
    """The environments that the second process of the service has opened."""
    with closing(Buffer(redis_url, "episodes")) as buffer:
        starts = int(buffer.connection.hash("starts")[b"environments-0"])
        return buffer.figures()["environments-0"]["opened"] if starts > 1 else 0.0


def saved_turns(redis_url: str) -> list[int]:
    """Answered turns of each episode that is saved in the run's Redis before its end."""
    with closing(Buffer(redis_url, "episodes")) as buffer:
        redis, pattern = buffer.connection.redis, buffer.connection.key("partial:*")
        payloads = [payload for key in redis.scan_iter(match=pattern) if (payload := redis.get(key)) is not None]
    rows = [row for payload in payloads for row in decode_group(payload).rows if isinstance(row, Trajectory)]
    return [len(row.metadata["episode"]["rewards"]) for row in rows if row.finish_reason == "abort"]


def test_a_run_whose_sampler_and_environments_are_killed_in_the_middle_of_episodes_trains_on_them_and_replays(
    tmp_path: Path,
) -> None:
    """The environments are in a service."""
    held_out = {"file": str(tmp_path / "data" / "eval.parquet"), "limit": 6}
    run = WholeRun(
        tmp_path,
        run={"run_id": "episodes", "total_batches": BATCHES, "groups_per_batch": 4, "staleness_budget": 2},
        rollout={"samples_per_prompt": 4, "stop": tuple(LETTERS)},
        environment={
            "service": True,
            "path": "tests.support.environments:Halted",
            "arguments": {"faults": {"a": "once raise"}, "marks": str(tmp_path)},
            "max_turns": 4,
            "max_turn_tokens": 16,
            "step_seconds": 120.0,
        },
        reward={"scorer": "earned"},
        eval={"sets": [{**held_out, "name": "held_out"}, {**held_out, "environment": "none", "scorer": "exact"}]},
    )
    supervisor = run.start("run", str(run.recipe))
    run.wait_for(lambda: (tmp_path / "halted").exists(), supervisor)
    address = redis_url_of(load_recipe(run.recipe))
    run.wait_for(lambda: max(saved_turns(address), default=0) >= 1, supervisor)
    run.wait_for(lambda: bool(JsonLines(run.folder / EVALUATIONS_FILE).read()), supervisor)
    service_process(supervisor, "environments").kill()
    run.wait_for(lambda: num_opened(address) > 0, supervisor)
    run.wait_for(lambda: max(saved_turns(address), default=0) >= 1, supervisor)
    service_process(supervisor, "rollout").kill()
    (tmp_path / "go").touch()
    run.wait_for(lambda: (run.folder / "summary.json").exists(), supervisor)
    assert supervisor.wait(30) == 0, (run.scratch / "run.out").read_text() + run.logs()
    check_evaluations(run)
    rows = run.trained_rows()
    assert len(rows) == BATCHES * 4 * 4
    turns = [row.trajectory.metadata["num_turns"] for _, row in rows]
    assert max(turns) == 4, "some episodes have as many turns as they may"
    for version, row in rows:
        trajectory = row.trajectory
        (segment,) = trajectory.segments
        begins = np.flatnonzero(np.diff(segment.loss_mask, prepend=0) == 1)
        assert len(begins) == trajectory.metadata["num_turns"]
        assert (segment.behavior_logprobs[segment.loss_mask == 1] < 0).all()
        assert {span.policy_version for span in segment.spans} <= set(range(version))
        rewards = trajectory.token_rewards[0] if trajectory.token_rewards else np.zeros(1)
        assert row.reward == pytest.approx(trajectory.earned_reward) == pytest.approx(float(rewards.sum()))
        assert trajectory.earned_reward == 0.25 * (len(begins) - (trajectory.finish_reason == "length"))
    resumed_at = [turn for _, row in rows for turn in row.trajectory.metadata["resumed_at"]]
    assert max(resumed_at, default=0) > 0, "an episode of the killed sampler went on after its first turn"
    assert max(run.instances().values()) == 1
    run.ledger()
    assert run.summary()["groups"]["committed"] == BATCHES * 4
    replayed = run.tandem("replay", str(run.folder), "--generation")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert f"{len(rows)} episodes repeated on the environment: no observation differs" in replayed.stdout
    assert "equal bit for bit" in replayed.stdout
    assert f"{len(rows)} trajectories, {sum(turns)} turns, " in replayed.stdout
    check_that_what_was_tampered_with_is_named(run)


def check_that_what_was_tampered_with_is_named(run: WholeRun) -> None:
    name = tamper(run.folder, lambda row: with_last_segment(row, other_last_token))
    done = run.tandem("replay", str(run.folder), "--generation")
    assert done.returncode == 1, done.stdout + done.stderr
    (said,) = [line for line in done.stdout.splitlines() if "token id" in line]
    assert said.startswith(f"{name}, turn ") and "was recorded, " in said
    name = tamper(run.folder, with_other_seed)
    done = run.tandem("replay", str(run.folder), "--generation")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith(f"{name}: observation of reset: ") and "seed 0" in done.stdout


def with_other_seed(row: Trajectory) -> Trajectory:
    """The trajectory with another first observation."""
    first = next(place for place, one in enumerate(row.metadata["messages"]) if "seed" in one["content"])
    messages = [*row.metadata["messages"]]
    messages[first] = {"role": "user", "content": "seed 0"}
    return replace(row, metadata={**row.metadata, "messages": messages})


def check_evaluations(run: WholeRun) -> None:
    """The first and the last version played the same episodes, seen from their environments; the other set none."""
    evaluations = JsonLines(run.folder / EVALUATIONS_FILE).read()
    assert [line["version"] for line in evaluations] == [0, BATCHES]
    seen = []
    for line in evaluations:
        found = line["sets"]["held_out"]
        assert (found["num_scored"], found["failed"]) == (6, "")
        stops = {name: number for name, number in found["episodes"].items() if name.startswith("stop_")}
        assert sum(stops.values()) == 6 and found["episodes"]["num_turns"] >= 6
        assert (line["sets"]["eval"]["num_scored"], line["sets"]["eval"]["episodes"]) == (6, {})
        rows = JsonLines(run.folder / GENERATIONS_FOLDER / f"{line['version']:06d}" / "held_out.jsonl").read()
        for row in rows:
            episode = row["episode"]
            turns_that_earned = episode["num_turns"] - (episode["stop"] in LENGTH_STOPS)
            assert row["reward"] == episode["earned_reward"] == 0.25 * turns_that_earned
        seen.append([row["episode"]["messages"][len(row["prompt"])]["content"] for row in rows])
    assert seen[0] == seen[1] and len(set(seen[0])) == 6, "the seeds differ by prompt and not by version"
