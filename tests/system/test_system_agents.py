"""A run whose policy is called by agents, with real vLLM, DeepSpeed and Redis."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.whole_run import WholeRun, service_process
from tests.system.test_system_episodes import LETTERS

BATCHES = 4
pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


def test_a_run_with_agents_that_rewrite_their_history_trains_each_token_once_and_replays(tmp_path: Path) -> None:
    """Its sampler is killed in the middle: one batch is trained, and the agents of the other rows wait for the kill."""
    run = WholeRun(
        tmp_path,
        run={"run_id": "agents", "total_batches": BATCHES, "groups_per_batch": 4, "staleness_budget": 2},
        rollout={"samples_per_prompt": 4, "stop": tuple(LETTERS)},
        environment={
            "path": "tests.support.agents:Halted",
            "arguments": {"script": "rewriting", "num_free": 4, "marks": str(tmp_path)},
            "max_turns": 4,
            "max_turn_tokens": 16,
            "rewritten_history": "fork",
            "step_seconds": 120.0,
        },
        reward={"scorer": "earned"},
    )
    supervisor = run.start("run", str(run.recipe))
    run.wait_for(lambda: bool(run.metrics()) and (tmp_path / "halted").exists(), supervisor)
    service_process(supervisor, "rollout").kill()
    (tmp_path / "go").touch()
    run.wait_for(lambda: (run.folder / "summary.json").exists(), supervisor)
    assert supervisor.wait(30) == 0, (run.scratch / "run.out").read_text() + run.logs()
    rows = run.trained_rows()
    assert len(rows) == BATCHES * 4 * 4
    for version, row in rows:
        trajectory = row.trajectory
        sampled = [segment.num_loss_tokens for segment in trajectory.segments]
        assert min(sampled) > 0
        assert sum(sampled) == trajectory.metadata["info"]["sampled"], "each token is trained once"
        assert trajectory.metadata["num_turns"] == 4
        assert row.reward == pytest.approx(trajectory.earned_reward)
        for segment in trajectory.segments:
            assert (segment.behavior_logprobs[segment.loss_mask == 1] < 0).all()
            assert {span.policy_version for span in segment.spans} <= set(range(version))
    # The conversation, what follows its summary, and the sub-agent's. A turn that was cut off cannot be continued here.
    assert {len(row.trajectory.segments) for _, row in rows} <= {3, 4}
    assert any(len(row.trajectory.segments) == 3 for _, row in rows)
    assert max(run.instances().values()) == 1
    run.ledger()
    assert run.summary()["groups"]["committed"] == BATCHES * 4
    replayed = run.tandem("replay", str(run.folder))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "equal bit for bit" in replayed.stdout
    refused = run.tandem("replay", str(run.folder), "--generation")
    assert refused.returncode == 2 and "--generation knows no agents" in refused.stderr
