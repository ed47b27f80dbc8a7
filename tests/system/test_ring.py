"""A ring of real components: Redis, gRPC, vLLM, DeepSpeed and weight broadcasts, on the tiny model."""

from __future__ import annotations

import json
import operator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tandem.trainer.batch.record import read_plan, recorded_versions
from tests.support.whole_run import WholeRun

TOTAL, P, N, S = 6, 4, 4, 2
SAMPLED = {"every": 2, "samples_per_prompt": 2, "limit": 8, "top_p": 0.9, "scorer": "exact"}


@pytest.mark.timeout(240)
def test_a_small_run_trains_every_batch(tmp_path: Path) -> None:
    run = WholeRun(
        tmp_path,
        run={"run_id": "ring", "total_batches": TOTAL, "groups_per_batch": P, "staleness_budget": S},
        data={"eval_file": str(tmp_path / "few.parquet")},
        rollout={"samples_per_prompt": N, "max_response_tokens": 32, "top_k": 60, "top_p": 0.95},
        trainer={"learning_rate": 1e-3, "evaluate_every": 3, "export_every": 3, "checkpoint_every": 3},
        eval={
            "sets": [{"name": "sampled", "file": str(tmp_path / "few.parquet"), **SAMPLED}],
            "keep_best": "eval/few/mean_reward",
        },
    )
    pq.write_table(pq.read_table(tmp_path / "data" / "eval.parquet").slice(0, 70), tmp_path / "few.parquet")
    run.finish()

    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, TOTAL + 1))
    assert all(line["num_groups"] == P and line["staleness_max"] <= S + 1 for line in lines)
    assert all(line["samplers_acknowledged"] == 1 and line["weight_stall_seconds"] > 0 for line in lines[1:])
    assert len({line["weights_digest"] for line in lines}) == TOTAL, "every batch changed the weights"
    assert all(line["num_loss_tokens"] > 0 for line in lines)
    sampled = [line["sampler_tokens"] for line in lines]
    trained = list(accumulate(line["num_loss_tokens"] for line in lines))
    assert sampled == sorted(sampled) and all(map(operator.ge, sampled, trained)), (
        "samplers report before they complete"
    )

    evaluations = [json.loads(text) for text in (run.folder / "evaluations.jsonl").read_text().splitlines()]
    check_evaluations(run, evaluations)

    summary = run.summary()
    assert (summary["train_steps"], summary["weight_updates"]) == (TOTAL, TOTAL)
    assert summary["initial_accuracy"] is not None
    assert summary["final_accuracy"] is not None
    assert summary["groups"]["committed"] == summary["groups"]["admitted"] == TOTAL * P
    assert 0 < summary["sampler_idle_fraction"] < 1
    assert summary["sampler_tokens_per_second"] > 0

    assert recorded_versions(run.folder) == list(range(1, TOTAL + 1))
    assert len(read_plan(run.folder, 1).plan) == P * N
    assert (run.folder / "exports" / "000003" / "model.safetensors").exists()
    assert sorted(folder.name for folder in (run.folder / "checkpoints").iterdir()) == ["000003-1", "000006-1"]
    assert list((run.folder / "tensorboard").iterdir())
    segments = [segment for _, row in run.trained_rows() for segment in row.trajectory.segments]
    masks = [segment.sampling_mask for segment in segments if segment.sampling_mask is not None]
    assert len(masks) == len(segments) and 1 < max(mask.counts.max() for mask in masks) <= 60
    assert lines[0]["behavior_proximal_kl"] < 1e-6, "fresh samples"
    spans = [span for segment in segments for span in segment.spans]
    assert {span.incarnation for span in spans} == {1}
    assert min(span.policy_version for span in spans) == 0 < max(span.policy_version for span in spans)


def check_evaluations(run: WholeRun, evaluations: list[dict[str, Any]]) -> None:
    sets = [(evaluation["version"], *evaluation["sets"]) for evaluation in evaluations]
    assert sets == [(0, "few", "sampled"), (2, "sampled"), (3, "few"), (4, "sampled"), (6, "few", "sampled")]
    for evaluation in evaluations:
        for name, one in evaluation["sets"].items():
            assert one["num_scored"] == one["num_samples"] == {"few": 70, "sampled": 16}[name]
            file = run.folder / "evaluations" / f"{evaluation['version']:06d}" / f"{name}.jsonl"
            rows = [json.loads(text) for text in file.read_text().splitlines()]
            assert len(rows) == one["num_samples"]
            assert one["accuracy"] == pytest.approx(sum(row["correct"] for row in rows) / len(rows))
    answers = {row["answer"] for row in rows if row["index"] == 0}
    assert len(answers) == 2, "the samples of a prompt have random numbers of their own"

    rewards = {one["version"]: one["mean_reward"] for one in evaluations if "few" in one["sets"]}
    (best,) = (run.folder / "best").iterdir()
    assert best.name == f"{max((3, 6), key=lambda version: rewards[version]):06d}"
    assert (best / "model.safetensors").exists()
