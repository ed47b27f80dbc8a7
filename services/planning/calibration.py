"""The rates of a run, measured from its folder, with which other settings are simulated."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tandem.protos.errors import UserError
from tandem.protos.types import RowHeader
from tandem.services.config import Recipe, load_resolved
from tandem.services.planning.observation import Batch, batches_of
from tandem.services.planning.rates import GroupSize, Rates, Setting
from tandem.services.planning.simulation import Ring
from tandem.services.run.folder import CONFIG_FILE
from tandem.services.run.json_files import METRICS_FILE, JsonLines
from tandem.trainer.batch.record import read_plan, recorded_versions

LEAST_BATCHES = 8
"""Batches that a measurement needs."""
WARM_UP_BATCHES = 3
"""First batches, in which engines compile and caches fill. They do not count."""
_MOST_BATCHES = 200
_ROUNDS = 4
_LEAST_APART = 0.05  # batches whose tokens differ by a smaller share of their mean do not tell a slope

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """A run that was measured: its recipe, its rates, and the sizes of its groups in the order of training."""

    recipe: Recipe
    rates: Rates
    groups: tuple[GroupSize, ...]
    num_batches: int
    steps_per_minute: float
    processors: float
    """Of the trainer's machine; infinite if the run did not record them."""


def measure(folder: Path) -> Measured:
    """The rates of the run in a folder. Raises UserError if it has too few batches."""
    recipe = load_resolved(folder / CONFIG_FILE)
    recorded = set(recorded_versions(folder))  # run.keep_batches may have removed the first ones
    lines = [line for line in JsonLines(folder / METRICS_FILE).read() if line["step"] in recorded]
    steady = lines[WARM_UP_BATCHES - 1 :][-_MOST_BATCHES:]
    batches = batches_of(steady, recipe)
    if len(batches) < LEAST_BATCHES:
        raise UserError(
            f"{folder}: {len(lines)} batches are too few to measure rates; run at least "
            f"{LEAST_BATCHES + WARM_UP_BATCHES} (run.total_batches)"
        )
    samplers = max(1, round(float(np.median([batch.samplers for batch in batches]))))  # they may have been scaled
    rollout = recipe.rollout.model_copy(update={"num_replicas": samplers})
    recipe = recipe.model_copy(update={"rollout": rollout})
    sizes = [_sizes(folder, batch.step) for batch in batches]
    groups = tuple(size for batch in sizes for size in batch)
    setting = setting_of(recipe)
    rates = _trainer_rates(batches, steady[1:], sizes, setting, recipe.trainer.num_ranks)
    if not recipe.weights.sends_snapshots:
        rates = replace(rates, publication_seconds=0.0)  # the trainer publishes by itself, in `publish_seconds`
    rates = _sampler_rates(rates, setting, batches, groups)
    seconds = sum(batch.seconds for batch in batches)
    processors = steady[-1].get("processors")
    return Measured(
        *(recipe, rates, groups, len(batches), 60.0 * len(batches) / seconds),
        processors=float(processors) if isinstance(processors, int | float) else math.inf,
    )


def setting_of(recipe: Recipe) -> Setting:
    """The ring of a recipe."""
    trainer = recipe.trainer
    return Setting(
        recipe.run.groups_per_batch,
        recipe.run.staleness_budget,
        samplers=max(1, recipe.rollout.num_replicas),
        groups_in_flight=recipe.rollout.max_groups_in_flight,
        evaluate_every=trainer.evaluate_every,
        output_every=min(recipe.checkpoint_every, trainer.export_every or recipe.checkpoint_every),
    )


def _sizes(folder: Path, version: int) -> list[GroupSize]:
    """The groups of a recorded batch in its order. A trajectory of several segments counts as one answer."""
    plan = read_plan(folder, version)
    first: dict[str, RowHeader] = {}
    answers: dict[str, defaultdict[int, int]] = {}
    for header in plan.headers:
        first.setdefault(header.group_id, header)
        answers.setdefault(header.group_id, defaultdict(int))[header.trajectory_id] += max(1, header.num_loss_tokens)
    is_shared = plan.packing == "shared"
    return [
        GroupSize(
            row.num_tokens - row.num_loss_tokens,
            tuple(answers[row.group_id].values()),
            row.num_prompt_tokens if is_shared else 0,
        )
        for row in map(first.__getitem__, plan.group_ids)
    ]


