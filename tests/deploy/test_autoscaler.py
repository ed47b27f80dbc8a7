"""The controller of a real run: the autoscaler, orders that survive restarts, paused and drained samplers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.whole_run import WholeRun, processes_of

pytestmark = pytest.mark.system


def starving_run(folder: Path, mode: str) -> WholeRun:
    """A run whose trainer waits for its only sampler most of the time."""
    return WholeRun(
        folder,
        run={"total_batches": 100_000},
        rollout={"engine": "transformers", "max_response_tokens": 64, "max_groups_in_flight": 1},
        autoscale={"mode": mode, "max_samplers": 2, "cooldown_seconds": 5.0, "trainer_idle": 0.05},
        trainer={"checkpoint_every": 100},
    )


def decisions(run: WholeRun) -> list[dict[str, Any]]:
    file = run.folder / "decisions.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def said(run: WholeRun) -> str:
    return (run.scratch / "run.out").read_text()


def ordered(run: WholeRun, *arguments: str) -> str:
    done = run.tandem(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_a_starved_trainer_gets_a_sampler_and_orders_survive(tmp_path: Path) -> None:
    run = starving_run(tmp_path, "on")
    folder = str(run.folder)
    supervisor = run.start("run", str(run.recipe))
    run.wait_for(lambda: "rollout-1 joins the run" in said(run), supervisor)
    run.wait_for(lambda: run.last_batch().get("samplers_acknowledged") == 2, supervisor)
    changes = [one for one in decisions(run) if one["from_replicas"] != one["to_replicas"]]
    assert [(one["service"], one["from_replicas"], one["to_replicas"], one["dry_run"]) for one in changes] == [
        ("rollout", 1, 2, False)
    ]
    assert "the trainer waits for scored groups" in changes[0]["reason"]
    assert "autoscaler: rollout 1 -> 2: " + changes[0]["reason"] in said(run)
    assert changes[0]["reason"] in [one.reason for one in run.status().decisions]
    assert "autoscaler" in ordered(run, "status", folder)
    ordered(run, "stop", folder)
    assert supervisor.wait(30) == 130, said(run)[-3000:] + run.logs()

    before = len(run.metrics())
    supervisor = run.start("run", str(run.recipe), "autoscale.mode=off", "--resume")  # the recipe says one sampler
    run.wait_for(lambda: len(run.metrics()) > before, supervisor)
    run.wait_for(lambda: run.last_batch().get("samplers_acknowledged") == 2, supervisor)
    assert dict(run.status().desired_replicas) == {"rollout": 2}

    assert "the trainer waits once it has trained what is scored" in ordered(run, "pause", folder)
    first = next(one for one in run.status().services if one.name == "rollout-0")
    os.kill(first.pid, signal.SIGKILL)

    def restarted() -> bool:
        one = next(one for one in run.status().services if one.name == "rollout-0")
        return one.pid not in (0, first.pid) and one.state == "running" and one.policy_version >= 0

    run.wait_for(restarted, supervisor)
    run.wait_for(lambda: "waits for scored groups" in run.status().services[-1].activity, supervisor)
    waits_at = len(run.metrics())
    assert all(one.paused for one in run.status().services if one.kind == "rollout")
    assert "resumed: rollout-0, rollout-1" in ordered(run, "resume", folder)
    run.wait_for(lambda: len(run.metrics()) > waits_at + 1, supervisor)

    ordered(run, "drain", folder, "rollout-0")
    run.wait_for(lambda: "rollout-0 has left the run" in said(run), supervisor)
    assert [one.name for one in run.status().services if one.kind == "rollout"] == ["rollout-1"]
    at = len(run.metrics())
    run.wait_for(lambda: len(run.metrics()) > at + 1, supervisor)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(30) == 130, said(run)[-3000:] + run.logs()
    assert run.ledger()["violations"] == [] and max(run.instances().values()) == 1
    assert processes_of(run) == []


@pytest.mark.timeout(300)
def test_a_dry_run_of_the_autoscaler_only_explains(tmp_path: Path) -> None:
    run = starving_run(tmp_path, "dry_run")
    supervisor = run.start("run", str(run.recipe))
    run.wait_for(lambda: any(one["from_replicas"] != one["to_replicas"] for one in decisions(run)), supervisor)
    (change,) = [one for one in decisions(run) if one["from_replicas"] != one["to_replicas"]]
    assert change["dry_run"] and "autoscaler: would order rollout 1 -> 2: " in said(run)
    at = len(run.metrics())
    run.wait_for(lambda: len(run.metrics()) > at + 3, supervisor)
    shown = run.status()
    assert dict(shown.desired_replicas) == {"rollout": 1} and "joins the run" not in said(run)
    assert [one.name for one in shown.services if one.kind == "rollout"] == ["rollout-0"]
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(30) == 130
