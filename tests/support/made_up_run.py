"""A run folder as a run would leave it: recipe, metrics, evaluations and recorded batches with hostile answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.protos.codec import EncodedGroups, encode_group
from tandem.protos.types import TrajectoryGroup
from tandem.services.config import dump_recipe
from tandem.trainer.batch.record import write_record
from tests.support.run_inputs import recipe_of, small_values
from tests.support.training_groups import make_batch, make_group

ANSWER = "<script>alert('answer')</script> \x1b[31mred"


def line(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl: a batch every two seconds, of which the samplers generate for 1.5 s."""
    shares = {f"behavior_weight_share_{number}": float(number == step) for number in range(7)}
    return {
        "step": step,
        "time": 1000.0 + 2 * step,
        "seconds_claim": 0.5,
        "seconds_train": 1.25,
        "seconds_total": 2.0,
        "trainer_idle_seconds": 0.5,
        "reward_mean": 0.25 * step,
        "staleness_mean": 1.0,
        "staleness_max": 1,
        "staleness_counts": [1, 3],
        "num_tokens": 4000,
        "sampler_tokens": 6000.0 * step,
        "sampler_busy_seconds": 1.5 * step,
        "sampler_idle_seconds": 0.5 * step,
        "scorer_busy_seconds": 0.5 * step,
        "staleness_1/num_loss_tokens": 100.0,
        **{f"staleness_1/{name}": share for name, share in shares.items()},
    }


def evaluation_line(version: int, accuracy: float | None, **metrics: float) -> dict[str, Any]:
    """A line of evaluations.jsonl with one set, `test`. Without an accuracy its evaluation failed."""
    values = {} if accuracy is None else {"mean@1": accuracy, "mean_reward": accuracy, "pass@1": accuracy, **metrics}
    num_scored = 0 if accuracy is None else 8
    one = {
        "num_prompts": 8,
        "num_samples": 8,
        "num_scored": num_scored,
        "num_truncated": 1,
        "num_no_answer": 0,
        "unscored": {} if num_scored else {"timeout": 8},
        "failed": "" if num_scored else "0 of 8 samples have a score, fewer than eval.min_scored = 0.9: 8 timeout",
        "accuracy": accuracy,
        "metrics": values,
        "intervals": {name: [value, value] for name, value in values.items()},
        "data_sources": {"openai/gsm8k": {"num_prompts": 8, **values}} if values else {},
    }
    return {"version": version, "accuracy": accuracy, "mean_reward": accuracy, "sets": {"test": one}}


def answered(group: TrajectoryGroup, text: str) -> TrajectoryGroup:
    rows = [replace(row, trajectory=replace(row.trajectory, text=text)) for row in group.scored_rows]
    prompt = replace(group.prompt, messages=({"role": "user", "content": "What is <b>1 + 1</b>?"},))
    return replace(group, rows=tuple(rows), prompt=prompt)


def make_run(folder: Path, run_id: str, *, steps: int = 3, redis_url: str = "", **trainer: Any) -> Path:
    values = small_values(folder)
    run = folder / run_id
    url = redis_url or f"redis://:secret-of-{run_id}@127.0.0.1:1/0"
    recipe = recipe_of(values, run={"run_id": run_id, "folder": str(run), "redis_url": url}, trainer=trainer)
    run.mkdir()
    (run / "config.json").write_text(dump_recipe(recipe))
    lines = [json.dumps(line(step)) + "\n" for step in range(1, steps + 1)]
    (run / "metrics.jsonl").write_text("".join(lines))
    evaluations = [evaluation_line(0, 0.25), evaluation_line(2, None), evaluation_line(3, 0.75)]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(one) + "\n" for one in evaluations))
    for version in range(1, steps + 1):
        groups = [answered(make_group(index, rewards=[0.5, 0.0, 0.5, 1.0]), ANSWER) for index in range(4)]
        batch = replace(make_batch(groups)[0], policy_version=version)
        write_record(run, batch, EncodedGroups.of({group.group_id: encode_group(group) for group in groups}))
    return run