def _trainer_rates(
    batches: Sequence[Batch],
    lines: Sequence[Mapping[str, object]],
    sizes: Sequence[Sequence[GroupSize]],
    setting: Setting,
    num_ranks: int,
) -> Rates:
    """The rates of trainer and reward service, without those of the samplers."""

    def figure(line: Mapping[str, object], name: str) -> float:
        value = line.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    def after_due(seconds: Sequence[float], every: int) -> float:
        """The mean over the batches that follow a version at which something was due."""
        due = [one for one, batch in zip(seconds, batches, strict=True) if every and (batch.step - 1) % every == 0]
        return float(np.mean(due)) if due else 0.0

    by_step = {line["step"]: line for line in lines}
    found = [by_step[batch.step] for batch in batches]
    publish, waits = (
        np.array([figure(line, f"seconds_{phase}") for line in found]) for phase in ("publish", "acknowledge")
    )
    work = np.array([batch.work_seconds for batch in batches]) - publish - waits
    tokens = np.array([sum(size.trained_tokens for size in batch) for batch in sizes], np.float64)
    intercept, slope = _fitted_line(tokens, np.maximum(work, 0.0))
    evaluations = [figure(line, "seconds_evaluate") for line in found]
    outputs = [batch.paused_seconds - seconds for batch, seconds in zip(batches, evaluations, strict=True)]
    num_groups = sum(len(batch) for batch in sizes)
    rejected = sum(figure(line, "rejected_groups") for line in found)
    return Rates(
        step_seconds=0.0,
        row_seconds=0.0,
        batch_seconds=intercept + float(np.median(outputs)),
        token_seconds=slope,
        publish_seconds=float(publish.mean()),
        publication_seconds=float(np.mean([figure(line, "publication_seconds") for line in found])),
        stall_seconds=float(np.mean([figure(line, "weight_stall_seconds") for line in found])),
        score_seconds=sum(batch.scorer_busy_seconds for batch in batches) / num_groups,
        evaluation_seconds=after_due(evaluations, setting.evaluate_every),
        output_seconds=max(0.0, after_due(outputs, setting.output_every) - float(np.median(outputs))),
        rejected_fraction=rejected / (num_groups + rejected),
        trainer_processors=num_ranks
        * _ratio([one.trainer_cpu_seconds for one in batches], [one.work_seconds for one in batches]),
        sampler_processors=_ratio(
            [one.serving_cpu_seconds for one in batches], [one.sampler_busy_seconds for one in batches]
        ),
    )


def _sampler_rates(rates: Rates, setting: Setting, batches: Sequence[Batch], groups: Sequence[GroupSize]) -> Rates:
    """Finds the time of an engine step. How many steps a batch took is not recorded, so the run is simulated with its
    own answers, and busy seconds are fitted to the simulated steps and tokens of each batch, a few times.
    """
    busy = np.array([batch.sampler_busy_seconds for batch in batches])
    longest = sum(max(size.answer_tokens) for size in groups)
    rates = replace(rates, step_seconds=float(busy.sum()) / longest)
    for _ in range(_ROUNDS):
        simulated = Ring(setting, rates, groups).run(len(batches))
        steps = np.array([batch.sampler_steps for batch in simulated])
        tokens = np.array([batch.sampled_tokens for batch in simulated])
        per_step, per_token = _fitted_plane(steps, tokens, busy)
        rates = replace(rates, step_seconds=per_step, row_seconds=per_token)
    return rates


def _ratio(seconds: Sequence[float], of: Sequence[float]) -> float:
    return sum(seconds) / max(1e-9, sum(of))


def _fitted_line(x: Floats, y: Floats) -> tuple[float, float]:
    """Intercept and slope, both at least 0, scaled to the mean of y. The slope is the median of the slopes between all
    pairs of points (Theil and Sen), so a few batches that something delayed change little.
    """
    first, second = np.triu_indices(len(x), 1)
    apart = np.abs(x[first] - x[second]) > _LEAST_APART * x.mean()
    if apart.sum() < len(x):
        return 0.0, float(y.sum() / x.sum())  # batches of one size: time is taken as proportional
    slope = max(0.0, float(np.median((y[first] - y[second])[apart] / (x[first] - x[second])[apart])))
    intercept = max(0.0, float(np.median(y - slope * x)))
    scale = float(y.sum()) / max(1e-12, intercept * len(x) + slope * float(x.sum()))
    return scale * intercept, scale * slope


def _fitted_plane(steps: Floats, tokens: Floats, seconds: Floats) -> tuple[float, float]:
    """Seconds per step and per token, both at least 0, such that all steps and tokens together take all seconds."""
    found, *_ = np.linalg.lstsq(np.stack([steps, tokens], axis=1), seconds, rcond=None)
    per_step, per_token = (float(value) for value in found)
    if per_token < 0.0:
        per_step, per_token = 1.0, 0.0
    elif per_step < 0.0:
        per_step, per_token = 0.0, 1.0
    scale = float(seconds.sum()) / (per_step * float(steps.sum()) + per_token * float(tokens.sum()))
    return scale * per_step, scale * per_token
