"""A run folder with the lines and records that a simulated ring would have written."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.protos.types import RowHeader, VersionSpan
from tandem.services.config import Recipe, dump_recipe
from tandem.services.planning.calibration import setting_of
from tandem.services.planning.rates import GroupSize, Rates
from tandem.services.planning.simulation import Ring
from tandem.services.run.json_files import METRICS_FILE
from tandem.trainer.batch.planning import plan_batch
from tandem.trainer.batch.record import PLAN_FILE, batch_to_json, record_folder


def write_simulated_run(recipe: Recipe, rates: Rates, groups: list[GroupSize], num_batches: int) -> Path:
    """Simulates the recipe's ring and writes its run folder, which it returns."""
    recipe.folder.mkdir(parents=True)
    (recipe.folder / "config.json").write_text(dump_recipe(recipe))
    setting = setting_of(recipe)
    lines, now, busy, trained = [], 1000.0, 0.0, 0.0
    for step, batch in enumerate(Ring(setting, rates, groups).run(num_batches), 1):
        sizes = [groups[number % len(groups)] for number in batch.groups]
        _write_plan(recipe, step, sizes, first=batch.groups[0])
        now += batch.seconds
        busy += batch.sampler_busy_seconds
        tokens = sum(size.trained_tokens for size in sizes)
        trained += rates.batch_seconds + rates.token_seconds * tokens + rates.publish_seconds
        evaluated = setting.evaluate_every and step > 1 and (step - 1) % setting.evaluate_every == 0
        lines.append(
            {
                "step": step,
                "time": now,
                "seconds_total": batch.seconds,
                "seconds_claim": batch.idle_seconds,
                "trainer_idle_seconds": batch.idle_seconds,
                "seconds_train": rates.batch_seconds + rates.token_seconds * tokens,
                "seconds_evaluate": rates.evaluation_seconds if evaluated else 0.0,
                "seconds_publish": rates.publish_seconds,
                "publication_seconds": rates.publication_seconds,
                "samplers_acknowledged": setting.samplers,
                "sampler_busy_seconds": busy,
                "sampler_idle_seconds": setting.samplers * (now - 1000.0) - busy,
                "scorer_busy_seconds": rates.score_seconds * len(sizes) * step,
                "weight_stall_seconds": rates.stall_seconds,
                "trainer_cpu_seconds": rates.trainer_processors * trained,
                "sampler_cpu_seconds": 0.75 * rates.sampler_processors * busy,
                "scorer_cpu_seconds": 0.25 * rates.sampler_processors * busy,
                "processors": 2,
                "staleness_mean": batch.staleness,
                "rejected_groups": 0,
            }
        )
    (recipe.folder / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return recipe.folder


def _write_plan(recipe: Recipe, step: int, sizes: list[GroupSize], *, first: int) -> None:
    ids = [f"0-{first + number}" for number in range(len(sizes))]
    spans = (VersionSpan(0, 1, 0),)
    headers = [
        RowHeader(
            *(group, row, 0, "policy", size.prompt_tokens + length, length, 1.0, spans, "length", 1.0),
            num_prompt_tokens=size.shared_tokens or size.prompt_tokens,
            prompt_digest=first + number,
        )
        for number, (group, size) in enumerate(zip(ids, sizes, strict=True))
        for row, length in enumerate(size.answer_tokens)
    ]
    batch = plan_batch(
        *(headers, ids),
        policy_version=step,
        incarnation=1,
        world_size=1,
        tokens_per_micro_batch=recipe.trainer.tokens_per_micro_batch,
        optimizer_steps=1,
        packings=("shared" if sizes[0].shared_tokens else "padded",),
    )
    folder = record_folder(recipe.folder, step)
    folder.mkdir(parents=True)
    (folder / PLAN_FILE).write_text(json.dumps(batch_to_json(batch)))
