"""An evaluation whose trainer is killed in the middle of it, with real vLLM, DeepSpeed and Redis."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tandem.services.run.json_files import EVALUATIONS_FILE, GENERATIONS_FOLDER, JsonLines
from tandem.services.trainer.evaluation import ROWS_PER_CALL
from tests.support.whole_run import WholeRun, service_process

BATCHES, PROMPTS, SAMPLES = 2, 60, 3
pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def test_an_evaluation_goes_on_after_its_trainer_was_killed_and_samples_only_what_is_missing(tmp_path: Path) -> None:
    """The policy plays episodes, whose environments note that they begin. Those of the last row begin only after the
    kill, so that the evaluation is not over before it.
    """
    held_out = {"name": "held_out", "file": str(tmp_path / "data" / "eval.parquet"), "limit": PROMPTS}
    run = WholeRun(
        tmp_path,
        run={"run_id": "evaluation", "total_batches": BATCHES},
        environment={
            "path": "tests.support.environments:HaltedStart",
            "arguments": {"halted": f"eval-held_out-{PROMPTS - 1}-", "marks": str(tmp_path)},
            "max_turns": 2,
            "max_turn_tokens": 8,
            "step_seconds": 120.0,
        },
        reward={"scorer": "earned"},
        eval={"sets": [{**held_out, "samples_per_prompt": SAMPLES}]},
    )
    file = run.folder / GENERATIONS_FOLDER / "000000" / "held_out.jsonl"

    def lines() -> list[str]:
        return file.read_text().splitlines() if file.exists() else []

    supervisor = run.start("run", str(run.recipe))
    run.wait_for(lambda: len(lines()) > ROWS_PER_CALL // 2 and (tmp_path / "halted").exists(), supervisor)
    service_process(supervisor, "trainer").kill()
    kept = lines()
    assert len(kept) < PROMPTS * SAMPLES, "it was not over"
    (tmp_path / "go").touch()
    run.wait_for(lambda: (run.folder / "summary.json").exists(), supervisor)
    assert supervisor.wait(30) == 0, (run.scratch / "run.out").read_text() + run.logs()
    complete = [line for line in kept if line.endswith("}")]
    assert lines()[: len(complete)] == complete, "what was sampled before is kept as it was"
    rows = JsonLines(file).read()
    samples = [(row["index"], row["sample"]) for row in rows if "index" in row]
    assert len(samples) == len(set(samples)) == PROMPTS * SAMPLES
    evaluations = JsonLines(run.folder / EVALUATIONS_FILE).read()
    assert [line["version"] for line in evaluations] == [0, BATCHES]
    assert all(line["sets"]["held_out"]["num_scored"] == PROMPTS * SAMPLES for line in evaluations)
    begun = Counter(call.rpartition("/")[0] for call in (tmp_path / "calls").read_text().splitlines())
    played = [f"reset {json.loads(line)['episode']['episode_id'].rpartition('/')[0]}" for line in complete]
    assert {begun[name] for name in played} == {len(evaluations)}, "once for each version"
    run.ledger()
