"""`tandem chaos` on a small run: twelve faults over all services, and no group is lost or trained twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tandem.services.chaos.checks import check_finished
from tandem.services.commands.status import ledger_of
from tandem.trainer.batch.record import PLAN_FILE, record_folder
from tests.support.whole_run import WholeRun, processes_of

TOTAL, P, FAULTS = 26, 4, 12
SEED = 2081  # its faults are short, and hit every service
SCORER = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.025)  # a batch takes 0.4 s, so that the faults come while the run goes on
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
"""
KINDS = ["kill", "stop", "cut", "slow", "redis-loss"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twelve_faults_over_all_services_lose_no_group_and_train_none_twice(tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text(SCORER)
    run = WholeRun(
        tmp_path,
        run={"run_id": "whole", "total_batches": TOTAL, "groups_per_batch": P, "staleness_budget": 2},
        rollout={"engine": "transformers", "samples_per_prompt": 4, "max_response_tokens": 24},
        reward={"scorer": f"{scorer}:compute_score"},
        trainer={"learning_rate": 1e-3, "checkpoint_every": 8},
    )
    result = tmp_path / "chaos.json"
    options = ("--faults", FAULTS, "--seed", SEED, "--kinds", ",".join(KINDS), "--json", result)
    done = run.tandem("chaos", str(run.recipe), *map(str, options), deadline=220)
    said = done.stdout + done.stderr + run.logs()
    assert done.returncode == 0, said
    assert processes_of(run) == []

    written = json.loads(result.read_text())
    assert (written["exit_code"], written["violations"]) == (0, []), said
    assert written["faults_made"] == written["faults_wanted"] == len(written["faults"]) == FAULTS
    assert {fault["kind"] for fault in written["faults"]} == set(KINDS)
    assert {fault["target"] for fault in written["faults"]} >= {"feed", "rollout-0", "reward", "trainer", "redis"}
    recovered = [fault for fault in written["faults"] if fault["recovery_seconds"] is not None]
    assert len(recovered) >= FAULTS - 2, "only what is hit at the end may not recover before the run ends"
    assert all(f"fault {fault['number']} of {FAULTS}" in done.stdout for fault in recovered)
    assert sum(row["faults"] for row in written["recovery"]) == FAULTS
    assert written["checks"] >= written["seconds"] // 10

    groups = written["groups"]
    assert groups["committed"] == TOTAL * P
    assert groups["dropped"] == groups.get("dropped:run_ended", 0), "no fault costs a prompt"
    assert f"groups: {groups['admitted']} admitted = {TOTAL * P} committed" in done.stdout
    assert [line["step"] for line in run.metrics()] == list(range(1, TOTAL + 1))
    assert sorted(run.instances().values()) == [1] * (TOTAL * P)
    check_what_is_found(run)


def check_what_is_found(run: WholeRun) -> None:
    """The last check of a run finds a batch that is missing, and one that is there twice."""
    first, last = record_folder(run.folder, 1), record_folder(run.folder, TOTAL)
    with ledger_of(run.folder) as buffer:
        assert check_finished(buffer, run.folder, P) == []
        aside = run.scratch / "aside"
        shutil.move(last, aside)
        (late, missing, more, lines) = check_finished(buffer, run.folder, P)
        assert f"ledger has {TOTAL * P} groups as trained" in late
        assert f"of {TOTAL * P} groups, {TOTAL * P - P} are on disk" in missing
        assert f"{TOTAL * P - P}" in more and "metrics.jsonl" in lines
        shutil.copytree(first, last)
        plan = json.loads((last / PLAN_FILE).read_text())
        (last / PLAN_FILE).write_text(json.dumps({**plan, "policy_version": TOTAL}))
        found = check_finished(buffer, run.folder, P)
        assert sum("is trained 2 times" in line for line in found) == P
