"""No configuration field accepts infinity or NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from tandem.services.config import Recipe
from tandem.services.config.recipe import ServiceConfig
from tandem.trainer.config import TrainerConfig


def parts_of(annotation: Any) -> Iterator[Any]:
    """An annotation and all types inside it."""
    yield annotation
    for part in get_args(annotation):
        yield from parts_of(part)


def models_below(*roots: type[BaseModel]) -> set[type[BaseModel]]:
    """The models, and the models of their fields, at any depth."""
    found: set[type[BaseModel]] = set()
    waiting = list(roots)
    while waiting:
        model = waiting.pop()
        if model not in found:
            found.add(model)
            parts = (part for info in model.model_fields.values() for part in parts_of(info.annotation))
            waiting += [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    return found


FIELDS = sorted(
    ((model, name) for model in models_below(Recipe, ServiceConfig) for name in model.model_fields),
    key=lambda field: (field[0].__name__, field[1]),
)
NUMBERS = [(model, name) for model, name in FIELDS if float in parts_of(model.model_fields[name].annotation)]


def faults_of(model: type[BaseModel], name: str, value: object) -> set[str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({name: value})
    return {fault["type"] for fault in caught.value.errors() if fault["loc"][0] == name}


def test_the_search_for_number_fields_finds_them() -> None:
    found = {f"{model.__name__}.{name}" for model, name in NUMBERS}
    wanted = {"TrainerConfig.learning_rate", "LoraOptions.alpha", "RewardConfig.timeout_seconds", "WeightOptions.high"}
    assert wanted <= found and len(found) > 40


@pytest.mark.parametrize(("model", "name"), NUMBERS, ids=lambda part: getattr(part, "__name__", part))
def test_infinite_and_nan_are_refused(model: type[BaseModel], name: str) -> None:
    several = any(
        part is tuple or getattr(part, "__origin__", None) is tuple
        for part in parts_of(model.model_fields[name].annotation)
    )
    for value in (math.inf, -math.inf, math.nan):
        assert "finite_number" in faults_of(model, name, (value, value) if several else value)


@pytest.mark.parametrize("betas", [(2.0, 0.9), (0.9, -1.0), (1.0, 0.9), (0.9, 1.0)])
def test_invalid_adam_betas_are_refused(betas: tuple[float, float]) -> None:
    assert faults_of(TrainerConfig, "adam_betas", betas) <= {"less_than", "greater_than_equal"}
