"""Predictions for a recipe from the rates of another run, and proposals for the split of a number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.protos.errors import UserError
from tandem.services.config import Recipe
from tandem.services.planning.calibration import Measured, setting_of
from tandem.services.planning.rates import GroupSize, Rates
from tandem.services.planning.simulation import Prediction, simulate

RANKS_EFFICIENCY = 0.9
"""Assumed: twice as many trainer ranks train 2 · 0.9 times as fast."""
WIDTH_EFFICIENCY = 0.7
"""Assumed: a sampler on twice as many GPUs makes steps 2 · 0.7 times as fast."""
ASSUMPTIONS = (
    f"Assumed: twice the trainer ranks train {2 * RANKS_EFFICIENCY:g} times as fast, a sampler on twice the GPUs steps "
    f"{2 * WIDTH_EFFICIENCY:g} times as fast, every service has processors of its own, and the answers are as long as "
    "in the measured run."
)
_MOST_WIDTH = 8
_GRID = 1.3  # between the numbers of samplers that are tried first
_BATCHES = 60
_NEARLY = 0.02  # among candidates this close in speed, the one with the least staleness and the fewest GPUs is best


@dataclass(frozen=True, slots=True)
class Candidate:
    """A split of GPUs, and what the simulation says about it."""

    ranks: int
    samplers: int
    width: int
    """GPUs of one sampler (`rollout.tensor_parallel_size`)."""
    prediction: Prediction

    @property
    def gpus(self) -> int:
        return self.ranks + self.samplers * self.width


def predict(measured: Measured, recipe: Recipe, *, num_batches: int = _BATCHES) -> Prediction:
    """What the recipe's ring would do with the rates and on the machine of the measured run."""
    return _predicted(measured, recipe, measured.processors, num_batches)


def _predicted(measured: Measured, recipe: Recipe, processors: float, num_batches: int = _BATCHES) -> Prediction:
    groups = resized(measured.groups, recipe.rollout.samples_per_prompt, recipe.rollout.max_response_tokens)
    setting = replace(setting_of(recipe), processors=processors)
    return simulate(setting, _scaled(measured, recipe), groups, num_batches=num_batches)


def candidates(measured: Measured, recipe: Recipe, gpus: int) -> list[Candidate]:
    """Simulated splits, the best first: a grid of them, then the neighbours of the fastest. Raises UserError if there
    are too few GPUs.
    """
    narrowest = recipe.rollout.tensor_parallel_size
    if gpus <= narrowest:
        raise UserError(
            f"{gpus} GPUs are too few: one trainer rank and one sampler of {narrowest} need {narrowest + 1}"
        )
    rows = recipe.run.groups_per_batch * recipe.rollout.samples_per_prompt
    most_ranks = max(1, rows // recipe.trainer.optimizer_steps_per_batch)
    simulated: dict[tuple[int, int], Candidate] = {}

    def simulate_split(samplers: int, width: int) -> None:
        left = gpus - samplers * width
        if samplers > 0 and left > 0 and (samplers, width) not in simulated:
            split = min(left, most_ranks), samplers, width
            prediction = _predicted(measured, with_split(recipe, *split), math.inf)  # GPUs of several machines
            simulated[samplers, width] = Candidate(*split, prediction)

    width = narrowest
    while width <= max(_MOST_WIDTH, narrowest):
        for samplers in sorted({round(_GRID**power) for power in range(64)}):
            simulate_split(samplers, width)
        width *= 2
    best = max(simulated.values(), key=lambda one: one.prediction.steps_per_minute)
    for samplers in range(round(best.samplers / _GRID), round(best.samplers * _GRID) + 1):
        simulate_split(samplers, best.width)
    return _best_first(list(simulated.values()))


def _best_first(found: Sequence[Candidate]) -> list[Candidate]:
    """By speed; among those nearly as fast as the fastest, the one with the least staleness and fewest GPUs first."""
    fastest = max(one.prediction.steps_per_minute for one in found)

    def order(one: Candidate) -> tuple[bool, float, int, float]:
        prediction = one.prediction
        nearly = prediction.steps_per_minute >= (1.0 - _NEARLY) * fastest
        if nearly:
            return False, round(prediction.mean_staleness, 1), one.gpus, -prediction.steps_per_minute
        return True, -prediction.steps_per_minute, one.gpus, 0.0

    return sorted(found, key=order)


def with_split(recipe: Recipe, ranks: int, samplers: int, width: int) -> Recipe:
    """The recipe with another number of trainer ranks, counted as on one machine, and of samplers. A sampler
    holds no more groups than leave some for the others; one batch of the credits is with the trainer.
    """
    trainer = recipe.trainer.model_copy(update={"num_ranks": ranks, "num_nodes": 1})
    sampled_groups = max(1, recipe.run.staleness_budget) * recipe.run.groups_per_batch
    held = min(recipe.rollout.max_groups_in_flight, math.ceil(sampled_groups / samplers))
    changes = {"num_replicas": samplers, "tensor_parallel_size": width, "max_groups_in_flight": held}
    rollout = recipe.rollout.model_copy(update=changes)
    return recipe.model_copy(update={"trainer": trainer, "rollout": rollout})


def resized(groups: Sequence[GroupSize], samples: int, max_tokens: int) -> list[GroupSize]:
    """The groups with another number of answers, which repeat those that were measured, cut to `max_tokens`."""
    return [
        replace(
            size,
            answer_tokens=tuple(
                min(size.answer_tokens[number % len(size.answer_tokens)], max_tokens) for number in range(samples)
            ),
        )
        for size in groups
    ]


def _scaled(measured: Measured, recipe: Recipe) -> Rates:
    rates, before = measured.rates, measured.recipe
    ranks = recipe.trainer.num_ranks * recipe.trainer.num_nodes
    trainer = _slower(before.trainer.num_ranks * before.trainer.num_nodes, ranks, RANKS_EFFICIENCY)
    width = _slower(before.rollout.tensor_parallel_size, recipe.rollout.tensor_parallel_size, WIDTH_EFFICIENCY)
    return replace(
        rates,
        step_seconds=width * rates.step_seconds,
        row_seconds=width * rates.row_seconds,
        batch_seconds=trainer * rates.batch_seconds,
        token_seconds=trainer * rates.token_seconds,
        trainer_processors=rates.trainer_processors * recipe.trainer.num_ranks / before.trainer.num_ranks,
    )


def _slower(before: int, after: int, efficiency: float) -> float:
    """Factor of the time when `before` processors become `after`, with an efficiency for each doubling."""
    return before / after * math.pow(efficiency, math.log2(before / after))
